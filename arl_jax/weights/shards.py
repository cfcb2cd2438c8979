"""Arrays on devices as boxes in host memory, and back."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Index = tuple[int, ...]
# Of a tensor, by start and stop along each axis.
Box = tuple[Index, Index]


class Piece(NamedTuple):
  """A box of a tensor that this process publishes.

  Attributes:
    name: of the tensor.
    start: first index along each axis.
    stop: index after the last one along each axis.
    device: id of the device that has it.
    data: the elements, in one piece.
  """

  name: str
  start: Index
  stop: Index
  device: int
  data: np.ndarray


def named(tree: Any) -> dict[str, Any]:
  """The leaves by path, such as "layers/000/mlp/up"."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def copies(tree: Any, dtype: str | None, keep: str) -> dict[str, jax.Array]:
  """Copies that stay when an update takes the originals away.

  Args:
    tree: of arrays.
    dtype: that floating-point leaves are rounded to, None for their own.
    keep: leaves whose path ends so are never rounded.

  Returns:
    Arrays by name, each placed as its original. The host waits for none.
  """
  found = {}
  for name, leaf in named(tree).items():
    array = jnp.asarray(leaf)
    rounded = jnp.issubdtype(array.dtype, jnp.floating)
    rounded &= name.rpartition("/")[2] != keep
    found[name] = _copy(array, dtype if dtype and rounded else array.dtype)
    found[name].copy_to_host_async()
  return found


@functools.partial(jax.jit, static_argnums=1)
def _copy(x: jax.Array, dtype: Any) -> jax.Array:
  # A copy in any case: an unchanged input would come out as it is.
  return jnp.copy(x).astype(dtype)


def pieces(arrays: Mapping[str, jax.Array], most: int) -> Iterator[Piece]:
  """What this process has to publish: each element once among all processes.

  Args:
    arrays: by name.
    most: bytes of a piece, as far as cuts along one axis make that possible.
  """
  for name, array in arrays.items():
    for shard in array.addressable_shards:
      if shard.replica_id == 0:
        start, _ = box(shard.index, array.shape)
        data = np.ascontiguousarray(shard.data).reshape(shard.data.shape)
        for a, b in _cuts(data.shape, data.nbytes, most):
          yield Piece(
            name,
            tuple(map(sum, zip(start, a, strict=True))),
            tuple(map(sum, zip(start, b, strict=True))),
            shard.device.id,
            data[tuple(map(slice, a, b))],
          )


def _cuts(shape: Index, size: int, most: int) -> Iterator[Box]:
  """Boxes of an array that each lie in one piece."""
  axis = next((i for i, n in enumerate(shape) if n > 1), None)
  count = -(-size // most)
  if axis is None or count <= 1:
    yield (0,) * len(shape), shape
    return
  step = -(-shape[axis] // count)
  for first in range(0, shape[axis], step):
    start, stop = [0] * len(shape), [*shape]
    start[axis], stop[axis] = first, min(first + step, shape[axis])
    yield tuple(start), tuple(stop)


def box(index: Sequence[slice], shape: Sequence[int]) -> Box:
  """Start and stop of an index into an array."""
  bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
  return tuple(a for a, _ in bounds), tuple(b for _, b in bounds)


def meets(one: Box, two: Box) -> bool:
  """Whether two boxes share an element."""
  return all(
    max(a, c) < min(b, d) for a, b, c, d in zip(*one, *two, strict=True)
  )


def assembled(
  wanted: Box, parts: Mapping[Box, np.ndarray], dtype: np.dtype
) -> np.ndarray:
  """A box put together from others; a view where it lies within one.

  Args:
    wanted: what to make.
    parts: boxes that cover it, each as an array of its shape.
    dtype: of them.
  """
  start, stop = wanted
  shape = tuple(b - a for a, b in zip(start, stop, strict=True))
  for (first, last), data in parts.items():
    if all(
      a >= c and b <= d
      for a, b, c, d in zip(start, stop, first, last, strict=True)
    ):
      return data[_within(start, stop, first)]
  out = np.empty(shape, dtype)
  for (first, last), data in parts.items():
    if meets(wanted, (first, last)):
      low = tuple(map(max, start, first))
      high = tuple(map(min, stop, last))
      out[_within(low, high, start)] = data[_within(low, high, first)]
  return out


def _within(start: Index, stop: Index, origin: Index) -> tuple[Any, ...]:
  cuts = zip(start, stop, origin, strict=True)
  # The ellipsis makes a view of a scalar, too.
  return *(slice(a - o, b - o) for a, b, o in cuts), ...


def held(array: Any) -> dict[Box, np.ndarray]:
  """The boxes of an array that this process has."""
  if isinstance(array, jax.Array):
    return {
      box(shard.index, array.shape): np.asarray(shard.data)
      for shard in array.addressable_shards
    }
  array = np.asarray(array)
  return {((0,) * array.ndim, array.shape): array}


def needed(leaf: Any) -> list[Box]:
  """Boxes of a leaf that this process wants: by its sharding, or all of it."""
  shape = tuple(leaf.shape)
  place = getattr(leaf, "sharding", None)
  if place is None:
    return [((0,) * len(shape), shape)]
  found = place.addressable_devices_indices_map(shape).values()
  return list(dict.fromkeys(box(index, shape) for index in found))


def placed(leaf: Any, parts: Mapping[Box, np.ndarray], dtype: np.dtype) -> Any:
  """An array as `leaf` wants it, from boxes of the published dtype."""
  shape = tuple(leaf.shape)

  def part(index: Any) -> np.ndarray:
    found = assembled(box(index, shape), parts, dtype)
    return found.astype(leaf.dtype, copy=False)

  place = getattr(leaf, "sharding", None)
  if place is None:
    whole = part((slice(None),) * len(shape))
    whole.flags.writeable = False
    return whole
  return jax.make_array_from_callback(shape, place, part)
