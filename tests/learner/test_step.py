import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from arl_jax import sharding
from arl_jax.learner import step
from arl_jax.learner.packing import pack
from arl_jax.learner.state import OptimizerConfig, optimizer, with_optimizer
from arl_jax.learner.step import StepConfig, make_train_step
from arl_jax.losses import cispo, policy_gradient
from arl_jax.model import ModelConfig, forward, init, specs
from arl_jax.types import NO_VERSION, Role, Segment

# One layer and the MTP module: compiling is what takes the time here.
CONFIG = ModelConfig(
  vocab_size=64, width=32, layers=1, heads=2, head_dim=8, expert_width=16
)

# SGD: the change of the parameters is the (clipped) gradient. The balance is of
# a segment, and weighs enough to be seen in it.
_SGD = optax.sgd(1.0)
_CLIP = 0.5
_STEP = StepConfig(balance_weight=0.1, mtp_share=1.0, clip_norm=_CLIP)


# Each step runs a few times: optimising it takes longer than it saves.
_UNOPTIMISED = {"xla_backend_optimization_level": 0}


def _make_step(tx, loss_fn, config):
  step = make_train_step(CONFIG, tx, loss_fn, config)
  return jax.jit(step, donate_argnums=0, compiler_options=_UNOPTIMISED)


@pytest.fixture(scope="module")
def params():
  return jax.jit(init, static_argnums=0, compiler_options=_UNOPTIMISED)(
    CONFIG, jax.random.key(0)
  )


@pytest.fixture(scope="module")
def gradient_step():
  return _make_step(_SGD, cispo, _STEP)


def _state(params, tx=_SGD):
  """A state of its own: the step takes its buffers away."""
  return with_optimizer(jax.tree.map(jnp.copy, params), tx)


def _segment(length, seed, *, trained=True):
  draw = np.random.default_rng(seed)
  sampled = draw.random(length) < 0.6
  sampled[0], sampled[-1] = False, True
  sampled &= trained
  logp = draw.uniform(-6, -2, length)
  return Segment(
    ids=draw.integers(0, 64, length, np.int32),
    roles=np.where(sampled, Role.SAMPLED, Role.TOOL).astype(np.uint8),
    sampled=sampled,
    behaviour_logp=np.where(sampled, logp, 0).astype(np.float32),
    policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
    temperature=0.7 if seed % 2 else 1.0,
  )


_SEGMENTS = [_segment(n, i) for i, n in enumerate((9, 5, 12, 7, 3, 11))]
_ADVANTAGES = [1.0, -0.5, 0.3, 2.0, -1.0, 0.1]


def _pack(segments=None, advantages=None, *, rows=4, length=16, microbatches=1):
  batch, _ = pack(
    _SEGMENTS if segments is None else segments,
    _ADVANTAGES if advantages is None else advantages,
    row_length=length,
    microbatch_rows=rows,
    microbatches=microbatches,
  )
  return batch


def _assert_same_update(one, two, rtol=1e-5):
  """Two results of a step agree in parameters and in every metric."""
  for a, b in zip(
    *(jax.tree.leaves(s.params) for s, _ in (one, two)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)
  assert set(one[1]) == set(two[1])
  for name in one[1]:
    np.testing.assert_allclose(
      one[1][name], two[1][name], rtol=rtol, atol=1e-6, err_msg=name
    )


@pytest.fixture(scope="module")
def reference(params, gradient_step):
  return jax.device_get(gradient_step(_state(params), _pack()))


def test_update_does_not_depend_on_accumulation(
  params, gradient_step, reference
):
  batch = _pack(rows=1, microbatches=8)
  assert batch.microbatches == 3
  _assert_same_update(gradient_step(_state(params), batch), reference)


def test_update_does_not_depend_on_packing(params, gradient_step, reference):
  # A row for each segment, then two empty microbatches.
  parts = [
    _pack([s], [a], rows=1, microbatches=3 if s is _SEGMENTS[-1] else 1)
    for s, a in zip(_SEGMENTS, _ADVANTAGES, strict=True)
  ]
  unpacked = jax.tree.map(
    lambda *x: np.concatenate(x) if x[0].ndim else np.int32(len(x)), *parts
  )
  assert unpacked.ids.shape == (8, 1, 16)
  _assert_same_update(gradient_step(_state(params), unpacked), reference)


def test_update_does_not_depend_on_the_length_of_rows(
  params, gradient_step, reference
):
  # Cut for rows of 12, then padded to the shape that is already compiled.
  short = _pack(length=12)
  batch = jax.tree.map(
    lambda x: np.pad(x, ((0, 0), (0, 0), (0, 4))) if x.ndim else x, short
  )
  assert not np.array_equal(batch.segment_ids, _pack().segment_ids)
  _assert_same_update(gradient_step(_state(params), batch), reference)


def test_update_does_not_depend_on_the_order_of_rows(
  params, gradient_step, reference
):
  batch = _pack()
  turned = jax.tree.map(lambda x: x[:, ::-1] if x.ndim else x, batch)
  _assert_same_update(gradient_step(_state(params), turned), reference)


def test_gradient_is_clipped_to_its_norm(params, reference):
  state, metrics = reference
  moved = jax.tree.map(np.subtract, state.params, params)
  # What is reported is the norm before.
  assert metrics["grad_norm"] > 2 * _CLIP
  np.testing.assert_allclose(optax.tree.norm(moved), _CLIP, rtol=1e-4)


def test_segments_without_trained_tokens_change_nothing(
  params, gradient_step, reference
):
  silent = [_segment(14, 90 + i, trained=False) for i in range(5)]
  batch = _pack([*silent, *_SEGMENTS], [9.0] * 5 + _ADVANTAGES)
  _assert_same_update(gradient_step(_state(params), batch), reference)


def test_padding_is_not_read(params, gradient_step, reference):
  batch = _pack()
  padding = batch.segment_ids == 0
  poisoned = batch.replace(
    ids=np.where(padding, 17, batch.ids),
    behaviour_logp=np.where(padding, np.nan, batch.behaviour_logp),
    advantage=np.where(padding, np.inf, batch.advantage),
  )
  _assert_same_update(gradient_step(_state(params), poisoned), reference)


def test_same_state_and_batch_give_the_same_bits(
  params, gradient_step, reference
):
  again = jax.device_get(gradient_step(_state(params), _pack()))
  for a, b in zip(*map(jax.tree.leaves, (again, reference)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_loss_is_the_mean_over_trained_tokens_of_the_whole_batch(
  params, gradient_step
):
  # With A = 1 CISPO is −min(ρ, 5) log π; from logits of unpacked rows.
  segments = [_segment(n, 2 * i) for i, n in enumerate((9, 5, 12))]
  batch = _pack(segments, [1.0] * 3)
  _, metrics = gradient_step(_state(params), batch)
  from_logits = []
  wide = np.zeros((3, 16), np.int32)
  for i, segment in enumerate(segments):
    wide[i, : len(segment)] = segment.ids
  logits = jax.jit(lambda p, x: forward(p, CONFIG, x))(params, wide)
  log_p = np.asarray(jax.nn.log_softmax(logits, -1))
  for i, segment in enumerate(segments):
    for t in np.flatnonzero(segment.trained):
      logp = log_p[i, t - 1, segment.ids[t]]
      ratio = np.exp(logp - segment.behaviour_logp[t])
      from_logits.append((-min(ratio, 5.0) * logp, ratio))
  loss, ratio = np.mean(from_logits, 0)
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
  np.testing.assert_allclose(metrics["ratio"], ratio, rtol=1e-5)
  clipped = np.mean([r > 5.0 for _, r in from_logits])
  np.testing.assert_allclose(metrics["clipped"], clipped, rtol=1e-5)


def test_batch_of_padding_is_a_step_without_gradient(params, gradient_step):
  batch = _pack()
  nothing = np.zeros_like(batch.mask)
  batch = batch.replace(mask=nothing, segment_ids=nothing.astype(np.int32))
  state, metrics = gradient_step(_state(params), batch)
  assert all(np.isfinite(x) for x in metrics.values())
  assert metrics["loss"] == metrics["grad_norm"] == metrics["skipped"] == 0
  for a, b in zip(*map(jax.tree.leaves, (state.params, params)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_all_masked_batch_learns_the_balance_only(
  params, gradient_step, reference
):
  batch = _pack()
  batch = batch.replace(mask=np.zeros_like(batch.mask))
  state, metrics = gradient_step(_state(params), batch)
  assert all(np.isfinite(x) for x in metrics.values())
  assert metrics["loss"] == metrics["mtp_loss"] == metrics["skipped"] == 0
  # The one term that is of all tokens, and reaches what the router sees.
  np.testing.assert_allclose(
    metrics["balance"], reference[1]["balance"], rtol=1e-5
  )
  assert metrics["grad_norm"] > 0
  changed = {
    jax.tree_util.keystr(path)
    for (path, a), b in zip(
      jax.tree_util.tree_leaves_with_path(state.params),
      jax.tree.leaves(params),
      strict=True,
    )
    if not np.array_equal(a, b)
  }
  assert "['layers']['000']['moe']['router']" in changed
  assert "['layers']['000']['moe']['gate']" not in changed
  assert not any(name.startswith(("['mtp']", "['norm']")) for name in changed)


def _adam(name="adamw"):
  return optimizer(OptimizerConfig(name=name, warmup_steps=1))


@pytest.fixture(scope="module", params=["adamw", "muon"])
def trained(request, params):
  """(name, transform, step) of each optimizer, on the SFT loss."""
  tx = _adam(request.param)
  return tx, _make_step(tx, policy_gradient, StepConfig())


def test_update_that_is_not_finite_is_skipped_and_counted(trained, params):
  tx, step = trained
  batch = _pack()
  bad = batch.replace(
    advantage=np.where(batch.advantage == 2.0, np.inf, batch.advantage)
  )
  before = _state(params, tx)
  kept = jax.device_get(before)
  state, metrics = step(before, bad)
  assert (state.skipped, state.step, metrics["skipped"]) == (1, 1, 1)
  for part in ("params", "opt_state"):
    for a, b in zip(
      *(jax.tree.leaves(getattr(s, part)) for s in (state, kept)), strict=True
    ):
      np.testing.assert_array_equal(a, b)
  # The next one goes on as if nothing had been.
  state, _ = step(state, batch)
  clean, _ = step(_state(params, tx), batch)
  assert (state.skipped, state.step) == (1, 2)
  for a, b in zip(
    *(jax.tree.leaves(s.params) for s in (state, clean)), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_optimizer_updates_every_parameter_and_keeps_its_types(trained, params):
  tx, step = trained
  state, metrics = step(_state(params, tx), _pack())
  assert metrics["skipped"] == 0
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(state.params),
    jax.tree.leaves(params),
    strict=True,
  ):
    assert not np.array_equal(a, b), path
  abstract = jax.eval_shape(
    lambda p: with_optimizer(p, tx), sharding.shapes(specs(CONFIG))
  )
  assert jax.tree.structure(abstract) == jax.tree.structure(state)
  for a, b in zip(*map(jax.tree.leaves, (abstract, state)), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_loss_of_a_tiny_sft_problem_falls(trained, params):
  tx, step = trained
  batch = _pack(advantages=[1.0] * 6)
  state, losses = _state(params, tx), []
  for _ in range(30):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
  assert losses[0] > 3
  assert losses[-1] < 0.5 * losses[0]
  assert state.step == 30


@pytest.mark.parametrize(
  ("change", "match"),
  [({"name": "sgd"}, "x.name"), ({"learning_rate": 0.0}, "x.learning_rate")],
)
def test_impossible_optimizer_is_refused_by_name(change, match):
  with pytest.raises(ValueError, match=match):
    OptimizerConfig(**change).validate("x")


def test_selection_bias_is_not_rounded_for_computing():
  # 1/3 has no exact form in bfloat16.
  params = {"q": jnp.full(2, 1 / 3), "choice_bias": jnp.full(2, 1 / 3)}
  computed = step._as_computed(params, "bfloat16")
  assert computed["q"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(computed["choice_bias"], params["choice_bias"])


def test_bfloat16_compute_moves_float32_weights_much_the_same(
  params, reference
):
  config = dataclasses.replace(_STEP, compute_dtype="bfloat16")
  train_step = make_train_step(CONFIG, _SGD, cispo, config)
  state, metrics = train_step(_state(params), _pack())
  want, want_metrics = reference
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {
    jnp.dtype("float32")
  }
  moved, wanted = (
    np.concatenate(
      [
        np.ravel(np.subtract(a, b))
        for a, b in zip(
          jax.tree.leaves(s.params), jax.tree.leaves(params), strict=True
        )
      ]
    )
    for s in (state, want)
  )
  # bfloat16 has 8 bits; a few products deep, directions agree closely.
  cosine = moved @ wanted / np.linalg.norm(moved) / np.linalg.norm(wanted)
  assert cosine > 0.98
  assert metrics["entropy"] == pytest.approx(want_metrics["entropy"], rel=0.05)
