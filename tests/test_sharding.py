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


# Compiled once, run once: optimising takes longer than it saves.
_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@pytest.fixture(scope="module")
def whole():
  """Parameters, ids and logits on one device."""
  params = _jit(init, static_argnums=0)(CONFIG, jax.random.key(0))
  ids = np.random.default_rng(0).integers(0, 64, (4, 12), np.int32)
  logits = _jit(functools.partial(forward, config=CONFIG))(
    params, input_ids=ids
  )
  return params, ids, np.asarray(logits)


@pytest.mark.parametrize(
  ("sizes", "rows"),
  [
    ({"data": 2, "tensor": 2, "expert": 2}, 4),
    ({"fsdp": 4, "tensor": 2}, 4),
    # Rows and tokens that don't divide the devices.
    ({"expert": 4, "data": 2}, 3),
    ({"fsdp": 2, "expert": 4}, 1),
  ],
  ids=str,
)
def test_logits_on_eight_devices_are_those_of_one(sizes, rows, whole):
  params, ids, want = whole
  ids, want = ids[:rows], want[:rows]
  mesh = sharding.make_mesh(**sizes)
  placement = sharding.shardings(specs(CONFIG), mesh)
  placed = jax.device_put(params, placement)
  split = sharding.partition(("batch", None), ids.shape, mesh)
  with jax.set_mesh(mesh):
    got = _jit(functools.partial(forward, config=CONFIG))(
      placed, input_ids=jax.device_put(ids, NamedSharding(mesh, split))
    )
  scale = np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale)
  gate = placed["layers"]["000"]["moe"]["gate"]
  held = gate.addressable_shards[0].data.shape
  # Experts, width and hidden units, each over its own axis.
  assert held == (
    4 // sizes.get("expert", 1),
    32 // sizes.get("fsdp", 1),
    16 // sizes.get("tensor", 1),
  )


def test_mesh_has_every_axis_and_neighbours_along_the_last():
  mesh = sharding.make_mesh(tensor=2, data=4)
  assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "expert": 1, "tensor": 2}
  numbers = [[d.id for d in pair] for pair in mesh.devices[:, 0, 0]]
  assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7]]
  some = sharding.make_mesh(jax.devices()[3:5], fsdp=2)
  assert [d.id for d in some.devices.flat] == [3, 4]


def test_impossible_mesh_is_refused_by_name():
  with pytest.raises(ValueError, match="mesh axis 'model' is not one of"):
    sharding.make_mesh(model=8)
  with pytest.raises(ValueError, match="has 4 devices, not 8"):
    sharding.make_mesh(fsdp=4)


def test_parameters_drawn_on_a_mesh_are_those_drawn_on_one_device():
  tree = {
    "gate": Spec(shape=(4, 8, 8), axes=("experts", "width", "mlp"), fan_in=8),
    "norm": Spec(shape=(8,), axes=(None,), init="ones"),
  }
  key = jax.random.key(0)
  placement = sharding.shardings(
    tree, sharding.make_mesh(data=2, tensor=2, expert=2)
  )
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
  mesh = sharding.make_mesh(tensor=8)
  with pytest.raises(ValueError, match=r"\['tensor'\] twice"):
    sharding.partition(("vocab", "heads"), (8, 8), mesh)
  clash = {"a": Spec(shape=(8, 8), axes=("vocab", "mlp"))}
  with pytest.raises(ValueError, match="give one of them another rule"):
    sharding.shardings(clash, mesh)
  # Not a collision where the mesh isn't split along it.
  whole = sharding.make_mesh(data=8)
  assert sharding.partition(("vocab", "heads"), (8, 8), whole) == (
    PartitionSpec(None, None)
  )


def test_axes_absent_from_the_mesh_or_the_rules_are_replicated():
  mesh = sharding.make_mesh(data=2, tensor=4)
  axes = ("experts", "width", "mlp")
  assert sharding.partition(axes, (8, 8, 8), mesh) == (
    PartitionSpec(None, None, ("tensor",))
  )
  assert sharding.partition(("unknown", None), (8, 8), mesh) == (
    PartitionSpec(None, None)
  )


@pytest.mark.parametrize(
  ("rows", "axes"),
  [
    (16, ("data", "fsdp", "expert")),
    (12, ("data", "fsdp")),
    (6, ("data",)),
    (5, None),
  ],
)
def test_dimension_is_split_as_far_as_it_divides(rows, axes):
  mesh = sharding.make_mesh(data=2, fsdp=2, expert=2)
  part = sharding.partition(("batch", None), (rows, 7), mesh)
  assert part == PartitionSpec(axes, None)
  assert sharding.mesh_axes(part[0]) == (axes or ())
  assert sharding.mesh_axes("data") == ("data",)


def test_stacked_parameters_have_a_whole_leading_axis():
  one = {"a": Spec(shape=(8, 4), axes=("width", "mlp"), fan_in=8)}
  stacked = sharding.stacked(one, 3)["a"]
  assert (stacked.shape, stacked.axes) == ((3, 8, 4), (None, "width", "mlp"))
  # Drawn as before: the sum is over the same inputs.
  assert (stacked.fan_in, stacked.init) == (8, "normal")
  assert sharding.stacked(one, 0) == one


def test_constraint_applies_under_a_mesh_only():
  x = jnp.ones((8, 6))
  assert sharding.ambient_mesh() is None
  assert sharding.constrain(x, "batch", None) is x
  mesh = sharding.make_mesh(data=4, tensor=2)
  with jax.set_mesh(mesh):
    assert dict(sharding.ambient_mesh().shape) == dict(mesh.shape)
    y = jax.jit(lambda x: sharding.constrain(x, "batch", "vocab"))(x)
  want = NamedSharding(mesh, PartitionSpec("data", "tensor"))
  assert y.sharding.is_equivalent_to(want, 2)
  with jax.set_mesh(sharding.make_mesh(jax.devices()[:1])):
    assert sharding.ambient_mesh() is None


def test_spec_must_name_every_dimension():
  with pytest.raises(ValueError, match="does not name"):
    Spec(shape=(2, 3), axes=("width",))


def test_parameters_are_counted_without_being_drawn():
  shapes = sharding.shapes(specs(CONFIG), jnp.bfloat16)
  leaves = jax.tree.leaves(shapes)
  assert {x.dtype for x in leaves} == {jnp.dtype("bfloat16")}
  assert sharding.parameter_count(specs(CONFIG)) == sum(x.size for x in leaves)
