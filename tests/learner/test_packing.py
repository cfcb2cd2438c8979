import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.learner import Experience, of_group, pack
from arl_jax.learner.packing import assign_rows
from arl_jax.losses import reduce
from arl_jax.types import (
  NO_VERSION,
  Episode,
  Group,
  Reward,
  Role,
  Segment,
  StopReason,
  Task,
)


def _segment(ids, sampled, **fields):
  ids = np.array(ids, np.int32)
  sampled = np.array(sampled, bool)
  return Segment(
    ids=ids,
    roles=np.where(sampled, Role.SAMPLED, Role.PROMPT).astype(np.uint8),
    sampled=sampled,
    behaviour_logp=np.where(sampled, -0.01 * ids, 0).astype(np.float32),
    policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
    **fields,
  )


def _experience(*segments, advantage=1.0):
  return Experience(segments=segments, advantage=advantage)


def _experts(length, layers=1):
  return np.arange(2 * layers * length, dtype=np.int32).reshape(length, -1, 2)


# Of each segment its mask, whether it is trainable and has recorded experts.
_MASKS = st.lists(st.booleans(), min_size=1, max_size=12)
_PARTS = st.lists(st.tuples(_MASKS, st.booleans(), st.booleans()), max_size=4)


def _numbered(episodes):
  """Episodes whose ids are all different, so that tokens can be counted."""
  found, at = [], 1
  for episode in episodes:
    segments = []
    for mask, trainable, recorded in episode:
      experts = _experts(len(mask)) if recorded else None
      fields = {"trainable": trainable, "experts": experts}
      segments.append(_segment(range(at, at + len(mask)), mask, **fields))
      at += len(mask)
    found.append(_experience(*segments, advantage=float(len(found))))
  return found


@settings(max_examples=100, deadline=None)
@given(
  st.lists(_PARTS, min_size=1),
  st.integers(12, 30),
  st.integers(1, 4),
  st.booleans(),
)
def test_each_trained_token_is_packed_exactly_once(parts, length, rows, mixed):
  found = _numbered(parts)
  trained = [s.ids[s.trained] for e in found for s in e.segments]
  trained = np.concatenate([*trained, np.zeros(0, np.int32)])
  how = {"row_length": length, "microbatch_rows": rows}
  how["seed"] = 3 if mixed else None
  if not trained.size:
    with pytest.raises(ValueError, match="no segment holds a trained token"):
      pack(found, **how)
    return
  batch, stats = pack(found, **how)
  assert sorted(batch.ids[batch.mask]) == sorted(trained)
  assert stats.trained_tokens == trained.size
  assert not batch.mask[batch.segment_ids == 0].any()

  micro, *shape = batch.ids.shape
  assert shape == [rows, length]
  assert micro & (micro - 1) == 0
  assert micro // 2 < batch.microbatches <= micro
  assert not batch.segment_ids[int(batch.microbatches) :].any()

  assert batch.episodes == len(found)
  assert batch.trained_episodes == sum(e.trained_tokens > 0 for e in found)
  # Each episode weighs one, however many segments it has.
  weight = batch.episode_weight
  np.testing.assert_allclose(weight.sum(), batch.trained_episodes, rtol=1e-5)
  assert not weight[~batch.mask].any()

  _assert_whole(batch, stats, found, length)


def _assert_whole(batch, stats, found, length):
  """Every segment lies whole, in order and under one number in a row."""
  flat = {
    k: v.reshape(-1, length, *v.shape[3:])
    for k, v in vars(batch).items()
    if np.ndim(v)
  }
  count = 0
  for experience in found:
    for segment in experience.segments:
      where = np.argwhere(
        (flat["ids"] == segment.ids[0]) & (flat["segment_ids"] > 0)
      )
      if not segment.trained.any():
        assert not where.size
        continue
      ((row, first),) = where
      part = {k: v[row, first : first + len(segment)] for k, v in flat.items()}
      np.testing.assert_array_equal(part["ids"], segment.ids)
      np.testing.assert_array_equal(part["mask"], segment.trained)
      np.testing.assert_array_equal(
        part["behaviour_logp"], segment.behaviour_logp
      )
      assert (part["advantage"] == experience.advantage).all()
      np.testing.assert_allclose(
        part["episode_weight"],
        segment.trained / experience.trained_tokens,
        rtol=1e-6,
      )
      if segment.experts is not None:
        np.testing.assert_array_equal(part["experts"], segment.experts)
      elif "experts" in part:
        assert (part["experts"] == -1).all()
      (number,) = set(part["segment_ids"])
      assert (flat["segment_ids"][row] == number).sum() == len(segment)
      count += 1
  assert stats.segments == count
  assert stats.tokens == (batch.segment_ids > 0).sum()
  assert stats.fill == pytest.approx(stats.tokens / (stats.rows * length))
  if "experts" in flat:
    assert (flat["experts"][flat["segment_ids"] == 0] == -1).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 40))
def test_rows_hold_every_segment_once_and_no_more_than_fits(lengths, row):
  rows = assign_rows(lengths, row)
  assert sorted(i for r in rows for i in r) == list(range(len(lengths)))
  assert all(0 < sum(lengths[i] for i in r) <= row for r in rows)
  # Any two rows hold more than one row could: none is wasted.
  totals = sorted(sum(lengths[i] for i in r) for r in rows)
  assert len(totals) < 2 or totals[0] + totals[1] > row


def test_segment_longer_than_a_row_is_refused():
  found = [_experience(_segment(range(9), [True] * 9))]
  with pytest.raises(ValueError, match=r"9 tokens .* row of 8"):
    pack(found, row_length=8, microbatch_rows=1)
  # One that fills a row exactly fits.
  _, stats = pack(found, row_length=9, microbatch_rows=1)
  assert stats.fill == 1.0


def test_long_segment_without_a_trained_token_is_no_error():
  long = _segment(range(9), [False] * 9)
  found = [_experience(long, _segment([1, 2], [False, True]))]
  _, stats = pack(found, row_length=8, microbatch_rows=1)
  assert stats.segments == 1


def test_frozen_agents_are_not_packed():
  frozen = _segment([1, 2], [False, True], trainable=False)
  own = _segment([3, 4, 5], [False, True, True])
  with pytest.raises(ValueError, match="no segment holds a trained token"):
    pack([_experience(frozen)], row_length=8, microbatch_rows=1)
  # Nor do they count in the weight of an episode's own tokens.
  batch, _ = pack([_experience(frozen, own)], row_length=8, microbatch_rows=1)
  np.testing.assert_array_equal(
    batch.episode_weight[0, 0], [0, 0.5, 0.5, 0, 0, 0, 0, 0]
  )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_advantage_that_is_not_finite_is_refused(bad):
  good = _experience(_segment([1], [True]))
  worse = _experience(_segment([1], [True]), advantage=bad)
  with pytest.raises(ValueError, match=f"experience 1 is {bad}, not within"):
    pack([good, worse], row_length=8, microbatch_rows=1)


def test_temperature_is_that_of_the_segment():
  found = [
    _experience(_segment([1, 2, 3], [False, True, True], temperature=0.5)),
    _experience(_segment([4, 5], [False, True], temperature=2.0)),
  ]
  batch, _ = pack(found, row_length=8, microbatch_rows=1)
  np.testing.assert_array_equal(
    batch.temperature[0, 0], [0.5, 0.5, 0.5, 2, 2, 1, 1, 1]
  )


def test_experts_are_free_where_nobody_recorded_them():
  found = [
    _experience(_segment([1, 2, 3], [0, 1, 1], experts=_experts(3, 2))),
    _experience(_segment([4, 5], [0, 1])),
  ]
  batch, _ = pack(found, row_length=6, microbatch_rows=1)
  assert batch.experts.shape == (1, 1, 6, 2, 2)
  np.testing.assert_array_equal(batch.experts[0, 0, :3], _experts(3, 2))
  assert (batch.experts[0, 0, 3:] == -1).all()
  silent, _ = pack(found[1:], row_length=6, microbatch_rows=1)
  assert silent.experts is None


def test_experts_of_unlike_models_are_refused():
  found = [
    _experience(_segment([1, 2], [0, 1], experts=_experts(2, layers)))
    for layers in (1, 2)
  ]
  with pytest.raises(ValueError, match=r"\[\(1, 2\), \(2, 2\)\] \(layers, K\)"):
    pack(found, row_length=8, microbatch_rows=1)


def test_weight_of_an_episode_spans_its_rows():
  # Three segments of one episode, 1 + 2 + 3 trained tokens; none fit together.
  segments = [_segment(range(5), [0] * (5 - n) + [1] * n) for n in (1, 2, 3)]
  other = _segment(range(6), [0, 0, 0, 0, 1, 1])
  silent = _segment(range(4), [0] * 4)
  found = [_experience(*segments), _experience(silent), _experience(other)]
  batch, stats = pack(found, row_length=6, microbatch_rows=2)
  assert stats.rows == 4
  assert (batch.episodes, batch.trained_episodes) == (3, 2)
  weights = batch.episode_weight.reshape(4, 6)
  per_row = sorted((w[w > 0].tolist() for w in weights), key=len)
  want = [[1 / 6], [1 / 6] * 2, [1 / 2] * 2, [1 / 6] * 3]
  for got in want:
    assert any(row == pytest.approx(got) for row in per_row)
  assert weights.sum() == pytest.approx(2)


@pytest.mark.parametrize("how", ["sequence_mean", "constant_length"])
def test_reduction_of_packed_episodes_is_that_of_rows(how):
  # Each episode in a row of its own, as golden values have them, and packed.
  draw = np.random.default_rng(0)
  masks = [draw.random(n) < 0.6 for n in (5, 3, 7, 1, 4, 6, 2)]
  masks[3][:] = True
  parts = [masks[:3], masks[3:4], [np.zeros(4, bool)], masks[4:]]
  at, found, rows = 1, [], np.zeros((4, 20), bool)
  terms = np.zeros((4, 20))
  for i, episode in enumerate(parts):
    segments, length = [], sum(map(len, episode))
    for mask in episode:
      segments.append(_segment(range(at, at + len(mask)), mask))
      at += len(mask)
    found.append(_experience(*segments))
    rows[i, :length] = np.concatenate(episode)
    terms[i, :length] = np.arange(at - length, at)
  batch, stats = pack(found, row_length=8, microbatch_rows=8)
  assert stats.rows > 2

  def value(terms, mask, **counts):
    terms, mask = jnp.asarray(terms, jnp.float32), jnp.asarray(mask)
    counts = {k: jnp.asarray(v) for k, v in counts.items()}
    n, d = reduce(terms, mask, how=how, constant_length=16, **counts)
    return float(n), float(d)

  trained = how == "sequence_mean"
  got = value(
    batch.ids[0],
    batch.mask[0],
    episode_weight=batch.episode_weight[0],
    episodes=batch.trained_episodes if trained else batch.episodes,
  )
  assert got == pytest.approx(value(terms, rows), rel=1e-6)


def test_seed_decides_the_order_of_rows():
  found = [_experience(_segment([i] * 4, [True] * 4)) for i in range(1, 9)]

  def rows(seed):
    batch, _ = pack(found, row_length=4, microbatch_rows=2, seed=seed)
    return batch.ids[:, :, 0].ravel().tolist()

  assert rows(None) == list(range(1, 9))
  orders = [rows(seed) for seed in range(4)]
  assert rows(2) == orders[2]
  assert len({tuple(o) for o in orders}) > 2
  assert all(sorted(o) == list(range(1, 9)) for o in orders)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_every_segment_of_an_episode_carries_its_advantage(count):
  segments = [_segment([i, i + 1], [False, True]) for i in range(count)]
  found = [_experience(*segments, advantage=0.7)]
  batch, _ = pack(found, row_length=8, microbatch_rows=2)
  assert batch.mask.sum() == count
  np.testing.assert_array_equal(
    batch.advantage[batch.mask], np.full(count, 0.7, np.float32)
  )
  np.testing.assert_allclose(batch.episode_weight[batch.mask], 1 / count)


def _group(rewards):
  episodes = [
    Episode(
      task_id="t",
      rollout_index=i,
      segments=(_segment([i], [True]), _segment([i, i], [False, True])),
      events=(),
      stop_reason=StopReason.ANSWERED,
      outcome={},
      turns=1,
      reward=None if r is None else Reward(total=r),
    )
    for i, r in enumerate(rewards)
  ]
  task = Task(task_id="t", prompt="", truth={})
  return Group(group_id="g", task=task, episodes=tuple(episodes))


def test_experience_of_a_group_has_the_advantage_of_its_rollout():
  # Rewards around their mean of 2, or around those of the others.
  group = _group([1.0, 2.0, 3.0])
  for baseline, want in (
    ("mean", [-1, 0, 1]),
    ("leave_one_out", [-1.5, 0, 1.5]),
  ):
    found = of_group(group, baseline=baseline)
    assert [e.advantage for e in found] == pytest.approx(want)
    for experience, episode in zip(found, group.episodes, strict=True):
      assert experience.segments == episode.segments
      assert experience.trained_tokens == 2
  # Over the population's standard deviation, sqrt(2/3).
  scaled = of_group(group, normalise_std=True)
  assert scaled[2].advantage == pytest.approx(1.5**0.5, rel=1e-5)


def test_group_with_an_unscored_episode_is_refused():
  with pytest.raises(ValueError, match="unscored episode"):
    of_group(_group([1.0, None]))
