"""Tokens appended to a cache: prefill with many, decode with one.

A cache holds position p of a slot at index p modulo its length: layers that see
a window need no more than the window and what one call appends.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from arl_jax import sharding
from arl_jax.model import attention, moe, transformer
from arl_jax.model.config import Layer, ModelConfig
from arl_jax.sharding import Spec


def cache_specs(
  config: ModelConfig,
  slots: int,
  max_length: int,
  chunk: int = 0,
  block: int = 0,
) -> dict[str, dict[str, list[Spec]]]:
  """What decoding keeps of each token: blocks [S, heads, length, dim].

  Keys and values of each kv head, or the latent of latent attention; with a
  leading axis where the layers are scanned.

  Args:
    config: the model's.
    slots: S.
    max_length: tokens of a slot.
    chunk: tokens that one call appends at most. Layers with a window then
      keep `window + chunk - 1` tokens; 0 keeps all of them.
    block: tokens of a block; 0 keeps all in one. Attention reads whole blocks,
      as part of an array would be copied first.
  """
  return {
    name: sharding.stacked(
      layer_cache_specs(config, layer, slots, max_length, chunk, block),
      stack.repeats,
    )
    for stack in config.stacks()
    for name, layer in zip(stack.names(), stack.layers, strict=True)
  }


def layer_cache_specs(
  config: ModelConfig,
  layer: Layer,
  slots: int,
  max_length: int,
  chunk: int = 0,
  block: int = 0,
) -> dict[str, list[Spec]]:
  """`cache_specs` of one layer; what keeps a window only is one block."""
  length, block = max_length, block or max_length
  if layer.window and chunk and layer.window + chunk - 1 < max_length:
    length = block = layer.window + chunk - 1
  sizes = [min(block, length - first) for first in range(0, length, block)]
  widths = transformer.mixer(config).cached_widths(config)
  return {
    name: [
      Spec(
        shape=(slots, heads, size, dim),
        axes=("batch", "kv_heads", None, None),
        init="zeros",
      )
      for size in sizes
    ]
    for name, (heads, dim) in widths.items()
  }


def init_cache(
  config: ModelConfig, slots: int, max_length: int, dtype: Any = jnp.float32
) -> dict[str, dict[str, list[jax.Array]]]:
  """An empty cache that keeps every token, as `cache_specs` says."""
  specs = cache_specs(config, slots, max_length)
  return jax.tree.map(
    lambda s: jnp.zeros(s.shape, s.dtype), sharding.shapes(specs, dtype)
  )


def extend(
  params: Any,
  config: ModelConfig,
  cache: Any,
  ids: jax.Array,
  start: jax.Array,
  count: jax.Array,
  *,
  span: int | None = None,
  return_experts: bool = False,
) -> Any:
  """Appends tokens to the cache of every slot.

  Args:
    params: from `init`.
    config: the model's.
    cache: from `init_cache` or of `cache_specs`.
    ids: [S, C] int32, of which the first `count` count.
    start: [S] int32, tokens already in the slot.
    count: [S] int32 in 0..C; slots with 0 stay as they are.
    span: tokens that no slot exceeds after this call: attention looks no
      further. By default the cache's length.
    return_experts: also return what the routers chose.

  Returns:
    The new cache and hidden states after the final norm, [S, C, D]; with
    `return_experts` also [S, C, MoE layers, K] int32.
  """
  slots = jax.tree.leaves(cache)[0].shape[-4]
  if ids.ndim != 2 or ids.shape[0] != slots:
    raise ValueError(f"ids has shape {ids.shape}; the cache has {slots} slots")
  columns = jnp.arange(ids.shape[1])
  positions = start[:, None] + columns
  real = columns < count[:, None]
  x = transformer.embed(params, config, ids)
  new = dict(cache)
  chosen = []
  for stack in config.stacks():
    names = stack.names()
    layers = [params["layers"][name] for name in names]
    held = [cache[name] for name in names]
    run = functools.partial(
      _extend_period, config, stack, positions=positions, real=real, span=span
    )
    if stack.repeats:
      # Carried and updated in place: a scan's outputs would be copies.
      def turn(carry, inputs, run=run):
        x, held, experts = run(*carry, *inputs)
        return (x, held), experts

      (x, held), experts = jax.lax.scan(
        turn, (x, held), (layers, jnp.arange(stack.repeats))
      )
      if experts:
        by_depth = jnp.stack(experts, 1)
        chosen.append(by_depth.reshape(-1, *by_depth.shape[2:]))
    else:
      x, held, experts = run(x, held, layers, None)
      chosen += [jnp.stack(experts)] if experts else []
    new.update(zip(names, held, strict=True))
  hidden = attention.rms_norm(x, params["norm"], config.norm_eps)
  if not return_experts:
    return new, hidden
  return new, hidden, jnp.moveaxis(jnp.concatenate(chosen), 0, 2)


def _extend_period(
  config, stack, x, held, layers, index, *, positions, real, span
):
  """The layers of one period; `index` is None where caches have no axis."""
  new, chosen = [], []
  for layer, params, cache in zip(stack.layers, layers, held, strict=True):
    cache, x, experts = extend_layer(
      params,
      config,
      layer,
      cache,
      x,
      positions=positions,
      real=real,
      span=span,
      index=index,
    )
    new.append(cache)
    chosen += [] if experts is None else [experts]
  return x, new, chosen


def extend_layer(
  params: Any,
  config: ModelConfig,
  layer: Layer,
  cache: dict[str, list[jax.Array]],
  x: jax.Array,
  *,
  positions: jax.Array,
  real: jax.Array,
  span: int | None = None,
  index: jax.Array | None = None,
) -> tuple[dict[str, list[jax.Array]], jax.Array, jax.Array | None]:
  """One layer over appended tokens.

  Args:
    params: of the layer.
    config: the model's.
    layer: which it is.
    cache: of the layer.
    x: [S, C, D].
    positions: [S, C] int32, in steps of 1.
    real: [S, C] bool, tokens that count; they stand together.
    span: as in `extend`.
    index: of the layer, where the cache has a leading axis.

  Returns:
    The cache, x after the layer, and the experts [S, C, K] or None.
  """
  mixer = transformer.mixer(config)
  p = params["attention"]
  normed = attention.rms_norm(x, p["norm"], config.norm_eps)
  q, entries = mixer.project_cached(p, config, normed, positions)
  sizes = [block.shape[-2] for block in next(iter(cache.values()))]
  length = sum(sizes)
  cache = {
    name: _written(blocks, entries[name], positions % length, real, index)
    for name, blocks in cache.items()
  }
  # The blocks that reach as far as `span`.
  ends = list(itertools.accumulate(sizes))
  count = 1 + sum(end < (span or length) for end in ends[:-1])
  looked_at = {
    name: [b if index is None else b[index] for b in blocks[:count]]
    for name, blocks in cache.items()
  }
  # The latest position that each index can hold; negative if none does.
  end = jnp.where(real, positions + 1, positions[:, :1]).max(1)
  place = jnp.arange(ends[count - 1])
  held = place + (end[:, None] - 1 - place) // length * length
  distance = positions[:, :, None] - held[:, None]
  visible = (held >= 0)[:, None] & (distance >= 0)
  if layer.window:
    visible &= distance < layer.window
  attended = mixer.attend_cached(p, config, q, looked_at, visible)
  x = x + attention.merge_heads(p, attended).astype(x.dtype)
  y, routed = moe.apply(
    params["moe" if layer.moe else "mlp"], config, x, moe=layer.moe
  )
  return cache, x + y.astype(x.dtype), routed.get("experts")


def _written(blocks, entries, target, real, index):
  """Blocks with entries [S, heads, C, dim] at their targets [S, C]."""
  new, first = [], 0
  rows = jnp.arange(target.shape[0])[:, None]
  for block in blocks:
    size = block.shape[-2]
    inside = real & (target >= first) & (target < first + size)
    # Out of range: dropped by the scatter, so padding writes nothing.
    at: tuple[Any, ...] = (
      rows,
      slice(None),
      jnp.where(inside, target - first, size),
    )
    if index is not None:
      at = (index, *at)
    values = entries.swapaxes(1, 2).astype(block.dtype)
    new.append(block.at[at].set(values, mode="drop"))
    first += size
  return new
