import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from arl_jax import sharding
from arl_jax.model import ModelConfig, forward, init, specs
from arl_jax.sharding import Spec

CONFIG = ModelConfig(
  vocab_size=64, width=32, heads=4, kv_heads=2, head_dim=8, expert_width=16
)


def _mesh(**axes):
  kind = jax.sharding.AxisType.Auto
  return jax.make_mesh(
    tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes)
  )


@pytest.fixture(scope="module")
def whole():
  """Parameters, ids and logits on one device."""
  params = init(CONFIG, jax.random.key(0))
  ids = np.random.default_rng(0).integers(0, 64, (4, 12), np.int32)
  logits = jax.jit(functools.partial(forward, config=CONFIG))(
    params, input_ids=ids
  )
  return params, ids, np.asarray(logits)


@pytest.mark.parametrize(
  "axes",
  [
    {"data": 2, "tensor": 2, "expert": 2},
    {"fsdp": 4, "tensor": 2},
    {"expert": 4, "data": 2},
  ],
  ids=str,
)
def test_logits_on_eight_devices_are_those_of_one(axes, whole):
  params, ids, want = whole
  mesh = _mesh(**axes)
  placement = sharding.shardings(specs(CONFIG), mesh)
  placed = jax.device_put(params, placement)
  rows = NamedSharding(mesh, sharding.partition(("batch", None), mesh))
  got = jax.jit(functools.partial(forward, config=CONFIG))(
    placed, input_ids=jax.device_put(ids, rows)
  )
  scale = np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * scale)
  if "expert" in axes:
    gate = placed["layers"]["000"]["moe"]["gate"]
    first = gate.addressable_shards[0].data.shape[0]
    assert first == CONFIG.experts // axes["expert"]


def test_parameters_drawn_on_a_mesh_are_those_drawn_on_one_device():
  tree = {
    "gate": Spec(shape=(4, 8, 8), axes=("experts", "width", "mlp"), fan_in=8),
    "norm": Spec(shape=(8,), axes=(None,), init="ones"),
  }
  key = jax.random.key(0)
  placement = sharding.shardings(tree, _mesh(data=2, tensor=2, expert=2))
  draw = jax.jit(
    functools.partial(sharding.initialise, tree), out_shardings=placement
  )
  drawn, want = draw(key), sharding.initialise(tree, key)
  for name in tree:
    assert drawn[name].sharding == placement[name]
    np.testing.assert_allclose(drawn[name], want[name], rtol=1e-6)


def test_every_axis_of_every_parameter_is_known_or_whole():
  leaves = jax.tree.leaves(specs(CONFIG), is_leaf=lambda x: isinstance(x, Spec))
  named = {axis for spec in leaves for axis in spec.axes if axis}
  assert named <= set(sharding.RULES)


def test_two_dimensions_on_one_mesh_axis_are_refused():
  mesh = _mesh(tensor=8)
  with pytest.raises(ValueError, match=r"\['tensor'\] twice"):
    sharding.partition(("vocab", "heads"), mesh)
  clash = {"a": Spec(shape=(8, 8), axes=("vocab", "mlp"))}
  with pytest.raises(ValueError, match="give one of them another rule"):
    sharding.shardings(clash, mesh)
  # Not a collision where the mesh isn't split along it.
  assert sharding.partition(("vocab", "heads"), _mesh(data=8)) == (
    PartitionSpec(None, None)
  )


def test_axes_absent_from_the_mesh_or_the_rules_are_replicated():
  mesh = _mesh(data=2, tensor=4)
  assert sharding.partition(("experts", "width", "mlp"), mesh) == (
    PartitionSpec(None, None, ("tensor",))
  )
  assert sharding.partition(("unknown", None), mesh) == (
    PartitionSpec(None, None)
  )


def test_spec_must_name_every_dimension():
  with pytest.raises(ValueError, match="does not name"):
    Spec(shape=(2, 3), axes=("width",))


def test_parameters_are_counted_without_being_drawn():
  shapes = sharding.shapes(specs(CONFIG), jnp.bfloat16)
  leaves = jax.tree.leaves(shapes)
  assert {x.dtype for x in leaves} == {jnp.dtype("bfloat16")}
  assert sharding.parameter_count(specs(CONFIG)) == sum(x.size for x in leaves)
