"""The policy as pure functions of a nested dict of arrays.

`forward` and `token_logprobs` see whole rows (training, scoring); `extend`
appends tokens to a key/value cache (prefill with many, decode with one).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from arl_jax import sharding
from arl_jax.model import attention, moe
from arl_jax.model.config import ModelConfig
from arl_jax.sharding import Spec

# Positions whose logits exist at the same time in `token_logprobs`.
_LOGIT_CHUNK = 512


def block_specs(config: ModelConfig) -> dict[str, Any]:
  return {"attention": attention.specs(config), "moe": moe.specs(config)}


def specs(config: ModelConfig) -> dict[str, Any]:
  """Every parameter, MTP module included. Embedding and head are tied."""
  d, v = config.width, config.vocab_size
  tree: dict[str, Any] = {
    "embed": Spec(
      shape=(v, d), axes=("vocab", "width"), init="embedding", scale=d**-0.5
    ),
    "layers": {f"{i:03d}": block_specs(config) for i in range(config.layers)},
    "norm": Spec(shape=(d,), axes=(None,), init="ones"),
  }
  if config.mtp_heads:
    tree["mtp"] = {
      "embed_norm": Spec(shape=(d,), axes=(None,), init="ones"),
      "hidden_norm": Spec(shape=(d,), axes=(None,), init="ones"),
      "project": Spec(shape=(2 * d, d), axes=(None, "width"), fan_in=2 * d),
      "block": block_specs(config),
      "norm": Spec(shape=(d,), axes=(None,), init="ones"),
    }
  return tree


def init(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """Fresh parameters, float32. Raises ValueError for an impossible config."""
  config.validate()
  return sharding.initialise(specs(config), key)


def embed(params: Any, ids: jax.Array) -> jax.Array:
  """[B, T, D]; scaled to unit variance, since the table is also the head."""
  width = params["embed"].shape[1]
  return params["embed"][ids] * width**0.5


def unembed(params: Any, hidden: jax.Array) -> jax.Array:
  """Logits [..., V] of normed hidden states [..., D], float32."""
  return (hidden @ params["embed"].T).astype(jnp.float32)


def block(
  params: Any,
  config: ModelConfig,
  x: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """One layer over whole rows: x [B, T, D], segment_ids [B, T]."""
  p = params["attention"]
  normed = attention.rms_norm(x, p["norm"], config.norm_eps)
  q, k, v = attention.project(p, config, normed, positions)
  attended = attention.attend_packed(q, k, v, segment_ids)
  x = x + attention.merge_heads(p, attended)
  y, aux = moe.apply(params["moe"], config, x)
  return x + y, aux


def hidden_states(
  params: Any,
  config: ModelConfig,
  input_ids: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Trunk output after the final norm, [B, T, D], and router records.

  The record stacks those of the layers on axis 2, e.g. "experts"
  [B, T, L, K].
  """
  x = embed(params, input_ids)
  records = []
  for _, layer in sorted(params["layers"].items()):
    x, aux = block(layer, config, x, positions, segment_ids)
    records.append(aux)
  stacked = {k: jnp.stack([r[k] for r in records], 2) for k in records[0]}
  return attention.rms_norm(x, params["norm"], config.norm_eps), stacked


def _row_defaults(input_ids, positions, segment_ids):
  if segment_ids is None:
    segment_ids = jnp.ones_like(input_ids)
  if positions is None:
    positions = segment_positions(segment_ids)
  return positions, segment_ids


def segment_positions(segment_ids: jax.Array) -> jax.Array:
  """[B, T] int32 positions that start from 0 in every segment."""
  t = segment_ids.shape[1]
  index = jnp.arange(t)[None]
  first = segment_ids != jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :t]
  return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def forward(
  params: Any,
  config: ModelConfig,
  input_ids: jax.Array,
  *,
  positions: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  """Logits [B, T, V] of input_ids [B, T].

  Args:
    params: from `init`.
    config: the model's.
    input_ids: [B, T] int32.
    positions: [B, T] int32; by default from 0 in every segment.
    segment_ids: [B, T] int32, 0 = padding; tokens see their own segment only.
      By default a row is one segment.
  """
  positions, segment_ids = _row_defaults(input_ids, positions, segment_ids)
  hidden, _ = hidden_states(params, config, input_ids, positions, segment_ids)
  return unembed(params, hidden)


def token_logprobs(
  params: Any,
  config: ModelConfig,
  input_ids: jax.Array,
  *,
  positions: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  temperature: float | jax.Array = 1.0,
  wanted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-prob of each token given those before it in its segment.

  Args:
    params: from `init`.
    config: the model's.
    input_ids: [B, T] int32.
    positions: as in `forward`.
    segment_ids: as in `forward`.
    temperature: scalar or [B, T]; logits are divided by it.
    wanted: [B, T] bool, tokens whose log-prob is needed; the others get 0 and
      cost nothing. By default all.

  Returns:
    logp [B, T], nats: entry t is log p(ids[t] | ids[<t]), 0 at a segment's
    first token and on padding; entropy [B, T] of that distribution, likewise.
  """
  positions, segment_ids = _row_defaults(input_ids, positions, segment_ids)
  hidden, _ = hidden_states(params, config, input_ids, positions, segment_ids)
  return logprobs_from_hidden(
    params,
    hidden,
    input_ids,
    segment_ids,
    temperature=temperature,
    wanted=wanted,
  )


def logprobs_from_hidden(
  params: Any,
  hidden: jax.Array,
  input_ids: jax.Array,
  segment_ids: jax.Array,
  *,
  temperature: float | jax.Array = 1.0,
  wanted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """As `token_logprobs`, of trunk outputs [B, T, D].

  Logits exist for `_LOGIT_CHUNK` positions at a time and are recomputed in the
  backward pass, so that no [B, T, V] array is ever held. Wanted positions are
  sorted to the front; chunks without any are skipped.
  """
  b, t = input_ids.shape
  known = jnp.pad(segment_ids[:, :-1] == segment_ids[:, 1:], ((0, 0), (1, 0)))
  known &= segment_ids > 0
  if wanted is not None:
    known &= wanted
  chunk = min(_LOGIT_CHUNK, b * t)
  padding = -b * t % chunk
  order = jnp.argsort(~known.reshape(-1), stable=True)

  def cut(x: jax.Array) -> jax.Array:
    flat = x.reshape(b * t, *x.shape[2:])[order]
    wide = jnp.pad(flat, ((0, padding),) + ((0, 0),) * (flat.ndim - 1))
    return wide.reshape(-1, chunk, *flat.shape[1:])

  @jax.checkpoint
  def score(h, ids, temp):
    logits = unembed(params, h) / temp[:, None]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    logp = jnp.take_along_axis(logits, ids[:, None], 1)[:, 0] - log_z
    p = jnp.exp(logits - log_z[:, None])
    return logp, log_z - (p * logits).sum(-1)

  def score_if_wanted(part):
    real, h, ids, temp = part
    nothing = jnp.zeros(chunk)
    temp = jnp.where(real, temp, 1.0)
    return jax.lax.cond(
      real.any(), score, lambda *_: (nothing, nothing), h, ids, temp
    )

  before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
  scale = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (b, t))
  parts = tuple(cut(x) for x in (known, before, input_ids, scale))
  sorted_scores = jax.lax.map(score_if_wanted, parts)

  def back(x: jax.Array) -> jax.Array:
    flat = jnp.zeros(b * t).at[order].set(x.reshape(-1)[: b * t])
    return jnp.where(known, flat.reshape(b, t), 0.0)

  return back(sorted_scores[0]), back(sorted_scores[1])


def init_cache(
  config: ModelConfig, slots: int, max_length: int
) -> dict[str, dict[str, jax.Array]]:
  """Empty keys and values of each layer, [S, G, max_length, head_dim]."""
  shape = (slots, config.kv_heads, max_length, config.head_dim)
  return {
    f"{i:03d}": {"k": jnp.zeros(shape), "v": jnp.zeros(shape)}
    for i in range(config.layers)
  }


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
  columns = jnp.arange(ids.shape[1])
  positions = start[:, None] + columns
  real = columns < count[:, None]
  max_length = cache["000"]["k"].shape[2]
  # Out of range: dropped by the scatter, so padding writes nothing.
  target = jnp.where(real, positions, max_length)
  visible = jnp.arange(max_length) <= positions[:, :, None]
  rows = jnp.arange(ids.shape[0])[:, None]
  x = embed(params, ids)
  new = {}
  for name, layer in sorted(params["layers"].items()):
    p = layer["attention"]
    normed = attention.rms_norm(x, p["norm"], config.norm_eps)
    q, k, v = attention.project(p, config, normed, positions)
    old = cache[name]
    keys = old["k"].at[rows, :, target].set(k.swapaxes(1, 2), mode="drop")
    values = old["v"].at[rows, :, target].set(v.swapaxes(1, 2), mode="drop")
    new[name] = {"k": keys, "v": values}
    attended = attention.attend(q, keys, values, visible)
    x = x + attention.merge_heads(p, attended)
    y, _ = moe.apply(layer["moe"], config, x)
    x = x + y
  return new, attention.rms_norm(x, params["norm"], config.norm_eps)
