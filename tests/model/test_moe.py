import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import sharding
from arl_jax.model import ModelConfig, moe, router

# Few enough experts that all are evaluated; more, sorted; gpt-oss's form; one
# expert for all tokens beside the others; and no experts.
CONFIG = ModelConfig(
  vocab_size=64, width=32, experts=5, experts_per_token=3, expert_width=16
)
SORTED = dataclasses.replace(CONFIG, experts=8, experts_per_token=2)
CLAMPED = dataclasses.replace(
  CONFIG, expert_bias=True, router_bias=True, swiglu_limit=1.0
)
CONFIGS = {
  "every": CONFIG,
  "sorted": SORTED,
  "every_clamped": CLAMPED,
  "sorted_clamped": dataclasses.replace(CLAMPED, experts=7),
  "shared": dataclasses.replace(SORTED, shared_experts=2, gate_scale=2.5),
}
DENSE = dataclasses.replace(CONFIG, dense_layers=1, dense_width=24)


def _params(config, has_experts=True):
  """Parameters, biases included, that are drawn and not zero."""
  specs = moe.specs(config, moe=has_experts)
  specs = jax.tree.map(
    lambda s: dataclasses.replace(s, init="normal", fan_in=max(s.fan_in, 4)),
    specs,
    is_leaf=lambda s: isinstance(s, sharding.Spec),
  )
  drawn = sharding.initialise(specs, jax.random.key(0))
  return {**drawn, "norm": drawn["norm"] + 1}


@functools.partial(jax.jit, static_argnames=("config", "has_experts"))
def _apply(params, config, x, has_experts=True):
  return moe.apply(params, config, x, moe=has_experts)


@pytest.fixture(scope="module")
def x():
  return jax.random.normal(jax.random.key(1), (2, 7, 32))


def _expert(config, p, v, e=()):
  """One expert, or a dense layer, of one token in float64."""

  def linear(name, v):
    return v @ p[name][e] + (p[f"{name}_bias"][e] if config.expert_bias else 0)

  gate, up = linear("gate", v), linear("up", v)
  if config.swiglu_limit:
    gate, up = np.minimum(gate, 1.0), np.clip(up, -1.0, 1.0)
    return linear("down", gate / (1 + np.exp(-1.702 * gate)) * (up + 1))
  return linear("down", gate / (1 + np.exp(-gate)) * up)


def _one_by_one(config, p, x):
  """The layer in float64, token by token and expert by expert."""
  p = jax.tree.map(lambda a: np.asarray(a, np.float64), p)
  y = np.zeros(x.shape)
  for at in np.ndindex(x.shape[:2]):
    v = np.asarray(x[at], np.float64)
    v = v / np.sqrt((v**2).mean() + config.norm_eps) * p["norm"]
    if "router" not in p:
      y[at] = _expert(config, p, v)
      continue
    logits = v @ p["router"] + p.get("router_bias", 0)
    chosen = np.argsort(-logits)[: config.experts_per_token]
    weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
    for e, weight in zip(chosen, weights, strict=True):
      y[at] += config.gate_scale * weight * _expert(config, p, v, e)
    if config.shared_experts:
      y[at] += _expert(config, p["shared"], v)
  return y


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_is_the_sum_over_its_experts_one_by_one(name, x):
  config = CONFIGS[name]
  params = _params(config)
  y, record = _apply(params, config, x)
  want = _one_by_one(config, params, x)
  np.testing.assert_allclose(y, want, atol=1e-5 * np.abs(want).max())
  assert {name: (a.shape, str(a.dtype)) for name, a in record.items()} == {
    "experts": ((2, 7, config.experts_per_token), "int32"),
    "probabilities": ((2, 7, config.experts), "float32"),
    "logits": ((2, 7, config.experts), "float32"),
  }


def test_clamps_are_reached(x):
  # Or the test above would not see them.
  params = _params(CLAMPED)
  narrow, _ = _apply(params, CLAMPED, x)
  wide, _ = _apply(params, dataclasses.replace(CLAMPED, swiglu_limit=9.0), x)
  assert np.abs(np.asarray(narrow - wide)).max() > 0.1


def test_layer_without_experts_is_its_feed_forward_network(x):
  params = _params(DENSE, has_experts=False)
  y, record = _apply(params, DENSE, x, has_experts=False)
  np.testing.assert_allclose(y, _one_by_one(DENSE, params, x), atol=1e-5)
  assert record == {}


def test_equal_probabilities_still_choose_k_experts(x):
  params = _params(CONFIG)
  even = {**params, "router": jnp.zeros_like(params["router"])}
  gates, experts, _ = jax.jit(lambda p: router.route(p, CONFIG, x))(even)
  assert all(len(set(e)) == 3 for e in np.reshape(experts, (-1, 3)).tolist())
  np.testing.assert_allclose(gates, np.full((2, 7, 3), 1 / 3), atol=1e-6)


@pytest.mark.parametrize("name", ["every", "sorted"])
def test_tokens_do_not_depend_on_strangers_in_the_batch(name, x):
  config = CONFIGS[name]
  params = _params(config)
  strangers = jnp.concatenate([x[:1], -100 * x[1:]])
  one, _ = _apply(params, config, x)
  two, _ = _apply(params, config, strangers)
  np.testing.assert_allclose(one[0], two[0], atol=1e-6)
  assert np.abs(np.asarray(one[1] - two[1])).max() > 0.1


@pytest.mark.parametrize("name", ["every", "sorted"])
def test_router_learns_through_the_gates(name, x):
  config = CONFIGS[name]

  def total(p):
    return (moe.apply(p, config, x, moe=True)[0] ** 2).sum()

  params = _params(config)
  gradient = jax.jit(jax.grad(total))(params)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
  # Against a difference along it.
  slope = gradient["router"]
  step = 1e-3 * slope / jnp.abs(slope).max()
  ends = [
    float(jax.jit(total)({**params, "router": params["router"] + s}))
    for s in (step, -step)
  ]
  want = float((slope * step).sum())
  assert want > 0
  assert (ends[0] - ends[1]) / 2 == pytest.approx(want, rel=0.02)
