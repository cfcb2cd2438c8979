import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import losses

_ONE = np.ones((1, 1), bool)


def test_cispo_weight_is_behind_a_stop_gradient(run):
  # ρ = e^0.5 inside the bounds: d/dlogp (−sg(ρ) A logp) = −ρ A. Without the
  # stop-gradient it would be −ρ A (1 + logp), here with logp = −1 exactly 0.
  logp = jnp.array([[-1.0]])
  got = run("cispo", logp, logp - 0.5, jnp.array([2.0]), _ONE)
  np.testing.assert_allclose(got.gradient, [[-2 * np.exp(0.5)]], rtol=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens(run):
  # ρ = e^3 ≈ 20 is cut to 5, not to nothing; the lower bound is 0 by default,
  # so ρ = e^−3 stays as it is.
  logp = jnp.full((1, 2), -4.0)
  behaviour = logp - jnp.array([[3.0, -3.0]])
  got = run("cispo", logp, behaviour, jnp.ones(1), np.ones((1, 2), bool))
  np.testing.assert_allclose(got.gradient, [[-5.0, -np.exp(-3)]], rtol=1e-5)
  np.testing.assert_array_equal(got.clipped, [[1, 0]])


def _four_corners():
  """ρ = e and 1/e with A = 1 and −1."""
  log_ratio = jnp.array([[1.0, -1.0], [1.0, -1.0]])
  logp = jnp.full((2, 2), -2.0)
  advantage = jnp.array([1.0, -1.0])
  return logp, logp - log_ratio, advantage, np.ones((2, 2), bool)


def test_grpo_gradient_ends_only_where_the_update_went_far_enough(run):
  # A > 0 stops above ratio_max, A < 0 below ratio_min; never the other way.
  got = run("grpo", *_four_corners())
  e = np.e
  np.testing.assert_allclose(got.gradient, [[0, -1 / e], [e, 0]], rtol=1e-6)
  np.testing.assert_array_equal(got.clipped, [[1, 0], [0, 1]])


def test_grpo_at_the_bound_keeps_its_whole_gradient(run):
  # ρ = 1 is both bounds; a minimum of two equal terms would halve it.
  logp = jnp.array([[-1.0]])
  bounds = {"ratio_min": 1.0, "ratio_max": 1.0}
  got = run("grpo", logp, logp, jnp.array([2.0]), _ONE, hyper=bounds)
  np.testing.assert_array_equal(got.gradient, [[-2.0]])
  np.testing.assert_array_equal(got.clipped, [[0]])


def test_kimi_masks_whatever_the_sign_and_pulls_back(run):
  # Both tokens are outside, so all that is left of the gradient is 2 τ log ρ.
  got = run("kimi_k2_5", *_four_corners(), hyper={"tau": 0.25})
  np.testing.assert_allclose(
    got.gradient, [[0.5, -0.5], [0.5, -0.5]], rtol=1e-6
  )
  # −clip(ρ) A + τ: bounds are 1.25 and 0.8.
  want = [[-1.25 + 0.25, -0.8 + 0.25], [1.25 + 0.25, 0.8 + 0.25]]
  np.testing.assert_allclose(got.per_token, want, rtol=1e-6)
  np.testing.assert_array_equal(got.clipped, np.ones((2, 2)))
  assert got.ratio[0, 0] == pytest.approx(np.e)


def test_kimi_bounds_belong_to_the_inside(run):
  # log ρ = 0.5 and −0.25 are exact: −ρ A + 2 τ log ρ each.
  logp = jnp.array([[-1.0, -1.0]])
  got = run(
    "kimi_k2_5",
    logp,
    logp - jnp.array([[0.5, -0.25]]),
    jnp.array([2.0]),
    np.ones((1, 2), bool),
    hyper={"log_ratio_min": -0.25, "log_ratio_max": 0.5, "tau": 1.0},
  )
  want = [[-2 * np.exp(0.5) + 1, -2 * np.exp(-0.25) - 0.5]]
  np.testing.assert_allclose(got.gradient, want, rtol=1e-6)
  np.testing.assert_array_equal(got.clipped, [[0, 0]])


def test_sft_is_a_weighted_cross_entropy(run):
  logp = jnp.array([[-1.0, -3.0, -5.0]])
  mask = np.array([[True, True, False]])
  # What a behaviour policy would be isn't looked at.
  nothing = jnp.full((1, 3), np.nan)
  got = run("sft", logp, nothing, jnp.array([[0.5, 2.0, 9.0]]), mask)
  np.testing.assert_array_equal(got.per_token, [[0.5, 6.0, 0.0]])
  np.testing.assert_array_equal(got.gradient, [[-0.5, -2.0, 0.0]])
  np.testing.assert_array_equal(got.ratio, mask)
  assert not got.clipped.any()


def _wide(arrays):
  """The same with an advantage of each token, and what lies before them."""
  logp, behaviour, advantage, mask = arrays
  advantage = np.broadcast_to(advantage[:, None], mask.shape)
  return {
    "logp": logp,
    "behaviour_logp": behaviour,
    "advantage": advantage,
    "proximal_logp": behaviour + np.float32(0.1),
  }, mask


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_outside_the_mask_reaches_nothing(run, batch, loss, poison):
  arrays, mask = _wide(batch(0))
  assert not mask.all()

  def outcome(x):
    rest = (x["logp"], x["behaviour_logp"], x["advantage"], mask)
    return run(loss, *rest, proximal_logp=x["proximal_logp"])

  want = outcome(arrays)
  bad = {k: np.where(mask, x, np.float32(poison)) for k, x in arrays.items()}
  for poisoned in ({**arrays, name: x} for name, x in bad.items()):
    for a, b in zip(outcome(poisoned), want, strict=True):
      np.testing.assert_array_equal(a, b)
  # XLA turns a product with a mask into a selection; uncompiled, 0 · NaN would
  # show.
  with jax.disable_jit():
    for a, b in zip(outcome(bad), want, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6)
  for array in want[2:]:
    assert not array[~mask].any()


@pytest.mark.parametrize("log_ratio", [35.0, -35.0, 36.0, -36.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1e3, -1e3])
def test_extreme_ratios_stay_finite(run, loss, log_ratio, advantage):
  logp = jnp.full((1, 3), -40.0)
  rest = (jnp.array([advantage]), np.ones((1, 3), bool))
  # Far from the sampler, and far from the policy that began the step.
  for optional in ({}, {"proximal_logp": logp}, {"proximal_logp": logp - 3}):
    got = run(loss, logp, logp - log_ratio, *rest, **optional)
    for array in got:
      assert np.isfinite(array).all()


def test_all_masked_batch_is_zero_and_counted_as_zero(run, batch, loss):
  *arrays, mask = batch(0)
  for array in run(loss, *arrays, np.zeros_like(mask)):
    assert not array.any()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_batch_is_zero_and_counted_as_zero(run, loss, shape):
  nothing = np.zeros(shape, np.float32)
  got = run(
    loss,
    nothing,
    nothing,
    nothing[:, :1].sum(-1),
    nothing.astype(bool),
    segment_ids=nothing.astype(np.int32),
  )
  assert got.value == got.denominator == 0
  assert got.gradient.shape == got.per_token.shape == shape


def test_group_of_one_teaches_nothing(run, batch, loss):
  # Its advantage is 0; of Kimi's loss the pull to the sampler remains.
  logp, behaviour, _, mask = batch(0)
  (advantage,) = losses.group_advantages(np.array([3.0]))
  advantage = np.full(5, advantage, np.float32)
  hyper = {"tau": 0.0} if loss == "kimi_k2_5" else {}
  got = run(loss, logp, behaviour, advantage, mask, hyper=hyper)
  assert not got.gradient.any()
  assert not got.per_token.any()


def test_advantage_of_a_row_is_that_of_each_of_its_tokens(run, batch, loss):
  arrays = batch(1)
  wide, mask = _wide(arrays)
  wide.pop("proximal_logp")
  one, two = run(loss, *arrays), run(loss, *wide.values(), mask)
  for a, b in zip(one, two, strict=True):
    np.testing.assert_array_equal(a, b)
  for array in one[2:]:
    assert array.shape == mask.shape


def test_ratio_in_the_stats_is_that_of_trained_tokens(run, batch, loss):
  logp, behaviour, advantage, mask = batch(0)
  log_ratio = logp - behaviour
  if loss == "gspo":
    total = log_ratio.sum(-1, where=mask, keepdims=True)
    mean = total / np.maximum(mask.sum(-1, keepdims=True), 1)
    log_ratio = np.broadcast_to(mean, mask.shape)
  got = run(loss, logp, behaviour, advantage, mask)
  want = np.where(mask, np.exp(log_ratio), 0)
  np.testing.assert_allclose(got.ratio, want, rtol=1e-6)


def test_mask_may_be_of_numbers(run, batch, loss):
  *arrays, mask = batch(0)
  want = run(loss, *arrays, mask)
  got = run(loss, *arrays, mask.astype(np.float32))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)


def test_numerators_of_parts_add_up_to_that_of_the_whole(run, batch, loss):
  *rest, mask = batch(1)
  whole = run(loss, *rest, mask)
  first = np.arange(5)[:, None] < 2
  parts = [run(loss, *rest, mask & rows) for rows in (first, ~first)]
  np.testing.assert_allclose(
    sum(p.value for p in parts), whole.value, rtol=1e-6
  )
  np.testing.assert_array_equal(sum(p.gradient for p in parts), whole.gradient)
