"""Parameters declared once; values, shapes and shardings derived from that.

A model is a nested dict of `Spec`. Logical axis names are mapped to mesh axes
by one rules table; two dimensions of a parameter that ask for the same mesh
axis are an error, not a silent replication.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Logical axis -> mesh axes it may be split over. Axes absent from a mesh, and
# logical axes absent from the table, mean replication.
RULES: Mapping[str, tuple[str, ...]] = {
  "batch": ("data", "fsdp"),
  "vocab": ("tensor",),
  "width": ("fsdp",),
  "heads": ("tensor",),
  "mlp": ("tensor",),
  "experts": ("expert",),
}


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
    own = key
    for char in jax.tree_util.keystr(path).encode():
      own = jax.random.fold_in(own, char)
    return (std * jax.random.normal(own, spec.shape)).astype(dtype)

  return jax.tree_util.tree_map_with_path(draw, specs, is_leaf=_is_spec)


def shapes(specs: Any, dtype: Any = jnp.float32) -> Any:
  """The tree as `jax.ShapeDtypeStruct`."""
  return jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs, is_leaf=_is_spec
  )


def shardings(
  specs: Any, mesh: Mesh, rules: Mapping[str, tuple[str, ...]] = RULES
) -> Any:
  """The tree as `NamedSharding` on `mesh`.

  Raises:
    ValueError: two dimensions of one parameter map to the same mesh axis.
  """

  def one(spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, partition(spec.axes, mesh, rules))

  return jax.tree.map(one, specs, is_leaf=_is_spec)


def partition(
  axes: tuple[str | None, ...],
  mesh: Mesh,
  rules: Mapping[str, tuple[str, ...]] = RULES,
) -> PartitionSpec:
  """Mesh axes of each dimension. Raises ValueError on a collision."""
  used: set[str] = set()
  parts: list[tuple[str, ...] | None] = []
  for axis in axes:
    wanted = rules.get(axis, ()) if axis else ()
    names = tuple(n for n in wanted if mesh.shape.get(n, 1) > 1)
    if used & set(names):
      raise ValueError(
        f"logical axes {axes} use mesh axis {sorted(used & set(names))} twice;"
        " give one of them another rule"
      )
    used |= set(names)
    parts.append(names or None)
  return PartitionSpec(*parts)


def parameter_count(specs: Any) -> int:
  leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
  return sum(math.prod(spec.shape) for spec in leaves)
