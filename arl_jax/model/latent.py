"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are expanded from one latent a token. Whole rows
expand it; decoding keeps the latent in the cache and moves the expansion to
the query and the result, so that a token costs `latent_rank + rope_dim`
numbers a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from arl_jax.model import attention, rope
from arl_jax.model.attention import rms_norm
from arl_jax.model.config import ModelConfig
from arl_jax.sharding import Spec


def specs(config: ModelConfig) -> dict[str, Spec]:
  d, h, k, v = config.width, config.heads, config.head_dim, config.values
  rank, rotated = config.latent_rank, config.rope_dim
  expanded = h * (k - rotated + v)
  tree = {
    "norm": Spec(shape=(d,), axes=(None,), init="ones"),
    "latent": Spec(shape=(d, rank + rotated), axes=("width", None), fan_in=d),
    "latent_norm": Spec(shape=(rank,), axes=(None,), init="ones"),
    "expand": Spec(shape=(rank, expanded), axes=(None, "heads"), fan_in=rank),
    "out": Spec(shape=(h * v, d), axes=("heads", "width"), fan_in=h * v),
  }
  if not config.query_rank:
    tree["q"] = Spec(shape=(d, h * k), axes=("width", "heads"), fan_in=d)
    return tree
  r = config.query_rank
  tree["q_latent"] = Spec(shape=(d, r), axes=("width", None), fan_in=d)
  tree["q_latent_norm"] = Spec(shape=(r,), axes=(None,), init="ones")
  tree["q"] = Spec(shape=(r, h * k), axes=(None, "heads"), fan_in=r)
  return tree


def _queries(params, config, x, positions):
  """Parts of the queries without and with rope, [B, T, H, dim] each."""
  if config.query_rank:
    x = rms_norm(
      x @ params["q_latent"], params["q_latent_norm"], config.norm_eps
    )
  q = (x @ params["q"]).reshape(*x.shape[:2], config.heads, config.head_dim)
  plain = config.head_dim - config.rope_dim
  return q[..., :plain], rope.rotate(q[..., plain:], positions, config.rope)


def _latents(params, config, x, positions):
  """Normed latents [B, T, rank] and the key part that all heads share."""
  both = x @ params["latent"]
  latent = rms_norm(
    both[..., : config.latent_rank], params["latent_norm"], config.norm_eps
  )
  shared = both[..., None, config.latent_rank :]
  return latent, rope.rotate(shared, positions, config.rope)


def project(
  params: Any, config: ModelConfig, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Queries and keys [B, H, T, k], values [B, H, T, n] of x [B, T, D]."""
  plain_q, rotated_q = _queries(params, config, x, positions)
  latent, shared = _latents(params, config, x, positions)
  plain = config.head_dim - config.rope_dim
  expanded = (latent @ params["expand"]).reshape(
    *x.shape[:2], config.heads, plain + config.values
  )
  shared = jnp.broadcast_to(shared, rotated_q.shape)
  q = jnp.concatenate([plain_q, rotated_q], -1)
  k = jnp.concatenate([expanded[..., :plain], shared], -1)
  v = expanded[..., plain:]
  return q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)


def cached_widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
  """Heads and dimensions of what a cache holds of each token."""
  return {"latent": (1, config.latent_rank + config.rope_dim)}


def _expansions(params, config):
  """Latent to keys [rank, H, plain] and to values [rank, H, n]."""
  plain = config.head_dim - config.rope_dim
  both = params["expand"].reshape(config.latent_rank, config.heads, -1)
  return both[..., :plain], both[..., plain:]


def project_cached(
  params: Any, config: ModelConfig, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Queries in latent space, and what the cache takes of these tokens."""
  plain_q, rotated_q = _queries(params, config, x, positions)
  latent, shared = _latents(params, config, x, positions)
  to_keys, _ = _expansions(params, config)
  inner = jnp.einsum("bthk,rhk->bthr", plain_q, to_keys)
  q = jnp.concatenate([inner, rotated_q], -1).swapaxes(1, 2)
  entry = jnp.concatenate([latent, shared[:, :, 0]], -1)[:, None]
  return q, {"latent": entry}


def attend_cached(
  params: Any,
  config: ModelConfig,
  q: jax.Array,
  cache: Mapping[str, Sequence[jax.Array]],
  visible: jax.Array,
) -> jax.Array:
  """Attention of new tokens to the blocks of a cache, [S, H, T, value dim]."""
  keys = cache["latent"]
  mixed = attention.attend_blocks(
    q,
    keys,
    [k[..., : config.latent_rank] for k in keys],
    visible,
    scale=attention.score_scale(config),
  )
  _, to_values = _expansions(params, config)
  return jnp.einsum("bhtr,rhv->bhtv", mixed, to_values)
