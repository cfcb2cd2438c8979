import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.losses import cispo, grpo, policy_gradient, reduce

_TESTDATA = pathlib.Path(__file__).parents[1] / "testdata" / "losses"

# Batches with holes in the mask, an empty row and log ratios up to ±30, from
# independent float64 code.
_BATCHES = json.loads((_TESTDATA / "policy_losses.json").read_text())

# Name among the expected values -> the function that must give it.
_GOLDEN = {
  "cispo": cispo,
  "cispo_two_sided": cispo,
  "grpo_clip_token_mean": grpo,
  "policy_gradient": policy_gradient,
}
_LOSSES = [cispo, grpo, policy_gradient]


# Batches are padded to one shape, so that each loss is compiled once.
_SHAPE = (5, 8)


def _padded(x, dtype):
  x = np.array(x, dtype)
  missing = (n - m for n, m in zip(_SHAPE, x.shape, strict=False))
  return np.pad(x, [(0, n) for n in missing])


def _batch(i, dtype):
  data = _BATCHES[i]
  names = ("logp", "behaviour_logp", "advantage")
  arrays = (_padded(data[n], dtype) for n in names)
  return *arrays, _padded(data["mask"], bool)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _evaluate(loss, hyper, *arrays):
  """((numerator, (per_token, denominator, stats)), gradient)."""

  def numerator(logp, *rest):
    per_token, stats = loss(logp, *rest, **dict(hyper))
    total, denominator = reduce(per_token, rest[-1])
    return total, (per_token, denominator, stats)

  return jax.value_and_grad(numerator, has_aux=True)(*arrays)


def _value_and_grad(loss, *arrays):
  (value, _), gradient = _evaluate(loss, (), *arrays)
  return np.asarray(value), np.asarray(gradient)


def _per_token(loss, *arrays):
  (_, (per_token, denominator, stats)), _ = _evaluate(loss, (), *arrays)
  return per_token, denominator, stats


# The golden numbers are printed with nine decimals.
_PRINTED = 1e-9


@pytest.mark.parametrize("name", _GOLDEN)
@pytest.mark.parametrize("batch", range(len(_BATCHES)))
@pytest.mark.parametrize(
  ("dtype", "tolerance"), [("float64", 1e-6), ("float32", 1e-5)]
)
def test_value_and_gradient_are_those_of_independent_code(
  name, batch, dtype, tolerance
):
  expected = _BATCHES[batch]["expected"][name]
  with jax.enable_x64(dtype == "float64"):
    hyper = tuple(expected["hyperparameters"].items())
    result = _evaluate(_GOLDEN[name], hyper, *_batch(batch, dtype))
    (value, (_, denominator, _)), gradient = jax.device_get(result)
  assert value.dtype == gradient.dtype == dtype
  assert denominator == expected["denominator"]
  np.testing.assert_allclose(
    value, expected["numerator"], rtol=tolerance, atol=_PRINTED
  )
  np.testing.assert_allclose(
    gradient,
    _padded(expected["grad_numerator"], dtype),
    rtol=tolerance,
    atol=_PRINTED,
  )


def test_cispo_weight_is_behind_a_stop_gradient():
  # ρ = e^0.5 inside the bounds: d/dlogp (−sg(ρ) A logp) = −ρ A. Without the
  # stop-gradient it would be −ρ A (1 + logp), here with logp = −1 exactly 0.
  logp = jnp.array([[-1.0]])
  arrays = logp, logp - 0.5, jnp.array([2.0]), jnp.ones((1, 1), bool)
  _, gradient = _value_and_grad(cispo, *arrays)
  np.testing.assert_allclose(gradient, [[-2 * np.exp(0.5)]], rtol=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
  # ρ = e^3 ≈ 20 is cut to 5, not to nothing; the lower bound is 0 by default,
  # so ρ = e^−3 stays as it is.
  logp = jnp.full((1, 2), -4.0)
  arrays = (
    logp,
    logp - jnp.array([[3.0, -3.0]]),
    jnp.ones(1),
    jnp.ones((1, 2), bool),
  )
  _, gradient = _value_and_grad(cispo, *arrays)
  np.testing.assert_allclose(gradient, [[-5.0, -np.exp(-3)]], rtol=1e-5)
  _, _, stats = _per_token(cispo, *arrays)
  np.testing.assert_array_equal(stats["clipped"], [[1, 0]])


def test_grpo_gradient_ends_only_where_the_update_went_far_enough():
  # A > 0 stops above ratio_max, A < 0 below ratio_min; never the other way.
  log_ratio = jnp.array([[1.0, -1.0], [1.0, -1.0]])
  logp = jnp.full((2, 2), -2.0)
  arrays = (
    logp,
    logp - log_ratio,
    jnp.array([1.0, -1.0]),
    jnp.ones((2, 2), bool),
  )
  _, gradient = _value_and_grad(grpo, *arrays)
  e = np.e
  np.testing.assert_allclose(gradient, [[0, -1 / e], [e, 0]], rtol=1e-6)
  _, _, stats = _per_token(grpo, *arrays)
  np.testing.assert_array_equal(stats["clipped"], [[1, 0], [0, 1]])


@pytest.mark.parametrize("loss", _LOSSES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_outside_the_mask_reaches_neither_value_nor_gradient(
  loss, poison
):
  clean = _batch(0, "float32")
  mask = clean[3]
  wide = np.broadcast_to(clean[2][:, None], mask.shape)
  clean = clean[0], clean[1], wide, mask
  poisoned = (
    *(np.where(mask, x, np.float32(poison)) for x in clean[:3]),
    mask,
  )
  assert not mask.all()
  value, gradient = _value_and_grad(loss, *clean)
  for got, want in zip(
    _value_and_grad(loss, *poisoned), (value, gradient), strict=True
  ):
    np.testing.assert_array_equal(got, want)
  assert not gradient[~mask].any()
  per_token, _, stats = _per_token(loss, *poisoned)
  for array in (per_token, *stats.values()):
    assert not np.asarray(array)[~mask].any()


@pytest.mark.parametrize("loss", _LOSSES)
@pytest.mark.parametrize("log_ratio", [35.0, -35.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1e3, -1e3])
def test_extreme_ratios_stay_finite(loss, log_ratio, advantage):
  logp = jnp.full((1, 3), -40.0)
  value, gradient = _value_and_grad(
    loss,
    logp,
    logp - log_ratio,
    jnp.array([advantage]),
    jnp.ones((1, 3), bool),
  )
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()


@pytest.mark.parametrize("loss", _LOSSES)
def test_all_masked_batch_is_zero_and_counted_as_zero(loss):
  logp, behaviour, advantage, mask = _batch(0, "float32")
  arrays = logp, behaviour, advantage, np.zeros_like(mask)
  value, gradient = _value_and_grad(loss, *arrays)
  assert value == 0
  assert not gradient.any()
  assert _per_token(loss, *arrays)[1] == 0


@pytest.mark.parametrize("loss", _LOSSES)
def test_advantage_of_a_row_is_that_of_each_of_its_tokens(loss):
  logp, behaviour, advantage, mask = _batch(1, "float32")
  wide = np.broadcast_to(advantage[:, None], logp.shape)
  a, _, stats_a = _per_token(loss, logp, behaviour, advantage, mask)
  b, _, stats_b = _per_token(loss, logp, behaviour, wide, mask)
  np.testing.assert_array_equal(a, b)
  assert a.shape == logp.shape
  for name in ("ratio", "clipped"):
    assert stats_a[name].shape == logp.shape
    np.testing.assert_array_equal(stats_a[name], stats_b[name])


@pytest.mark.parametrize("loss", _LOSSES)
def test_ratio_in_the_stats_is_that_of_trained_tokens(loss):
  logp, behaviour, advantage, mask = _batch(0, "float32")
  _, _, stats = _per_token(loss, logp, behaviour, advantage, mask)
  want = np.where(mask, np.exp(logp - behaviour), 0)
  np.testing.assert_allclose(stats["ratio"], want, rtol=1e-6)


def test_reduce_counts_trained_tokens_only():
  # 1 + 3 over two tokens; the 100 of a tool token is in neither.
  per_token = jnp.array([[1.0, 100.0, 3.0]])
  numerator, denominator = reduce(per_token, jnp.array([[1, 0, 1]]))
  assert (numerator, denominator) == (4.0, 2.0)


@pytest.mark.parametrize("loss", _LOSSES)
def test_numerators_of_parts_add_up_to_that_of_the_whole(loss):
  arrays = _batch(1, "float32")
  value, gradient = _value_and_grad(loss, *arrays)
  rest, mask = arrays[:-1], arrays[-1]
  first = np.arange(5)[:, None] < 2
  parts = [
    _value_and_grad(loss, *rest, mask & rows) for rows in (first, ~first)
  ]
  np.testing.assert_allclose(sum(p[0] for p in parts), value, rtol=1e-6)
  np.testing.assert_array_equal(sum(p[1] for p in parts), gradient)
