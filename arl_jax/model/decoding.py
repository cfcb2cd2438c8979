"""Tokens appended to a cache: prefill with many, decode with one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from arl_jax import sharding
from arl_jax.model import attention, moe, transformer
from arl_jax.model.config import ModelConfig
from arl_jax.sharding import Spec


def cache_specs(
  config: ModelConfig, slots: int, max_length: int
) -> dict[str, dict[str, Spec]]:
  """What decoding keeps of each token, [S, heads, max_length, dim].

  Keys and values of each kv head, or the latent of latent attention; with a
  leading axis where the layers are scanned.
  """
  widths = transformer.mixer(config).cached_widths(config)
  layer = {
    name: Spec(
      shape=(slots, heads, max_length, dim),
      axes=("batch", "kv_heads", None, None),
      init="zeros",
    )
    for name, (heads, dim) in widths.items()
  }
  return {
    name: sharding.stacked(layer, stack.repeats)
    for stack in config.stacks()
    for name in stack.names()
  }


def init_cache(
  config: ModelConfig, slots: int, max_length: int, dtype: Any = jnp.float32
) -> dict[str, dict[str, jax.Array]]:
  """An empty cache, as `cache_specs` says."""
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
) -> tuple[Any, jax.Array]:
  """Appends tokens to the cache of every slot.

  Args:
    params: from `init`.
    config: the model's.
    cache: from `init_cache`.
    ids: [S, C] int32, of which the first `count` count.
    start: [S] int32, tokens already in the slot.
    count: [S] int32 in 0..C; slots with 0 stay as they are.

  Returns:
    The new cache and hidden states after the final norm, [S, C, D].
  """
  slots = jax.tree.leaves(cache)[0].shape[-4]
  if ids.ndim != 2 or ids.shape[0] != slots:
    raise ValueError(f"ids has shape {ids.shape}; the cache has {slots} slots")
  columns = jnp.arange(ids.shape[1])
  positions = start[:, None] + columns
  real = columns < count[:, None]
  x = transformer.embed(params, config, ids)
  new = dict(cache)
  for stack in config.stacks():
    names = stack.names()
    layers = [params["layers"][name] for name in names]
    held = [cache[name] for name in names]
    run = functools.partial(
      _extend_period, config, stack, positions=positions, real=real
    )
    if stack.repeats:
      # Carried and updated in place: a scan's outputs would be copies.
      def turn(carry, inputs, run=run):
        return run(*carry, *inputs), None

      (x, held), _ = jax.lax.scan(
        turn, (x, held), (layers, jnp.arange(stack.repeats))
      )
    else:
      x, held = run(x, held, layers, None)
    new.update(zip(names, held, strict=True))
  return new, attention.rms_norm(x, params["norm"], config.norm_eps)


def _extend_period(config, stack, x, held, layers, index, *, positions, real):
  """The layers of one period; `index` is None where caches have no axis."""
  mixer = transformer.mixer(config)
  rows = jnp.arange(x.shape[0])[:, None]
  new = []
  for layer, params, cache in zip(stack.layers, layers, held, strict=True):
    p = params["attention"]
    normed = attention.rms_norm(x, p["norm"], config.norm_eps)
    q, entries = mixer.project_cached(p, config, normed, positions)
    max_length = next(iter(cache.values())).shape[-2]
    # Out of range: dropped by the scatter, so padding writes nothing.
    target = jnp.where(real, positions, max_length)
    at: tuple[Any, ...] = (rows, slice(None), target)
    if index is not None:
      at = (index, *at)
    cache = {
      name: whole.at[at].set(
        entries[name].swapaxes(1, 2).astype(whole.dtype), mode="drop"
      )
      for name, whole in cache.items()
    }
    new.append(cache)
    if index is not None:
      cache = {name: whole[index] for name, whole in cache.items()}
    distance = positions[:, :, None] - jnp.arange(max_length)
    visible = (distance >= 0) & (distance < (layer.window or max_length))
    attended = mixer.attend_cached(p, config, q, cache, visible)
    x = x + attention.merge_heads(p, attended).astype(x.dtype)
    y, _ = moe.apply(
      params["moe" if layer.moe else "mlp"], config, x, moe=layer.moe
    )
    x = x + y.astype(x.dtype)
  return x, new
