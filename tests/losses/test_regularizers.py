import functools

import jax
import numpy as np

from arl_jax import losses


def _with_slope(function):
  """Value [...], and the gradient of its sum by every argument."""

  def total(*arrays):
    value = function(*arrays)
    return value.sum(), value

  @jax.jit
  def run(*arrays):
    argnums = tuple(range(len(arrays)))
    slopes, value = jax.grad(total, argnums, has_aux=True)(*arrays)
    return value, *slopes

  return run


def _array(*values):
  return np.array(values, np.float32)


_router_z = _with_slope(losses.router_z)
_distillation = _with_slope(losses.distillation)
_balanced_bias = jax.jit(losses.balanced_bias, static_argnames="rate")


def test_entropy_bonus_counts_trained_tokens_and_is_minimised():
  entropy = _array([0.5, np.nan, 2.0])
  mask = np.array([[1, 0, 1]])

  @_with_slope
  def bonus(entropy):
    return losses.entropy_bonus(entropy, jax.numpy.asarray(mask))

  value, slope = bonus(entropy)
  np.testing.assert_array_equal(value, [[-0.5, 0, -2.0]])
  np.testing.assert_array_equal(slope, [[-1, 0, -1]])


def test_router_z_is_the_squared_log_of_the_sum():
  # Σ exp = 1 + 3 and e² + e²; of the last, its largest alone is left.
  logits = _array([0.0, np.log(3.0)], [2.0, 2.0], [1e4, -1e4])
  value, slope = _router_z(logits)
  want = [np.log(4) ** 2, (2 + np.log(2)) ** 2, 1e8]
  np.testing.assert_allclose(value, want, rtol=1e-6)
  # d z / d logit = 2 log Σ exp · softmax.
  first, second = 2 * np.log(4), 2 + np.log(2)
  np.testing.assert_allclose(
    slope,
    [[first / 4, 3 * first / 4], [second, second], [2e4, 0]],
    rtol=1e-6,
  )


def test_balanced_bias_moves_towards_an_even_load():
  # Means are 2, 1 and 0: overloaded down, idle up, even stays.
  bias = _array([0.1, 0.2, 0.3, 0.4], [0.0] * 4, [0.5, 0.0, -0.5, 0.0])
  load = _array([4, 0, 2, 2], [1, 1, 1, 1], [0, 0, 0, 0])
  got = _balanced_bias(bias, load, rate=0.25)
  np.testing.assert_allclose(got[0], [-0.15, 0.45, 0.3, 0.4], rtol=1e-6)
  np.testing.assert_array_equal(got[1:], bias[1:])
  assert got.dtype == bias.dtype


def test_distillation_is_a_cross_entropy_by_hand():
  # Targets 3/4, 1/4 against 1/2, 1/2: log 2; against themselves their entropy.
  target = np.log(_array(3.0, 1.0))
  draft = np.stack([np.zeros(2, np.float32), target + 5])
  value, slope, _ = _distillation(draft, np.stack([target, target]))
  entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
  np.testing.assert_allclose(value, [np.log(2), entropy], rtol=1e-6)
  want = [[-0.25, 0.25], [0, 0]]
  np.testing.assert_allclose(slope, want, rtol=1e-6, atol=1e-7)


def test_distillation_teaches_the_draft_and_never_the_target():
  draws = np.random.default_rng(0).normal(size=(2, 2, 7))
  draft, target = draws.astype(np.float32)
  _, slope, of_target = _distillation(draft, target)
  softmax = functools.partial(jax.nn.softmax, axis=-1)
  np.testing.assert_allclose(
    slope, softmax(draft) - softmax(target), rtol=1e-5, atol=1e-7
  )
  assert not of_target.any()
