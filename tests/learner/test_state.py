import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from arl_jax import losses, sharding
from arl_jax.learner import (
  OptimizerConfig,
  StepConfig,
  make_train_step,
  pack,
  state,
)
from arl_jax.learner.state import merge, optimizer, split
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


def _paths(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_selection_biases_are_never_trained_nor_what_is_frozen():
  params = {
    "moe": {"choice_bias": 1, "router": 2},
    "mlp": {"gate": 3, "up": 4},
    "norm": 5,
  }
  trained, kept = split(params)
  assert _paths(kept) == {"moe/choice_bias"}
  assert merge(trained, kept) == params
  for frozen, want in (
    ("^mlp/", {"moe/choice_bias", "mlp/gate", "mlp/up"}),
    ("gate|norm$", {"moe/choice_bias", "mlp/gate", "norm"}),
    (".", {"moe/choice_bias", "moe/router", "mlp/gate", "mlp/up", "norm"}),
  ):
    trained, kept = split(params, frozen)
    assert _paths(kept) == want
    assert _paths(trained) == _paths(params) - want
    assert merge(trained, kept) == params


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


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({"name": "sgd"}, "x.name is 'sgd'"),
    ({"learning_rate": 0.0}, "x.learning_rate is 0.0"),
    ({"muon_learning_rate": np.inf}, "x.muon_learning_rate is inf"),
    ({"moment_dtype": "f8"}, "x.moment_dtype is 'f8'"),
    ({"frozen": "("}, r"x.frozen '\(' is no regular expression"),
  ],
)
def test_impossible_optimizer_is_refused_by_name(change, match):
  with pytest.raises(ValueError, match=match):
    OptimizerConfig(**change).validate("x")


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("frozen", ["", "attention|embed|up$"])
def test_abstract_state_is_that_of_a_real_one(name, moments, frozen):
  tx = optimizer(OptimizerConfig(name=name, moment_dtype=moments))
  mesh = sharding.make_mesh(fsdp=2, expert=2, tensor=2)
  described = state.abstract(CONFIG, tx, mesh, frozen=frozen)

  def make():
    params = init(CONFIG, jax.random.key(0))
    return state.with_optimizer(params, tx, frozen=frozen)

  real = jax.eval_shape(make)
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
  for path in _paths(described.opt_state):
    assert "choice_bias" not in path
    assert not (frozen and re.search(frozen, path))


def test_transform_of_no_state_is_described_too():
  described = state.abstract(CONFIG, optax.sgd(1.0), sharding.make_mesh(data=8))
  assert not [x for x in jax.tree.leaves(described.opt_state) if x.ndim]


def test_state_holds_the_key_of_its_seed():
  params = {"q": jnp.ones(2)}
  keys = [
    state.with_optimizer(params, optax.sgd(1.0), seed=i).rng for i in (0, 1)
  ]
  described = state.abstract(CONFIG, optax.sgd(1.0), sharding.make_mesh(data=8))
  for key in keys:
    assert (key.shape, key.dtype) == ((2,), jnp.uint32)
  assert (described.rng.shape, described.rng.dtype) == ((2,), jnp.uint32)
  assert not np.array_equal(*keys)


@pytest.fixture(scope="module")
def batch(experiences):
  return pack(experiences, row_length=16, microbatch_rows=4)[0]


@pytest.fixture(scope="module", params=["adamw", "muon"])
def trained(request, models, params_of, state_of):
  """Step of each optimizer, and () -> a state that it begins with."""
  model = models["moe"]
  tx = optimizer(OptimizerConfig(name=request.param, warmup_steps=1))
  step = make_train_step(model, tx, losses.policy_gradient, StepConfig())
  return step, lambda: state_of(params_of(model), tx)


def test_update_that_is_not_finite_is_skipped_and_counted(trained, batch):
  step, begin = trained
  bad = batch.replace(
    advantage=np.where(batch.advantage == 2.0, np.inf, batch.advantage)
  )
  kept = jax.device_get(begin())
  after, metrics = step(begin(), bad)
  assert (after.skipped, after.step, metrics["skipped"]) == (1, 1, 1)
  assert not np.isfinite(metrics["grad_norm"])
  # A retry would draw other numbers.
  assert not np.array_equal(after.rng, kept.rng)
  for part in ("params", "opt_state"):
    for a, b in zip(
      *(jax.tree.leaves(getattr(s, part)) for s in (after, kept)), strict=True
    ):
      np.testing.assert_array_equal(a, b)
  # The next one goes on as if nothing had been.
  after, _ = step(after, batch)
  clean, _ = step(begin(), batch)
  assert (after.skipped, after.step) == (1, 2)
  for a, b in zip(
    *(jax.tree.leaves(s.params) for s in (after, clean)), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_optimizer_updates_every_parameter_and_keeps_its_types(trained, batch):
  step, begin = trained
  before = jax.device_get(begin())
  after, metrics = step(begin(), batch)
  assert metrics["skipped"] == 0
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(after.params),
    jax.tree.leaves(before.params),
    strict=True,
  ):
    assert not np.array_equal(a, b), path
  assert jax.tree.structure(before) == jax.tree.structure(after)
  for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
  assert not np.array_equal(after.rng, before.rng)


def test_loss_of_a_tiny_sft_problem_falls(trained, batch):
  step, begin = trained
  batch = batch.replace(advantage=np.ones_like(batch.advantage))
  now, found = begin(), []
  for _ in range(30):
    now, metrics = step(now, batch)
    found.append(float(metrics["loss"]))
  assert found[0] > 3
  assert found[-1] < 0.5 * found[0]
  assert now.step == 30
