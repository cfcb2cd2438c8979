"""Tokens travel to experts on other devices, and none is lost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import sharding
from arl_jax.model import ModelConfig, dispatch, moe
from arl_jax.model.grouped import grouped_matmul

# 21 tokens: three for each of eight devices, but for the last ones. Two travel
# at a time. The experts have biases and a clamped SwiGLU. Four devices hold two
# experts each, eight one: fewer than a token has.
CONFIG = ModelConfig(
  vocab_size=8,
  width=8,
  experts=8,
  experts_per_token=3,
  expert_width=4,
  expert_bias=True,
  swiglu_limit=7.0,
  dispatch_tokens=2,
)
TOKENS = 21

_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def _inputs(config):
  """Weights, tokens, gates and the gradient that comes from above."""
  draw = np.random.default_rng(0)
  shapes = {name: spec.shape for name, spec in moe.expert_specs(config).items()}
  weights = {
    name: draw.normal(size=shape).astype(np.float32)
    for name, shape in shapes.items()
  }
  sizes = (config.width, config.experts_per_token, config.width)
  x, gates, above = (
    draw.normal(size=(TOKENS, size)).astype(np.float32) for size in sizes
  )
  return weights, x, gates, above


def _choices(config):
  """Name -> experts of every token."""
  e, k = config.experts, config.experts_per_token
  draw = np.random.default_rng(1)
  ranks = np.argsort(draw.random((TOKENS, e)), 1)
  every = np.arange(TOKENS)[:, None]
  choices = {
    "any": ranks[:, :k],
    "the_first_for_all": np.tile(np.arange(k), (TOKENS, 1)),
    "the_last_for_all": np.tile(np.arange(e - k, e), (TOKENS, 1)),
    "one_thrice": np.full((TOKENS, k), e // 2),
    "in_turn": (every + np.arange(k)) % e,
    "from_its_own_device_away": (every // 3 + 1 + np.arange(k)) % e,
  }
  return {name: c.astype(np.int32) for name, c in choices.items()}


def _every_expert(config, weights, x, gates, experts):
  """Σ_k gate_k · expert_k(x), all experts evaluated."""
  gate = jnp.einsum("nd,edf->enf", x, weights["gate"])
  up = jnp.einsum("nd,edf->enf", x, weights["up"])
  if config.expert_bias:
    gate = gate + weights["gate_bias"][:, None]
    up = up + weights["up_bias"][:, None]
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    hidden = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
  else:
    hidden = gate * jax.nn.sigmoid(gate) * up
  y = jnp.einsum("enf,efd->end", hidden, weights["down"])
  if config.expert_bias:
    y = y + weights["down_bias"][:, None]
  token = jnp.arange(len(x))[:, None]
  return (gates[..., None] * y[experts, token]).sum(1)


def _with_gradients(function, config):
  @_jit
  def run(weights, x, gates, experts, above):
    y, pull = jax.vjp(
      lambda w, x, g: function(w, x, g, experts), weights, x, gates
    )
    return y, pull(above)

  def all_choices(inputs):
    *given, above = inputs
    return {
      name: jax.device_get(run(*given, experts, above))
      for name, experts in _choices(config).items()
    }

  return all_choices


def _mixture(config):
  return _with_gradients(lambda w, *rest: moe.mixture(w, config, *rest), config)


@functools.cache
def _expected(bias):
  config = _config(bias)
  reference = functools.partial(_every_expert, config)
  return _with_gradients(reference, config)(_inputs(config))


def _config(bias):
  if bias:
    return CONFIG
  return dataclasses.replace(CONFIG, expert_bias=False, swiglu_limit=0.0)


def _agree(got, want):
  for choice, results in want.items():
    for (path, a), b in zip(
      jax.tree_util.tree_leaves_with_path(got[choice]),
      jax.tree.leaves(results),
      strict=True,
    ):
      name = choice + jax.tree_util.keystr(path)
      atol = 1e-5 * np.abs(b).max()
      np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)


def _on(sizes, config):
  with jax.set_mesh(sharding.make_mesh(**sizes)):
    return _mixture(config)(_inputs(config))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_one_device_computes_the_sum_over_experts(bias):
  # Sorted by expert: more than twice as many as a token has.
  config = _config(bias)
  assert config.experts > 2 * config.experts_per_token
  _agree(_mixture(config)(_inputs(config)), _expected(bias))


@pytest.mark.parametrize(
  "sizes",
  [
    {"expert": 8},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"data": 4, "tensor": 2},
  ],
  ids=str,
)
def test_any_choice_is_exact_on_many_devices(sizes):
  _agree(_on(sizes, CONFIG), _expected(True))


def test_all_tokens_of_a_device_may_travel_at_once():
  config = dataclasses.replace(CONFIG, dispatch_tokens=1024)
  _agree(_on({"data": 2, "expert": 4}, config), _expected(True))


def test_experts_without_bias_travel_too():
  _agree(_on({"data": 2, "expert": 4}, _config(False)), _expected(False))


def test_experts_that_do_not_divide_their_axis_are_everywhere():
  config = dataclasses.replace(CONFIG, experts=6)
  inputs = _inputs(config)
  reference = functools.partial(_every_expert, config)
  want = _with_gradients(reference, config)(inputs)
  _agree(_on({"expert": 4, "tensor": 2}, config), want)


@jax.custom_vjp
def _careless_matmul(x, w, sizes):
  """What a kernel may do: rows that belong to no group are never written."""
  return _careless_forward(x, w, sizes)[0]


def _careless_forward(x, w, sizes):
  y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
  return _unwritten(y, sizes), (pull, sizes)


def _careless_backward(kept, g):
  pull, sizes = kept
  dx, dw = pull(g)
  return _unwritten(dx, sizes), dw, None


def _unwritten(rows, sizes):
  written = jnp.arange(len(rows)) < sizes.sum()
  return jnp.where(written[:, None], rows, jnp.nan)


_careless_matmul.defvjp(_careless_forward, _careless_backward)


def test_rows_that_no_expert_computes_reach_nothing(monkeypatch):
  monkeypatch.setattr(moe, "grouped_matmul", _careless_matmul)
  _agree(_on({"data": 2, "expert": 4}, CONFIG), _expected(True))


@pytest.mark.parametrize("limit", [6, 2**31])
def test_sort_keeps_the_order_of_equal_keys(limit):
  # The larger limit leaves no room for keys and places in one number.
  keys = np.random.default_rng(0).integers(0, 7, 50, np.int32)
  order, inverse = dispatch.sort(jnp.array(keys), limit)
  want = np.argsort(keys, kind="stable")
  np.testing.assert_array_equal(order, want)
  np.testing.assert_array_equal(np.asarray(inverse)[want], np.arange(50))
  assert order.dtype == inverse.dtype == jnp.int32
