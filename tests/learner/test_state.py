import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from arl_jax import sharding
from arl_jax.learner import state
from arl_jax.learner.state import OptimizerConfig, optimizer
from arl_jax.learner.step import StepConfig
from arl_jax.model import ModelConfig, init, specs

# With everything that is no matrix of the trunk: biases, sinks, a head.
CONFIG = ModelConfig(
  vocab_size=16,
  width=8,
  heads=2,
  head_dim=4,
  attention_bias=True,
  sinks=True,
  router="sigmoid",
  router_bias=True,
  expert_bias=True,
  expert_width=16,
  shared_experts=1,
  tied=False,
)


def _names(tree, kind):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, label in jax.tree_util.tree_leaves_with_path(tree)
    if label == kind
  }


@pytest.mark.parametrize("scanned", [False, True])
def test_muon_takes_matrices_that_stand_alone(scanned):
  config = dataclasses.replace(CONFIG, scan_layers=scanned, windows=(2, 0))
  labels = state._muon_labels(sharding.shapes(specs(config)))
  muon = _names(labels, "muon")
  layers = set() if scanned else {"layers/000", "layers/001"}
  want = {
    f"{block}/{name}"
    for block in (*layers, "mtp/block")
    for name in (
      *("attention/q", "attention/k", "attention/v", "attention/out"),
      *("moe/shared/gate", "moe/shared/up", "moe/shared/down"),
    )
  }
  assert muon == want | {"mtp/project"}


def test_selection_bias_does_not_decay():
  params = {"choice_bias": jnp.ones(3), "q": jnp.ones((2, 2))}
  tx = optimizer(OptimizerConfig(weight_decay=0.5, learning_rate=0.1))
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = tx.update(zeros, tx.init(params), params)
  assert not np.asarray(updates["choice_bias"]).any()
  assert (np.asarray(updates["q"]) < 0).all()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bfloat16_moments_give_nearly_the_same_updates(name):
  params = {"q": jnp.ones((4, 4)), "norm": jnp.ones(4)}
  draw = np.random.default_rng(0)
  wide, narrow = (
    optimizer(OptimizerConfig(name=name, moment_dtype=dtype, warmup_steps=1))
    for dtype in ("float32", "bfloat16")
  )
  states = [wide.init(params), narrow.init(params)]
  kept = {x.dtype for x in jax.tree.leaves(states[1])}
  assert kept == {jnp.dtype("bfloat16"), jnp.dtype("int32")}
  for _ in range(3):
    gradient = jax.tree.map(
      lambda x: jnp.array(draw.normal(size=x.shape), jnp.float32), params
    )
    one, states[0] = wide.update(gradient, states[0], params)
    two, states[1] = narrow.update(gradient, states[1], params)
  # bfloat16 has 8 bits: 0.4 % a rounding.
  for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
    assert a.dtype == b.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=0.1, atol=2e-4)


def test_unknown_moment_and_compute_types_are_refused():
  with pytest.raises(ValueError, match=r"rl\.optimizer\.moment_dtype is 'f8'"):
    OptimizerConfig(moment_dtype="f8").validate("rl.optimizer")
  with pytest.raises(ValueError, match=r"step\.compute_dtype is 'f8'"):
    StepConfig(compute_dtype="f8").validate("step")


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_abstract_state_is_that_of_a_real_one(name, moments):
  tx = optimizer(OptimizerConfig(name=name, moment_dtype=moments))
  mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
  described = state.abstract(CONFIG, tx, mesh)
  real = jax.eval_shape(
    lambda: state.with_optimizer(init(CONFIG, jax.random.key(0)), tx)
  )
  assert jax.tree.structure(described) == jax.tree.structure(real)
  for a, b in zip(*map(jax.tree.leaves, (described, real)), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
  # Moments lie where their weights do.
  places = {
    x.sharding
    for x in jax.tree.leaves(described.opt_state)
    if x.shape == (CONFIG.experts, CONFIG.width, CONFIG.expert_width)
  }
  gate = described.params["layers"]["000"]["moe"]["gate"]
  assert places == {gate.sharding}
  assert gate.sharding.shard_shape(gate.shape) == (2, 4, 8)


def test_transform_of_no_state_is_described_too():
  described = state.abstract(CONFIG, optax.sgd(1.0), sharding.make_mesh(data=8))
  assert not [x for x in jax.tree.leaves(described.opt_state) if x.ndim]
