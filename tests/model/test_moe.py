import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import sharding
from arl_jax.model import ModelConfig, moe

CONFIG = ModelConfig(
  vocab_size=64, width=32, experts=5, experts_per_token=3, expert_width=16
)


@pytest.fixture(scope="module")
def params():
  return sharding.initialise(moe.specs(CONFIG), jax.random.key(0))


@pytest.fixture(scope="module")
def x():
  return jax.random.normal(jax.random.key(1), (2, 7, 32))


def test_gates_of_chosen_experts_sum_to_one(params, x):
  gates, experts, probabilities = map(np.asarray, moe.route(params, CONFIG, x))
  np.testing.assert_allclose(gates.sum(-1), 1, atol=1e-6)
  assert ((gates > 0).sum(-1) == 3).all()
  np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-6)
  # The largest ones, in order, and gates in proportion to them.
  order = np.argsort(-probabilities, -1)[..., :3]
  np.testing.assert_array_equal(experts, order)
  top = np.take_along_axis(probabilities, order, -1)
  np.testing.assert_allclose(
    np.take_along_axis(gates, order, -1),
    top / top.sum(-1, keepdims=True),
    rtol=1e-5,
  )


def test_equal_probabilities_still_choose_k_experts(params, x):
  even = {**params, "router": jnp.zeros_like(params["router"])}
  gates, _, _ = moe.route(even, CONFIG, x)
  assert ((np.asarray(gates) > 0).sum(-1) == 3).all()
  np.testing.assert_allclose(gates.sum(-1), 1, atol=1e-6)


def _one_by_one(p, x):
  """The layer in float64, token by token and expert by expert."""
  p = {k: np.asarray(v, np.float64) for k, v in p.items()}
  y = np.zeros(x.shape)
  for at in np.ndindex(x.shape[:2]):
    v = np.asarray(x[at], np.float64)
    v = v / np.sqrt((v**2).mean() + CONFIG.norm_eps) * p["norm"]
    logits = v @ p["router"]
    chosen = np.argsort(-logits)[: CONFIG.experts_per_token]
    weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
    for e, weight in zip(chosen, weights, strict=True):
      gate = v @ p["gate"][e]
      hidden = gate / (1 + np.exp(-gate)) * (v @ p["up"][e])
      y[at] += weight * (hidden @ p["down"][e])
  return y


def test_layer_is_the_sum_over_its_experts_one_by_one(params, x):
  y, aux = jax.jit(lambda p, x: moe.apply(p, CONFIG, x))(params, x)
  np.testing.assert_allclose(y, _one_by_one(params, x), atol=1e-5)
  assert aux["experts"].shape == (2, 7, 3)
  assert aux["experts"].dtype == jnp.int32
  chosen = np.zeros((2, 7, 5))
  np.put_along_axis(chosen, np.asarray(aux["experts"]), 1, -1)
  np.testing.assert_array_equal(aux["chosen"], chosen)


def test_tokens_do_not_depend_on_strangers_in_the_batch(params, x):
  strangers = jnp.concatenate([x[:1], 100 * x[1:]])
  one, _ = moe.apply(params, CONFIG, x)
  two, _ = moe.apply(params, CONFIG, strangers)
  np.testing.assert_allclose(one[0], two[0], atol=1e-6)


def test_router_learns_through_the_gates(params, x):
  def total(p):
    return (moe.apply(p, CONFIG, x)[0] ** 2).sum()

  gradient = jax.jit(jax.grad(total))(params)
  assert np.abs(np.asarray(gradient["router"])).max() > 0
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
