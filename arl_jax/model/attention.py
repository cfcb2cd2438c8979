"""Softmax attention, and grouped-query heads around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from arl_jax import sharding
from arl_jax.model import rope
from arl_jax.model.config import ModelConfig
from arl_jax.model.splash import splash_attention
from arl_jax.sharding import Spec

# Finite, so that a row without any visible key gives no NaN.
_MASKED = -1e30

# Queries that meet their keys at once in whole rows, and the most such blocks
# that are written out.
_QUERY_BLOCK, _QUERY_BLOCKS = 128, 32

# Queries of a group up to which keys come first in the product with them.
_FEW_QUERIES = 16

# Longer rows recompute their scores in the backward pass.
_SCORES_HELD = 2048


def specs(config: ModelConfig) -> dict[str, Spec]:
  d, h, g, k = config.width, config.heads, config.kv_heads, config.head_dim
  v = config.values
  tree = {
    "norm": Spec(shape=(d,), axes=(None,), init="ones"),
    "q": Spec(shape=(d, h * k), axes=("width", "heads"), fan_in=d),
    "k": Spec(shape=(d, g * k), axes=("width", "heads"), fan_in=d),
    "v": Spec(shape=(d, g * v), axes=("width", "heads"), fan_in=d),
    "out": Spec(shape=(h * v, d), axes=("heads", "width"), fan_in=h * v),
  }
  if config.qk_norm:
    for name in ("q_norm", "k_norm"):
      tree[name] = Spec(shape=(k,), axes=(None,), init="ones")
  if config.attention_bias:
    for name, size in (("q", h * k), ("k", g * k), ("v", g * v)):
      tree[f"{name}_bias"] = Spec(shape=(size,), axes=("heads",), init="zeros")
    tree["out_bias"] = Spec(shape=(d,), axes=(None,), init="zeros")
  if config.sinks:
    tree["sinks"] = Spec(shape=(h,), axes=("heads",), init="zeros")
  return tree


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """X / rms(x) * scale over the last axis, computed in float32."""
  wide = x.astype(jnp.float32)
  wide *= jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
  return (wide * scale).astype(x.dtype)


def product(params: Any, name: str, x: jax.Array) -> jax.Array:
  """X [..., D] times a matrix, also one that is kept by its rows.

  `<name>_rows` is the transposed matrix [N, D]. With few rows of x, as in
  decoding, XLA's product on a CPU is faster when the matrix comes first.
  """
  if name in params:
    return x @ params[name]
  return rows_product(params[f"{name}_rows"], x)


def rows_product(rows: jax.Array, x: jax.Array, dtype: Any = None) -> jax.Array:
  """X [..., D] times the transpose of rows [N, D], which come first."""
  flat = x.reshape(-1, x.shape[-1])
  y = jax.lax.dot_general(
    rows, flat, (((1,), (1,)), ((), ())), preferred_element_type=dtype
  )
  # Else XLA makes the transposed product one of the other order.
  y = jax.lax.optimization_barrier(y)
  return y.T.reshape(*x.shape[:-1], -1)


def linear(params: Any, name: str, x: jax.Array) -> jax.Array:
  """X times a matrix, plus its bias where there is one."""
  y = product(params, name, x)
  bias = params.get(f"{name}_bias")
  return y if bias is None else y + bias


def project(
  params: Any, config: ModelConfig, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Queries [B, H, T, k], keys and values [B, G, T, k] of x [B, T, D]."""
  if "qkv" in params or "qkv_rows" in params:
    first = config.heads * config.head_dim
    second = first + config.kv_heads * config.head_dim
    q, k, v = jnp.split(linear(params, "qkv", x), (first, second), -1)
  else:
    q, k, v = (linear(params, name, x) for name in ("q", "k", "v"))
  heads = (*x.shape[:2], -1)
  q = q.reshape(*heads, config.head_dim)
  k = k.reshape(*heads, config.head_dim)
  v = v.reshape(*heads, config.values)
  if config.qk_norm:
    q = rms_norm(q, params["q_norm"], config.norm_eps)
    k = rms_norm(k, params["k_norm"], config.norm_eps)
  q = rope.rotate(q, positions, config.rope)
  k = rope.rotate(k, positions, config.rope)
  return q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)


def cached_widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
  """Heads and dimensions of what a cache holds of each token."""
  return {
    "k": (config.kv_heads, config.head_dim),
    "v": (config.kv_heads, config.values),
  }


def project_cached(
  params: Any, config: ModelConfig, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Queries, and what the cache takes of these tokens [B, G, T, dim]."""
  q, k, v = project(params, config, x, positions)
  return q, {"k": k, "v": v}


def attend_cached(
  params: Any,
  config: ModelConfig,
  q: jax.Array,
  cache: Mapping[str, Sequence[jax.Array]],
  visible: jax.Array,
) -> jax.Array:
  """Attention of new tokens to the blocks of a cache, [S, H, T, value dim]."""
  return attend_blocks(
    q,
    cache["k"],
    cache["v"],
    visible,
    scale=score_scale(config),
    sinks=params.get("sinks"),
  )


def score_scale(config: ModelConfig) -> float:
  return config.head_dim**-0.5 * config.score_scale


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  visible: jax.Array,
  *,
  scale: float,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """softmax(scale · q k) v over the visible keys.

  Args:
    q: [B, H, T, k].
    k: [B, G, U, k].
    v: [B, G, U, n].
    visible: [B, T, U] bool.
    scale: of the scores.
    sinks: [H], logits that take part in the softmax and bring no value
      (gpt-oss).

  Returns:
    [B, H, T, n]; some finite value for a query that sees nothing.
  """
  return attend_blocks(q, [k], [v], visible, scale=scale, sinks=sinks)


def attend_blocks(
  q: jax.Array,
  keys: Sequence[jax.Array],
  values: Sequence[jax.Array],
  visible: jax.Array,
  *,
  scale: float,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """`attend` where keys and values lie in blocks along U."""
  b, h, t, dim = q.shape
  groups = keys[0].shape[1]
  each = h // groups
  q = (q * scale).reshape(b, groups, each * t, dim)
  parts = [_scores(q, k) for k in keys]
  scores = jnp.concatenate(parts, -1) if len(parts) > 1 else parts[0]
  scores = scores.reshape(b, groups, each, t, -1)
  scores += jnp.where(visible, 0.0, _MASKED)[:, None, None]
  # Normalised after the product with v: one pass less over the scores.
  top = scores.max(-1, keepdims=True)
  if sinks is not None:
    sink = sinks.astype(jnp.float32).reshape(1, groups, each, 1, 1)
    top = jnp.maximum(top, sink)
  top = jax.lax.stop_gradient(top)
  weights = jnp.exp(scores - top)
  total = weights.sum(-1, keepdims=True)
  if sinks is not None:
    total += jnp.exp(sink - top)
  dtype = values[0].dtype
  flat = weights.reshape(b, groups, each * t, -1).astype(dtype)
  out, first = jnp.zeros(()), 0
  for v in values:
    part = flat[..., first : first + v.shape[2]]
    first += v.shape[2]
    out = out + jnp.einsum(
      "bgtu,bguk->bgtk", part, v, preferred_element_type=jnp.float32
    )
  out = out.reshape(b, groups, each, t, -1) / total
  return out.reshape(b, h, t, -1).astype(dtype)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
  """[B, G, T, U] float32 of q [B, G, T, k] and k [B, G, U, k]."""
  if q.shape[2] > _FEW_QUERIES or sharding.platform() != "cpu":
    return jnp.einsum(
      "bgtk,bguk->bgtu", q, k, preferred_element_type=jnp.float32
    )
  # With the long operand first: the other order takes CPUs five times as long.
  turned = jnp.einsum(
    "bguk,bgtk->bgut", k, q, preferred_element_type=jnp.float32
  )
  # As in `rows_product`.
  return jax.lax.optimization_barrier(turned).swapaxes(2, 3)


def attend_packed(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  scale: float,
  window: int = 0,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Causal attention within segments, of whole rows.

  On TPU a flash kernel. Elsewhere queries go in blocks that meet only the keys
  that any of them sees, recomputed in the backward pass when rows are long: no
  [T, T] score matrix is held.

  Args:
    q: [B, H, T, k].
    k: [B, G, T, k].
    v: [B, G, T, n].
    segment_ids: [B, T] int32, 0 = padding.
    scale: of the scores.
    window: keys that a query sees, itself included; 0 = all before it.
    sinks: as in `attend`.

  Returns:
    [B, H, T, n].
  """
  if sharding.platform() == "tpu":
    mesh = sharding.ambient_mesh()
    axes = None
    if mesh is not None:
      axes = sharding.partition(("batch",), q.shape[:1], mesh)[0]
    return splash_attention(
      q,
      k,
      v,
      segment_ids,
      scale=scale,
      window=window,
      sinks=sinks,
      batch_axes=sharding.mesh_axes(axes),
      head_axis=sharding.RULES["heads"][0],
    )
  t = q.shape[2]
  size = max(_QUERY_BLOCK, -(-t // _QUERY_BLOCKS))
  meet: Callable[..., jax.Array] = functools.partial(attend, scale=scale)
  if t > _SCORES_HELD:
    meet = jax.checkpoint(meet)
  blocks = []
  for first in range(0, t, size):
    last = min(first + size, t)
    start = max(0, first - window + 1) if window else 0
    rows, keys = slice(first, last), slice(start, last)
    same = segment_ids[:, rows, None] == segment_ids[:, None, keys]
    distance = jnp.arange(first, last)[:, None] - jnp.arange(start, last)
    seen = (distance >= 0) & (distance < (window or t))
    visible = same & seen & (segment_ids > 0)[:, rows, None]
    blocks.append(
      meet(q[:, :, rows], k[:, :, keys], v[:, :, keys], visible, sinks=sinks)
    )
  return jnp.concatenate(blocks, 2)


def merge_heads(params: Any, x: jax.Array) -> jax.Array:
  """[B, H, T, value dim] -> [B, T, D] through the output projection."""
  b, h, t, dim = x.shape
  return linear(params, "out", x.swapaxes(1, 2).reshape(b, t, h * dim))
