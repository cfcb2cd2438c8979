import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.learner.packing import assign_rows, pack
from arl_jax.types import NO_VERSION, Role, Segment


def _segment(ids, sampled, *, temperature=1.0, trainable=True):
  ids = np.array(ids, np.int32)
  sampled = np.array(sampled, bool)
  return Segment(
    ids=ids,
    roles=np.where(sampled, Role.SAMPLED, Role.PROMPT).astype(np.uint8),
    sampled=sampled,
    behaviour_logp=np.where(sampled, -0.01 * ids, 0).astype(np.float32),
    policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
    temperature=temperature,
    trainable=trainable,
  )


@st.composite
def _segments(draw):
  """Segments whose ids are all different, so that tokens can be counted."""
  masks = draw(
    st.lists(
      st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=12
    )
  )
  segments, at = [], 1
  for mask in masks:
    segments.append(
      _segment(range(at, at + len(mask)), mask, trainable=draw(st.booleans()))
    )
    at += len(mask)
  return segments


@settings(max_examples=100, deadline=None)
@given(_segments(), st.integers(12, 30), st.integers(1, 4))
def test_each_trained_token_is_packed_exactly_once(segments, length, rows):
  trained = np.concatenate([s.ids[s.trained] for s in segments])
  advantages = [float(i) for i in range(len(segments))]
  if not trained.size:
    with pytest.raises(ValueError, match="no segment holds a trained token"):
      pack(segments, advantages, row_length=length, microbatch_rows=rows)
    return
  batch, stats = pack(
    segments, advantages, row_length=length, microbatch_rows=rows
  )
  assert sorted(batch.ids[batch.mask]) == sorted(trained)
  assert stats.trained_tokens == trained.size
  assert not batch.mask[batch.segment_ids == 0].any()

  micro, *shape = batch.ids.shape
  assert shape == [rows, length]
  assert micro & (micro - 1) == 0
  assert micro // 2 < batch.microbatches <= micro
  assert not batch.segment_ids[int(batch.microbatches) :].any()

  # Every packed segment lies whole, in order and under one number in a row.
  found = 0
  flat = {f: getattr(batch, f).reshape(-1, length) for f in _ARRAYS}
  for i, segment in enumerate(segments):
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
    assert (part["advantage"] == advantages[i]).all()
    (number,) = set(part["segment_ids"])
    assert (flat["segment_ids"][row] == number).sum() == len(segment)
    found += 1
  assert stats.segments == found
  assert stats.tokens == (batch.segment_ids > 0).sum()
  assert stats.fill == pytest.approx(stats.tokens / (stats.rows * length))


_ARRAYS = ("ids", "segment_ids", "mask", "behaviour_logp", "advantage")


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
  segments = [_segment(range(9), [True] * 9)]
  with pytest.raises(ValueError, match=r"9 tokens .* row of 8"):
    pack(segments, [1.0], row_length=8, microbatch_rows=1)
  # One that fills a row exactly fits.
  _, stats = pack(segments, [1.0], row_length=9, microbatch_rows=1)
  assert stats.fill == 1.0


def test_long_segment_without_a_trained_token_is_no_error():
  segments = [_segment(range(9), [False] * 9), _segment([1, 2], [False, True])]
  _, stats = pack(segments, [1.0, 1.0], row_length=8, microbatch_rows=1)
  assert stats.segments == 1


def test_frozen_agents_are_not_packed():
  frozen = _segment([1, 2], [False, True], trainable=False)
  with pytest.raises(ValueError, match="no segment holds a trained token"):
    pack([frozen], [1.0], row_length=8, microbatch_rows=1)


def test_every_segment_needs_an_advantage():
  with pytest.raises(ValueError, match="shorter"):
    pack([_segment([1], [True])], [], row_length=8, microbatch_rows=1)


def test_temperature_is_that_of_the_segment():
  segments = [
    _segment([1, 2, 3], [False, True, True], temperature=0.5),
    _segment([4, 5], [False, True], temperature=2.0),
  ]
  batch, _ = pack(segments, [1.0, 1.0], row_length=8, microbatch_rows=1)
  np.testing.assert_array_equal(
    batch.temperature[0, 0], [0.5, 0.5, 0.5, 2, 2, 1, 1, 1]
  )


@pytest.mark.parametrize("count", [1, 2, 40])
def test_every_segment_of_an_episode_carries_its_advantage(count):
  segments = [_segment([i, i + 1], [False, True]) for i in range(count)]
  batch, _ = pack(segments, [0.7] * count, row_length=8, microbatch_rows=2)
  assert batch.mask.sum() == count
  np.testing.assert_array_equal(
    batch.advantage[batch.mask], np.full(count, 0.7, np.float32)
  )
