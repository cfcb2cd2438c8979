"""Gradients of KL terms against the true KL on a vocabulary of five.

Tokens x ~ π are enumerated, not sampled: a loss that weighs token x by π(x) as
a constant has the expected gradient of the loss of a sampled one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import losses

_LOGITS = np.array([0.3, -1.2, 0.8, 0.1, -0.5])
_REFERENCE = np.array([-0.4, 0.6, 1.1, -0.9, 0.2])
_MASK = jnp.ones((1, 5), bool)


def _log_softmax(x):
  return x - np.log(np.exp(x).sum())


def _kl(logits, reference=_REFERENCE):
  log_p, log_q = _log_softmax(logits), _log_softmax(reference)
  return (np.exp(log_p) * (log_p - log_q)).sum()


def _finite_differences(f, x, h=1e-5):
  steps = h * np.eye(len(x))
  return np.array([(f(x + e) - f(x - e)) / (2 * h) for e in steps])


def _expected_gradient(term):
  """Of Σ_x π(x) term(log π(x), log π_ref(x)) by logits, π(x) a constant."""

  def total(logits):
    logp = jax.nn.log_softmax(logits)
    reference = jax.nn.log_softmax(jnp.asarray(_REFERENCE))
    terms = term(logp[None], reference[None])[0]
    return (jax.lax.stop_gradient(jnp.exp(logp)) * terms).sum()

  with jax.enable_x64(True):
    value, gradient = jax.jit(jax.value_and_grad(total))(jnp.asarray(_LOGITS))
    return np.asarray(value), np.asarray(gradient)


def _estimate(name):
  return lambda logp, reference: losses.kl_estimates(logp, reference, _MASK)[
    name
  ]


def test_k2_as_a_loss_has_the_gradient_of_the_kl():
  _, gradient = _expected_gradient(_estimate("k2"))
  want = _finite_differences(_kl, _LOGITS)
  assert np.abs(want).max() > 0.1
  np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=1e-9)


def test_k1_as_a_loss_has_no_gradient_on_policy():
  value, gradient = _expected_gradient(_estimate("k1"))
  np.testing.assert_allclose(gradient, np.zeros(5), atol=1e-12)
  # Its mean is the KL all the same.
  np.testing.assert_allclose(value, _kl(_LOGITS), rtol=1e-12)


@pytest.mark.parametrize("loss", ["policy_gradient", "cispo", "grpo"])
def test_k1_in_the_reward_has_the_gradient_of_the_kl(loss):
  def term(logp, reference):
    advantage = losses.penalised(
      jnp.zeros(1), logp, reference, _MASK, weight=0.7
    )
    # On-policy: the sampler is the policy itself.
    sampler = jax.lax.stop_gradient(logp)
    return getattr(losses, loss)(logp, sampler, advantage, _MASK)[0]

  _, gradient = _expected_gradient(term)
  want = 0.7 * _finite_differences(_kl, _LOGITS)
  np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=1e-9)


def test_k3_as_a_loss_would_minimise_another_divergence():
  # Unbiased as an estimate, but its gradient is that of KL(π_ref ‖ π_θ).
  value, gradient = _expected_gradient(_estimate("k3"))
  np.testing.assert_allclose(value, _kl(_LOGITS), rtol=1e-12)
  other = _finite_differences(lambda x: _kl(_REFERENCE, x), _LOGITS)
  np.testing.assert_allclose(gradient, other, rtol=1e-6, atol=1e-9)
  assert np.abs(gradient - _finite_differences(_kl, _LOGITS)).max() > 0.1


@jax.jit
def _estimates(logp, reference, mask):
  """Estimates, and the gradient of each one's sum by both policies."""

  def total(logp, reference, name):
    return losses.kl_estimates(logp, reference, mask)[name].sum()

  slopes = {
    name: jax.grad(total, (0, 1))(logp, reference, name)
    for name in ("k1", "k2", "k3")
  }
  return losses.kl_estimates(logp, reference, mask), slopes


@pytest.mark.parametrize("compiled", [True, False])
def test_estimates_are_derived_by_hand(compiled):
  # r = e^−1, 1 and e²; the last two tokens aren't trained. Compiled, a product
  # with the mask would be a selection and 0 · NaN not show.
  logp = np.array([[-1.0, -2.0, -4.0, np.nan, -np.inf]], np.float32)
  reference = np.array([[-2.0, -2.0, -2.0, np.inf, -np.inf]], np.float32)
  mask = jnp.array([[1, 1, 1, 0, 0]])
  with jax.disable_jit(not compiled):
    arrays = jnp.asarray(logp), jnp.asarray(reference)
    found, slopes = _estimates(*arrays, mask)
  e = np.e
  want = {
    "k1": [1, 0, -2, 0, 0],
    "k2": [0.5, 0, 2, 0, 0],
    "k3": [1 / e, 0, e**2 - 3, 0, 0],
  }
  # By logp; by the reference it is the opposite.
  want_slopes = {
    "k1": [1, 1, 1, 0, 0],
    "k2": [1, 0, -2, 0, 0],
    "k3": [1 - 1 / e, 0, 1 - e**2, 0, 0],
  }
  for name, values in want.items():
    np.testing.assert_allclose(found[name], [values], rtol=1e-6)
    own, other = slopes[name]
    np.testing.assert_allclose(own, [want_slopes[name]], rtol=1e-5)
    np.testing.assert_array_equal(other, -own)
  assert set(found) == set(want)


@pytest.mark.parametrize("log_ratio", [35.0, -35.0, 1e4, -1e4])
def test_estimates_of_policies_far_apart_are_finite(log_ratio):
  logp = np.full((1, 5), -1e4, np.float32)
  reference = logp + np.float32(log_ratio)
  for x in jax.tree.leaves(_estimates(logp, reference, np.ones((1, 5), int))):
    assert np.isfinite(x).all()


@pytest.mark.parametrize("wide", [False, True])
def test_penalised_advantage_is_a_constant(wide):
  nan = np.nan
  logp = np.array([[-1.0, -4.0, nan], [-2.0, -2.0, -2.0]], np.float32)
  reference = np.array([[-2.0, -2.0, nan], [-2.0, -2.5, -3.0]], np.float32)
  mask = np.array([[1, 1, 0], [1, 1, 1]])
  advantage = np.array([1.0, -1.0], np.float32)
  if wide:
    advantage = np.array([[1, 1, nan], [-1, -1, -1]], np.float32)

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
  def slopes(*arrays):
    found = losses.penalised(*arrays, jnp.asarray(mask), weight=0.5)
    return found.sum(), found

  # k1 = 1, −2; 0, 0.5, 1.
  zeros, got = slopes(advantage, logp, reference)
  np.testing.assert_array_equal(got, [[0.5, 2.0, 0], [-1.0, -1.25, -1.5]])
  assert not any(slope.any() for slope in zeros)
