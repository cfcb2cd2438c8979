"""One update is the same however its batch is cut, and as derived by hand."""

import dataclasses

import jax
import numpy as np
import pytest

from arl_jax import losses
from arl_jax.learner import StepConfig, make_train_step, pack
from arl_jax.losses import by_name
from arl_jax.model import forward

# Terms of the routers weigh enough to be seen in the gradient.
_CONFIG = StepConfig(
  constant_length=8,
  balance_weight=0.1,
  z_weight=0.1,
  mtp_share=1.0,
  clip_norm=1e9,
)

# A loss of each kind for each reduction.
_REDUCED = {
  "token_mean": "cispo",
  "sequence_mean": "gspo(ratio_min=0.5, ratio_max=1.5)",
  "constant_length": "grpo",
}

# Whatever the cut, batches have this shape, so that a step is compiled once.
_SHAPE = (8, 4, 24)


@pytest.fixture(scope="module")
def model(models):
  return models["moe"]


@pytest.fixture(scope="module")
def params(model, params_of):
  return params_of(model)


@pytest.fixture(scope="module")
def packed(experiences):
  batch, stats = pack(experiences, row_length=16, microbatch_rows=4)
  assert stats.rows == 4
  return batch


def _rows(batch, change):
  """A batch of one microbatch, of rows [N, T, ...] changed by name."""
  arrays = {k: v for k, v in vars(batch).items() if np.ndim(v)}
  flat = {k: v.reshape(-1, *v.shape[2:]) for k, v in arrays.items()}
  return batch.replace(**{k: change(v)[None] for k, v in flat.items()})


def _cut(batch, rows):
  """So many rows of the batch in each microbatch, in the shape of all."""
  used = batch.segment_ids.any(-1).sum()
  count = -(-used // rows)

  def change(x):
    kept = x[:used]
    shape = (*_SHAPE, *x.shape[2:])
    out = np.zeros(shape, x.dtype)
    for i, row in enumerate(kept):
      out[i // rows, i % rows, : x.shape[1]] = row
    return out

  cut = _rows(batch, change)
  arrays = {k: v[0] for k, v in vars(cut).items() if np.ndim(v)}
  return cut.replace(**arrays, microbatches=np.int32(count))


def _unpacked(batch):
  """A row for each segment."""
  ids = batch.segment_ids.reshape(-1, batch.ids.shape[-1])
  found = [(r, n) for r in range(len(ids)) for n in sorted(set(ids[r]) - {0})]

  def change(x):
    rows = np.zeros((len(found), *x.shape[1:]), x.dtype)
    for i, (r, n) in enumerate(found):
      part = x[r][ids[r] == n]
      rows[i, : len(part)] = part
    return rows

  return _rows(batch, change)


@pytest.fixture(scope="module", params=_REDUCED)
def reduced(request, model, params, sgd, state_of, packed):
  """Name, batch -> (params, metrics), and those of the packed batch."""
  config = dataclasses.replace(_CONFIG, reduction=request.param)
  step = make_train_step(model, sgd, by_name(_REDUCED[request.param]), config)

  def run(batch):
    state, metrics = step(state_of(params, sgd), batch)
    return jax.device_get((state.params, metrics))

  return request.param, run, run(_cut(packed, 4))


@pytest.mark.parametrize("rows", [1, 2])
def test_update_does_not_depend_on_accumulation(
  reduced, packed, rows, assert_same_update
):
  _, run, want = reduced
  batch = _cut(packed, rows)
  assert batch.microbatches == 4 // rows
  assert_same_update(run(batch), want)


@pytest.mark.parametrize("rows", [1, 4])
def test_update_does_not_depend_on_packing(
  reduced, packed, rows, assert_same_update
):
  _, run, want = reduced
  batch = _unpacked(packed)
  assert batch.ids.shape == (1, 7, 16)
  assert_same_update(run(_cut(batch, rows)), want)


def test_update_does_not_depend_on_the_length_of_rows(
  reduced, experiences, packed, assert_same_update
):
  _, run, want = reduced
  batch, stats = pack(experiences, row_length=24, microbatch_rows=4)
  assert stats.rows == 3
  assert_same_update(run(_cut(batch, 4)), want)


@pytest.mark.parametrize("rows", [2, 4])
def test_update_does_not_depend_on_the_order_of_rows(
  reduced, packed, rows, assert_same_update
):
  _, run, want = reduced
  turned = _rows(packed, lambda x: x[[2, 0, 3, 1]])
  assert_same_update(run(_cut(turned, rows)), want)


def test_segments_without_trained_tokens_change_nothing(
  reduced, experiences, segment, assert_same_update
):
  _, run, want = reduced
  silent = tuple(segment(14, 90 + i, trained=False) for i in range(3))
  more = [
    dataclasses.replace(e, segments=(*silent, *e.segments)) for e in experiences
  ]
  batch, _ = pack(more, row_length=16, microbatch_rows=4)
  assert_same_update(run(_cut(batch, 4)), want)


def test_padding_is_not_read(reduced, packed, assert_same_update):
  _, run, want = reduced
  batch = _cut(packed, 4)
  padding = batch.segment_ids == 0
  poisoned = batch.replace(
    ids=np.where(padding, 17, batch.ids),
    behaviour_logp=np.where(padding, np.float32(np.nan), batch.behaviour_logp),
    advantage=np.where(padding, np.float32(np.inf), batch.advantage),
    episode_weight=np.where(padding, np.float32(np.nan), batch.episode_weight),
    temperature=np.where(padding, np.float32(np.nan), batch.temperature),
  )
  assert_same_update(run(poisoned), want)


def test_same_state_and_batch_give_the_same_bits(reduced, packed):
  _, run, want = reduced
  again = run(_cut(packed, 4))
  for a, b in zip(*map(jax.tree.leaves, (again, want)), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def scored(model, params, experiences):
  """Of each episode, its segments' (log π, log μ) of trained tokens.

  From logits of unpacked rows.
  """
  segments = [s for e in experiences for s in e.segments]
  wide = np.zeros((len(segments), 16), np.int32)
  for i, segment in enumerate(segments):
    wide[i, : len(segment)] = segment.ids
  logits = jax.jit(lambda p, x: forward(p, model, x))(params, wide)
  heat = np.array([s.temperature for s in segments])[:, None, None]
  log_p = np.asarray(jax.nn.log_softmax(logits / heat, -1))
  rows = iter(log_p)
  return [
    [_of_segment(next(rows), segment) for segment in e.segments]
    for e in experiences
  ]


def _of_segment(log_p, segment):
  at = np.flatnonzero(segment.trained)
  return log_p[at - 1, segment.ids[at]], segment.behaviour_logp[at]


def _by_hand(name, logp, behaviour, advantage):
  """Terms, ratios and clipped or not of one segment's trained tokens."""
  log_ratio = logp - behaviour
  if name == "sequence_mean":
    log_ratio = np.full_like(log_ratio, log_ratio.mean())
  ratio = np.exp(log_ratio)
  if name == "token_mean":
    return -np.minimum(ratio, 5) * advantage * logp, ratio, ratio > 5
  low, high = (0.5, 1.5) if name == "sequence_mean" else (0.8, 1.2)
  free, bounded = ratio * advantage, np.clip(ratio, low, high) * advantage
  return -np.minimum(free, bounded), ratio, bounded < free


def test_loss_and_metrics_are_derived_by_hand(reduced, scored, experiences):
  name, _, (_, metrics) = reduced
  found = [
    [_by_hand(name, *pair, e.advantage) for pair in pairs if pair[0].size]
    for pairs, e in zip(scored, experiences, strict=True)
  ]
  terms = [np.concatenate([t for t, *_ in parts]) for parts in found if parts]
  assert len(terms) == 4
  assert len(experiences) == 5
  want = {
    "token_mean": np.concatenate(terms).mean(),
    "sequence_mean": np.mean([t.mean() for t in terms]),
    "constant_length": np.concatenate(terms).sum() / (5 * 8),
  }[name]
  np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)

  _, ratio, clipped = (
    np.concatenate(x)
    for x in zip(*(part for parts in found for part in parts), strict=True)
  )
  logp, behaviour = (
    np.concatenate(x)
    for x in zip(*(pair for pairs in scored for pair in pairs), strict=True)
  )
  gap, log_ratio = np.abs(logp - behaviour), logp - behaviour
  for key, value in {
    "ratio": ratio.mean(),
    "ratio_max": ratio.max(),
    "clipped": clipped.mean(),
    "effective_tokens": ratio.sum() ** 2 / (ratio**2).sum(),
    "gap": gap.mean(),
    "gap_max": gap.max(),
    # Of the sampler to the learner, from tokens that the sampler drew.
    "kl_k1": -log_ratio.mean(),
    "kl_k2": 0.5 * (log_ratio**2).mean(),
    "kl_k3": (np.exp(log_ratio) - 1 - log_ratio).mean(),
  }.items():
    np.testing.assert_allclose(metrics[key], value, rtol=2e-5, err_msg=key)
  assert 0 < clipped.mean() < 1


def test_batch_of_padding_is_a_step_without_gradient(reduced, packed, params):
  _, run, _ = reduced
  batch = _cut(packed, 4)
  nothing = np.zeros_like(batch.mask)
  updated, metrics = run(
    batch.replace(mask=nothing, segment_ids=nothing.astype(np.int32))
  )
  assert all(np.isfinite(x) for x in metrics.values())
  assert metrics["loss"] == metrics["grad_norm"] == metrics["skipped"] == 0
  for a, b in zip(*map(jax.tree.leaves, (updated, params)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_all_masked_batch_learns_the_balance_only(reduced, packed, params):
  _, run, (_, want) = reduced
  batch = _cut(packed, 4)
  updated, metrics = run(batch.replace(mask=np.zeros_like(batch.mask)))
  assert all(np.isfinite(x) for x in metrics.values())
  assert metrics["loss"] == metrics["mtp_loss"] == metrics["skipped"] == 0
  # The terms that are of all tokens, and reach what the router sees.
  for name in ("router_balance", "router_z"):
    np.testing.assert_allclose(metrics[name], want[name], rtol=1e-5)
  assert metrics["grad_norm"] > 0
  changed = {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for (path, a), b in zip(
      jax.tree_util.tree_leaves_with_path(updated),
      jax.tree.leaves(params),
      strict=True,
    )
    if not np.array_equal(a, b)
  }
  assert "layers/000/moe/router" in changed
  assert "layers/000/moe/gate" not in changed
  assert not any(name.startswith(("mtp", "norm")) for name in changed)


def test_recorded_experts_reach_the_model(
  model, params, sgd, state_of, experiences, scored
):
  # Packed, the learner replays them as the model does row by row.
  draw = np.random.default_rng(0)

  def recorded(segment):
    chosen = draw.permuted(np.tile(np.arange(4), (len(segment), 1, 1)), axis=-1)
    chosen = chosen[..., :2].astype(np.int32)
    chosen[0] = -1
    return dataclasses.replace(segment, experts=chosen)

  with_experts = [
    dataclasses.replace(e, segments=tuple(map(recorded, e.segments)))
    for e in experiences
  ]
  segments = [(s, e.advantage) for e in with_experts for s in e.segments]
  ids = np.zeros((len(segments), 16), np.int32)
  experts = np.full((len(segments), 16, 1, 2), -1, np.int32)
  for i, (segment, _) in enumerate(segments):
    ids[i, : len(segment)] = segment.ids
    experts[i, : len(segment)] = segment.experts
  logits = jax.jit(lambda p, x, e: forward(p, model, x, replay_experts=e))(
    params, ids, experts
  )
  terms = []
  for row, (segment, advantage) in zip(logits, segments, strict=True):
    log_p = np.asarray(jax.nn.log_softmax(row / segment.temperature, -1))
    terms.append(-advantage * _of_segment(log_p, segment)[0])
  want = np.concatenate(terms).mean()
  free = [
    -e.advantage * logp
    for e, pairs in zip(experiences, scored, strict=True)
    for logp, _ in pairs
  ]
  assert abs(want - np.concatenate(free).mean()) > 1e-3

  step = make_train_step(model, sgd, losses.policy_gradient, _CONFIG)
  batch, _ = pack(with_experts, row_length=16, microbatch_rows=4)
  _, metrics = step(state_of(params, sgd), batch)
  assert metrics["loss"] == pytest.approx(want, rel=1e-5)
