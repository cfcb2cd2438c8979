"""Parameters declared once; values, shapes and shardings derived from that.

A model is a nested dict of `Spec`. Logical axis names are mapped to mesh axes
by one rules table; two dimensions of a parameter that ask for the same mesh
axis are an error, not a silent replication.
"""

import contextlib
import contextvars
import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# Mesh axes in order: neighbouring devices differ in the last one. "context" is
# kept free for splitting sequences.
AXES = ("data", "fsdp", "expert", "tensor")

# Logical axis -> mesh axes it may be split over. Axes absent from a mesh, and
# logical axes absent from the table, mean replication.
RULES: Mapping[str, tuple[str, ...]] = {
  "batch": ("data", "fsdp", "expert"),
  # Between layers only: the kept residual stream is split further.
  "sequence": ("tensor",),
  "vocab": ("tensor",),
  "width": ("fsdp",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  "experts": ("expert",),
}


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshConfig:
  """Sizes of the mesh axes; at most one is -1, which takes what is left.

  Attributes:
    data: replicas of everything.
    fsdp: parts of the parameters, gathered where they are used.
    expert: parts of the experts; tokens travel between them.
    tensor: parts of heads, hidden units and vocabulary.
  """

  data: int = 1
  fsdp: int = -1
  expert: int = 1
  tensor: int = 1

  def validate(self, name: str = "mesh") -> None:
    """Raises ValueError if no number of devices fits; `name` is the field's."""
    sizes = dataclasses.asdict(self)
    free = [axis for axis, size in sizes.items() if size == -1]
    wrong = [axis for axis, size in sizes.items() if size < 1 and size != -1]
    if wrong or len(free) > 1:
      raise ValueError(
        f"{name} {sizes}: sizes are >= 1, and at most one is -1 for the rest"
      )

  def sizes(self, devices: int, name: str = "mesh") -> dict[str, int]:
    """Size of each axis on so many devices. Raises ValueError if none fits."""
    self.validate(name)
    sizes = dataclasses.asdict(self)
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if devices % fixed or (not free and devices != fixed):
      raise ValueError(f"{name} {sizes} does not fit {devices} devices")
    for axis in free:
      sizes[axis] = devices // fixed
    return sizes

  def make(self, name: str = "mesh") -> Mesh:
    """The mesh on all devices, or on as many as the sizes name."""
    devices = jax.devices()
    sizes = dataclasses.asdict(self)
    if -1 not in sizes.values():
      devices = devices[: math.prod(sizes.values())]
    return make_mesh(devices, **self.sizes(len(devices), name))

  def shards(self, devices: int) -> int:
    """Parts of the mesh that hold rows of their own."""
    return devices // self.sizes(devices)["tensor"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
  """One parameter.

  Attributes:
    shape: of the array.
    axes: logical axis of each dimension, None for one that is never split.
    init: "normal" (std 1/sqrt(fan_in)), "embedding" (std `scale`), "ones" or
      "zeros".
    fan_in: number of inputs that are summed; only for "normal".
    scale: multiplies the standard deviation.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  init: str = "normal"
  fan_in: int = 1
  scale: float = 1.0

  def __post_init__(self):
    if len(self.shape) != len(self.axes):
      raise ValueError(f"Spec.axes {self.axes} does not name {self.shape}")


def stacked(specs: Any, count: int) -> Any:
  """The specs with a leading axis of `count`; 0 leaves them as they are."""

  def one(spec: Spec) -> Spec:
    return dataclasses.replace(
      spec, shape=(count, *spec.shape), axes=(None, *spec.axes)
    )

  return jax.tree.map(one, specs, is_leaf=_is_spec) if count else specs


def _is_spec(x: Any) -> bool:
  return isinstance(x, Spec)


def initialise(specs: Any, key: jax.Array, dtype: Any = jnp.float32) -> Any:
  """Draws every parameter; each has a key of its own, derived from its path."""

  def draw(path, spec: Spec) -> jax.Array:
    if spec.init == "ones":
      return jnp.ones(spec.shape, dtype)
    if spec.init == "zeros":
      return jnp.zeros(spec.shape, dtype)
    std = spec.scale
    if spec.init == "normal":
      std /= math.sqrt(spec.fan_in)
    own = jax.random.fold_in(
      key, zlib.crc32(jax.tree_util.keystr(path).encode())
    )
    return (std * jax.random.normal(own, spec.shape)).astype(dtype)

  return jax.tree_util.tree_map_with_path(draw, specs, is_leaf=_is_spec)


def shapes(specs: Any, dtype: Any = jnp.float32) -> Any:
  """The tree as `jax.ShapeDtypeStruct`."""
  return jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs, is_leaf=_is_spec
  )


def check_rules(rules: Mapping[str, tuple[str, ...]]) -> None:
  """Raises ValueError naming a rule that isn't one."""
  for axis, names in rules.items():
    if axis not in RULES:
      raise ValueError(f"rules: {axis!r} is not one of {', '.join(RULES)}")
    if not isinstance(names, tuple) or set(names) - set(AXES):
      raise ValueError(
        f"rules: {axis!r} maps to {names!r}, not a tuple of {AXES}"
      )


def make_mesh(devices: Any = None, **sizes: int) -> Mesh:
  """A mesh of `AXES`, e.g. `make_mesh(fsdp=4, tensor=2)`; others have size 1.

  Use it as `with jax.set_mesh(mesh):` around compiled functions.

  Raises:
    ValueError: an unknown axis, or a product that isn't the device count.
  """
  devices = jax.devices() if devices is None else devices
  if unknown := sorted(set(sizes) - set(AXES)):
    raise ValueError(f"mesh axis {unknown[0]!r} is not one of {AXES}")
  for axis, size in sizes.items():
    if not isinstance(size, int) or size < 1:
      raise ValueError(f"mesh axis {axis!r} has size {size!r}, not >= 1")
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  if math.prod(shape) != len(devices):
    raise ValueError(
      f"a mesh of {sizes} has {math.prod(shape)} devices, not {len(devices)}"
    )
  automatic = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.make_mesh(shape, AXES, automatic, devices=devices)


def shardings(
  specs: Any, mesh: Mesh, rules: Mapping[str, tuple[str, ...]] = RULES
) -> Any:
  """The tree as `NamedSharding` on `mesh`.

  Raises:
    ValueError: two dimensions of one parameter map to the same mesh axis.
  """

  def one(spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, partition(spec.axes, spec.shape, mesh, rules))

  return jax.tree.map(one, specs, is_leaf=_is_spec)


def partition(
  axes: tuple[str | None, ...],
  shape: tuple[int, ...],
  mesh: Mesh | AbstractMesh,
  rules: Mapping[str, tuple[str, ...]] = RULES,
) -> PartitionSpec:
  """Mesh axes of each dimension.

  A dimension is split over as many of its mesh axes, in their order, as divide
  it.

  Raises:
    ValueError: two dimensions ask for the same mesh axis.
  """
  used: set[str] = set()
  parts: list[tuple[str, ...] | None] = []
  # Inside a `shard_map` over some axes, those are split already.
  free = {
    name: size
    for name, size, kind in zip(
      mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
    )
    if kind != jax.sharding.AxisType.Manual
  }
  for axis, size in zip(axes, shape, strict=True):
    wanted = rules.get(axis, ()) if axis else ()
    names = tuple(n for n in wanted if free.get(n, 1) > 1)
    if used & set(names):
      raise ValueError(
        f"logical axes {axes} use mesh axis {sorted(used & set(names))} twice;"
        " give one of them another rule"
      )
    used |= set(names)
    while names and size % math.prod(free[n] for n in names):
      names = names[:-1]
    parts.append(names or None)
  return PartitionSpec(*parts)


def mesh_axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """An entry of a `PartitionSpec` as a tuple."""
  return (part,) if isinstance(part, str) else part or ()


def ambient_mesh() -> AbstractMesh | None:
  """The mesh of `jax.set_mesh`, None without one or with one device."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh if not mesh.empty and mesh.size > 1 else None


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Asks that x be split as its logical axes say on the ambient mesh."""
  mesh = ambient_mesh()
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


_TARGET: contextvars.ContextVar[jax.Device | None] = contextvars.ContextVar(
  "target", default=None
)


def target() -> jax.Device:
  """A device of the kind that is being compiled for."""
  return _TARGET.get() or jax.devices()[0]


def platform() -> str:
  """What is being compiled for: "cpu", "gpu" or "tpu"."""
  return target().platform


@contextlib.contextmanager
def compiling_for(device: jax.Device) -> Iterator[None]:
  """Traces for devices that this process may not have."""
  token = _TARGET.set(device)
  try:
    yield
  finally:
    _TARGET.reset(token)


def parameter_count(specs: Any) -> int:
  leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
  return sum(math.prod(spec.shape) for spec in leaves)
