"""What lives on the device between calls: caches, and where each slot is."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from arl_jax import sharding
from arl_jax.model import decoding
from arl_jax.model.config import ModelConfig
from arl_jax.rollout import sampling
from arl_jax.rollout.sampling import SamplingState


class DecodeState(struct.PyTreeNode):
  """A pytree; every call takes and returns it, donated.

  Attributes:
    cache: of each layer, as `decoding.cache_specs` says.
    draft_cache: of the MTP module; None without drafts.
    length: [S] int32, tokens in the cache.
    hidden: [S, D], trunk output.
    hidden_at: [S] int32, tokens up to the one that `hidden` belongs to; -1
      where it isn't known, as after a part of a prefix was copied.
    active: [S] bool, slots that sample.
    sampling: how.
  """

  cache: Any
  draft_cache: Any
  length: jax.Array
  hidden: jax.Array
  hidden_at: jax.Array
  active: jax.Array
  sampling: SamplingState


# Blocks that a slot's cache is cut into on a CPU, and the least size of one.
# Elsewhere a slice is no copy, and programs stay small.
_BLOCKS, _LEAST_BLOCK = 8, 128


def block_of(max_length: int) -> int:
  """Tokens of a cache's blocks, a multiple of 128; 0 for a single one."""
  if sharding.platform() != "cpu":
    return 0
  return -(-max_length // (_BLOCKS * _LEAST_BLOCK)) * _LEAST_BLOCK


def cache_specs(
  model: ModelConfig, slots: int, max_length: int, chunk: int, *, drafts: bool
) -> tuple[Any, Any]:
  """Of the layers, and of the MTP module (None without drafts)."""
  sizes = (slots, max_length, chunk, block_of(max_length))
  layers = decoding.cache_specs(model, *sizes)
  if not drafts:
    return layers, None
  last = model.layer(model.layers - 1)
  return layers, decoding.layer_cache_specs(model, last, *sizes)


def bytes_per_slot(
  model: ModelConfig, max_length: int, chunk: int, dtype: Any, *, drafts: bool
) -> int:
  """Of caches; what else a slot holds is small."""
  specs = cache_specs(model, 1, max_length, chunk, drafts=drafts)
  shapes = jax.tree.leaves(sharding.shapes(specs, dtype))
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)


def empty(
  model: ModelConfig,
  slots: int,
  max_length: int,
  chunk: int,
  dtype: Any,
  *,
  drafts: bool,
) -> DecodeState:
  """Slots that hold nothing."""
  specs = cache_specs(model, slots, max_length, chunk, drafts=drafts)
  cache, draft_cache = jax.tree.map(
    lambda s: jnp.zeros(s.shape, s.dtype), sharding.shapes(specs, dtype)
  )
  none = jnp.zeros(slots, jnp.int32)
  return DecodeState(
    cache=cache,
    draft_cache=draft_cache,
    length=none,
    hidden=jnp.zeros((slots, model.width), dtype),
    hidden_at=none,
    active=jnp.zeros(slots, bool),
    sampling=sampling.initial(slots, model.vocab_size),
  )


def placed(state: DecodeState, mesh: Mesh) -> DecodeState:
  """Where each array of a state lies on a mesh: caches by slots and heads.

  What says where slots are and how they sample is small, and read by every
  process of the mesh: each device has all of it.

  Args:
    state: of arrays or their shapes.
    mesh: what it is split over.

  Returns:
    A state of `NamedSharding`.
  """

  def place(path: Any, x: Any) -> NamedSharding:
    axes: tuple[str | None, ...] = (None,) * x.ndim
    if path[0].name in ("cache", "draft_cache"):
      axes = (*(None,) * (x.ndim - 4), "batch", "kv_heads", None, None)
    elif path[0].name == "hidden":
      axes = ("batch", None)
    return NamedSharding(mesh, sharding.partition(axes, x.shape, mesh))

  return jax.tree_util.tree_map_with_path(place, state)


def kept(mesh: Mesh | None, step: Callable[..., Any]) -> Callable[..., Any]:
  """The step, on a mesh with what it gives in its place.

  Args:
    mesh: of the states; without one nothing is changed.
    step: gives a state, or a tuple with one.

  Returns:
    A function whose states lie as `placed` says, and whose other arrays every
    device has all of.
  """
  if mesh is None:
    return step
  whole = NamedSharding(mesh, PartitionSpec())

  def is_state(x: Any) -> bool:
    return isinstance(x, DecodeState)

  def place(x: Any) -> Any:
    return placed(x, mesh) if is_state(x) else whole

  @functools.wraps(step)
  def in_place(*args: Any) -> Any:
    found = step(*args)
    places = jax.tree.map(place, found, is_leaf=is_state)
    return jax.lax.with_sharding_constraint(found, places)

  return in_place


def move(
  target: DecodeState,
  source: DecodeState,
  source_slot: jax.Array,
  slot: jax.Array,
  length: jax.Array,
) -> DecodeState:
  """The first `length` tokens of a slot put into another one, maybe of another
  state; it doesn't sample.
  """

  def copied(into: jax.Array, x: jax.Array) -> jax.Array:
    axis = into.ndim - 4
    row = jax.lax.dynamic_index_in_dim(x, source_slot, axis)
    return jax.lax.dynamic_update_slice_in_dim(into, row, slot, axis)

  whole = length == source.hidden_at[source_slot]
  return target.replace(
    cache=jax.tree.map(copied, target.cache, source.cache),
    draft_cache=jax.tree.map(copied, target.draft_cache, source.draft_cache),
    length=target.length.at[slot].set(length),
    hidden=target.hidden.at[slot].set(source.hidden[source_slot]),
    hidden_at=target.hidden_at.at[slot].set(jnp.where(whole, length, -1)),
    active=target.active.at[slot].set(False),
  )


def clear(state: DecodeState, slot: jax.Array) -> DecodeState:
  """The state with nothing in a slot."""

  def emptied(x: jax.Array) -> jax.Array:
    return x.at[(slice(None),) * (x.ndim - 4) + (slot,)].set(0)

  return state.replace(
    cache=jax.tree.map(emptied, state.cache),
    draft_cache=jax.tree.map(emptied, state.draft_cache),
    length=state.length.at[slot].set(0),
    hidden=state.hidden.at[slot].set(0),
    hidden_at=state.hidden_at.at[slot].set(0),
    active=state.active.at[slot].set(False),
  )
