"""Log-probs of tokens, without logits of a whole vocabulary for all of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from arl_jax import sharding
from arl_jax.model import transformer
from arl_jax.model.config import ModelConfig
from arl_jax.model.transformer import hidden_states, row_defaults

# Positions of a device whose logits exist at the same time.
_LOGIT_CHUNK = 512


def token_logprobs(
  params: Any,
  config: ModelConfig,
  input_ids: jax.Array,
  *,
  positions: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  temperature: float | jax.Array = 1.0,
  wanted: jax.Array | None = None,
  replay_experts: jax.Array | None = None,
  return_aux: bool = False,
) -> Any:
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
    replay_experts: as in `forward`.
    return_aux: as in `forward`; the record comes third.

  Returns:
    logp [B, T], nats: entry t is log p(ids[t] | ids[<t]), 0 at a segment's
    first token and on padding; entropy [B, T] of that distribution, likewise.
  """
  positions, segment_ids = row_defaults(
    params, config, input_ids, positions, segment_ids, replay_experts
  )
  if isinstance(temperature, int | float) and not temperature > 0:
    raise ValueError(f"temperature is {temperature}, not > 0")
  hidden, record = hidden_states(
    params, config, input_ids, positions, segment_ids, replay_experts
  )
  scores = from_hidden(
    params,
    hidden,
    input_ids,
    segment_ids,
    temperature=temperature,
    wanted=wanted,
  )
  return (*scores, record) if return_aux else scores


def from_hidden(
  params: Any,
  hidden: jax.Array,
  input_ids: jax.Array,
  segment_ids: jax.Array,
  *,
  temperature: float | jax.Array = 1.0,
  wanted: jax.Array | None = None,
  entropy_gradient: bool = True,
) -> tuple[jax.Array, jax.Array]:
  """As `token_logprobs`, of trunk outputs [B, T, D].

  Without `entropy_gradient` the entropy is a constant: half of the work over
  the vocabulary that isn't a matrix product is its gradient.

  Logits exist for `_LOGIT_CHUNK` positions at a time and are recomputed in the
  backward pass, so that no [B, T, V] array is ever held. Wanted positions are
  sorted to the front; chunks without any are skipped.
  """
  known = jnp.pad(segment_ids[:, :-1] == segment_ids[:, 1:], ((0, 0), (1, 0)))
  known &= segment_ids > 0
  before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
  scale = jnp.broadcast_to(
    jnp.asarray(temperature, jnp.float32), input_ids.shape
  )

  def score(head, real, h, ids, temperature):
    # Padding may hold anything.
    temperature = jnp.where(real, temperature, 1.0)[..., None]
    logits = transformer.logits(head, h) / temperature
    log_z = jax.nn.logsumexp(logits, axis=-1)
    logp = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0] - log_z
    if not entropy_gradient:
      logits, log_z = jax.lax.stop_gradient((logits, log_z))
    p = jnp.exp(logits - log_z[..., None])
    return logp, log_z - (p * logits).sum(-1)

  # All are wanted more often than not: then nothing need be sorted.
  return map_positions(
    score,
    transformer.head(params),
    known if wanted is None else known & wanted,
    (before, input_ids, scale),
    sort=wanted is not None,
  )


def map_positions(
  score: Callable[..., tuple[jax.Array, jax.Array]],
  head: jax.Array,
  wanted: jax.Array,
  parts: tuple[jax.Array, ...],
  *,
  sort: bool,
) -> tuple[jax.Array, jax.Array]:
  """Two numbers of each wanted position, computed a chunk at a time.

  Args:
    score: of the head and [rows, chunk] arrays, `wanted` first; recomputed in
      the backward pass.
    head: [D, V].
    wanted: [B, T] bool; other positions get 0.
    parts: [B, T, ...] further arguments.
    sort: wanted positions come first, and chunks without any are skipped;
      not where devices share the head: they would have to skip together.

  Returns:
    Two arrays [B, T].
  """
  mesh = sharding.ambient_mesh()
  split = mesh and sharding.mesh_axes(
    sharding.partition(("batch",), wanted.shape[:1], mesh)[0]
  )
  if mesh is not None:
    sort &= math.prod(mesh.shape[a] for a in split or ()) == mesh.size
  local = functools.partial(_map_local, score, sort)
  if split:
    # Every device sums the head's gradient over its own rows before devices
    # do, and looks for wanted positions among its own.
    rows = PartitionSpec(split)
    local = jax.shard_map(
      local,
      in_specs=(PartitionSpec(), rows, (rows,) * len(parts)),
      out_specs=rows,
      axis_names=set(split),
      check_vma=False,
    )
  return local(head, wanted, parts)


def _map_local(score, sort, head, wanted, parts):
  """`map_positions` of the rows of a device, as one row."""
  flat = jax.tree.map(
    lambda x: x.reshape(-1, *x.shape[2:])[None], (wanted, *parts)
  )
  chunk = min(_LOGIT_CHUNK, flat[0].shape[1])
  if sort:
    order = jnp.argsort(~flat[0], axis=1, stable=True)
    flat = jax.tree.map(functools.partial(_reorder, order=order), flat)
  scores = _chunked(functools.partial(score, head), flat, chunk, skip=sort)
  if sort:
    back = jnp.argsort(order, axis=1)
    scores = jax.tree.map(functools.partial(_reorder, order=back), scores)
  return tuple(jnp.where(wanted, x.reshape(wanted.shape), 0.0) for x in scores)


def _reorder(x: jax.Array, order: jax.Array) -> jax.Array:
  index = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, 1)


def _chunked(score, parts, chunk, *, skip):
  """`score` along the second axis of the parts [rows, T, ...]."""
  rows, t = parts[0].shape

  def cut(x: jax.Array) -> jax.Array:
    """[rows, T, ...] -> [chunks, rows, chunk, ...]."""
    padding = ((0, 0), (0, -t % chunk)) + ((0, 0),) * (x.ndim - 2)
    wide = jnp.pad(x, padding).reshape(rows, -1, chunk, *x.shape[2:])
    return jnp.moveaxis(wide, 1, 0)

  # Around the condition, not in it: what a branch keeps for its backward pass
  # would be stored for each chunk, the head's matrix among it.
  @jax.checkpoint
  def score_if_wanted(part):
    if not skip:
      return score(*part)
    nothing = jnp.zeros(part[0].shape)
    return jax.lax.cond(
      part[0].any(), score, lambda *_: (nothing, nothing), *part
    )

  scores = jax.lax.map(score_if_wanted, jax.tree.map(cut, parts))
  return tuple(jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :t] for x in scores)
