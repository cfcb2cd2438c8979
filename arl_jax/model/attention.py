"""Grouped-query attention: full rows for training, a cache for decoding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from arl_jax.model.config import ModelConfig
from arl_jax.sharding import Spec

# Finite, so that a row without any visible key gives no NaN.
_MASKED = -1e30

# Queries that meet their keys at once in whole rows.
_QUERY_BLOCK = 128


def specs(config: ModelConfig) -> dict[str, Spec]:
  d, h, g, k = config.width, config.heads, config.kv_heads, config.head_dim
  return {
    "norm": Spec(shape=(d,), axes=(None,), init="ones"),
    "q": Spec(shape=(d, h * k), axes=("width", "heads"), fan_in=d),
    "k": Spec(shape=(d, g * k), axes=("width", "heads"), fan_in=d),
    "v": Spec(shape=(d, g * k), axes=("width", "heads"), fan_in=d),
    "q_norm": Spec(shape=(k,), axes=(None,), init="ones"),
    "k_norm": Spec(shape=(k,), axes=(None,), init="ones"),
    "out": Spec(shape=(h * k, d), axes=("heads", "width"), fan_in=h * k),
  }


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """X / rms(x) * scale over the last axis."""
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
  """Rotates the two halves of each head as pairs.

  Args:
    x: [B, T, heads, head_dim].
    positions: [B, T] int32.
    theta: base of the frequencies.
  """
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None].astype(jnp.float32) * frequency
  sin, cos = jnp.sin(angle)[:, :, None, :], jnp.cos(angle)[:, :, None, :]
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def project(
  params: Any, config: ModelConfig, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Queries [B, H, T, k], keys and values [B, G, T, k] of x [B, T, D]."""
  b, t, _ = x.shape
  shape = (b, t, -1, config.head_dim)
  q = (x @ params["q"]).reshape(shape)
  k = (x @ params["k"]).reshape(shape)
  v = (x @ params["v"]).reshape(shape)
  q = rms_norm(q, params["q_norm"], config.norm_eps)
  k = rms_norm(k, params["k_norm"], config.norm_eps)
  q = rope(q, positions, config.rope_theta)
  k = rope(k, positions, config.rope_theta)
  return q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array
) -> jax.Array:
  """softmax(q k / sqrt(head_dim)) v over the visible keys.

  Args:
    q: [B, H, T, head_dim].
    k: [B, G, U, head_dim].
    v: [B, G, U, head_dim].
    visible: [B, T, U] bool.

  Returns:
    [B, H, T, head_dim]; some finite value for a query that sees nothing.
  """
  b, h, t, dim = q.shape
  groups, u = k.shape[1:3]
  q = (q * dim**-0.5).reshape(b, groups, h // groups * t, dim)
  scores = jnp.einsum("bgtk,bguk->bgtu", q, k)
  scores = scores.reshape(b, groups, h // groups, t, u)
  scores += jnp.where(visible, 0.0, _MASKED)[:, None, None]
  # Normalised after the product with v: one pass less over the scores.
  top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
  weights = jnp.exp(scores - top)
  total = weights.sum(-1, keepdims=True)
  flat = weights.reshape(b, groups, h // groups * t, u)
  out = jnp.einsum("bgtu,bguk->bgtk", flat, v)
  return (out.reshape(b, groups, h // groups, t, dim) / total).reshape(
    b, h, t, dim
  )


def attend_packed(
  q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """Causal attention within segments, of whole rows.

  Queries go in blocks that meet only the keys up to their own end, which
  halves the work and the memory of a full [T, T] score matrix.

  Args:
    q: [B, H, T, head_dim].
    k: [B, G, T, head_dim].
    v: [B, G, T, head_dim].
    segment_ids: [B, T] int32, 0 = padding.
  """
  t = q.shape[2]
  blocks = []
  for first in range(0, t, _QUERY_BLOCK):
    last = min(first + _QUERY_BLOCK, t)
    rows = slice(first, last)
    same = segment_ids[:, rows, None] == segment_ids[:, None, :last]
    causal = jnp.arange(first, last)[:, None] >= jnp.arange(last)
    visible = same & causal & (segment_ids > 0)[:, rows, None]
    blocks.append(
      attend(q[:, :, rows], k[:, :, :last], v[:, :, :last], visible)
    )
  return jnp.concatenate(blocks, 2)


def merge_heads(params: Any, x: jax.Array) -> jax.Array:
  """[B, H, T, head_dim] -> [B, T, D] through the output projection."""
  b, h, t, dim = x.shape
  return x.swapaxes(1, 2).reshape(b, t, h * dim) @ params["out"]
