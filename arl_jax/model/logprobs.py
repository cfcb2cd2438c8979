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

  Without `entropy_gradient` the entropy is a constant, and comes for free (see
  `_linear`): with it, it takes as long as the log-probs themselves on a CPU.

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

  # All are wanted more often than not: then nothing need be sorted.
  wanted_here = known if wanted is None else known & wanted
  parts = (before, input_ids, scale)
  head = transformer.head(params)
  if entropy_gradient:
    return map_positions(
      _scored, head, wanted_here, parts, sort=wanted is not None
    )
  return _on_rows(
    functools.partial(_linear_scores, wanted is not None),
    head,
    wanted_here,
    parts,
  )


def _scored(head, real, h, ids, temperature):
  """Log-prob and entropy of a chunk, [rows, chunk]; differentiable."""
  # Padding may hold anything.
  temperature = jnp.where(real, temperature, 1.0)[..., None]
  logits = transformer.logits(head, h) / temperature
  log_z = jax.nn.logsumexp(logits, axis=-1)
  logp = jnp.take_along_axis(logits, ids[..., None], -1)[..., 0] - log_z
  p = jnp.exp(logits - log_z[..., None])
  return logp, log_z - (p * logits).sum(-1)


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
  return _on_rows(
    functools.partial(_map_local, score, sort), head, wanted, parts
  )


def _on_rows(local, head, wanted, parts):
  """`local(may_sort, head, wanted, parts)` on each device's own rows."""
  mesh = sharding.ambient_mesh()
  split = mesh and sharding.mesh_axes(
    sharding.partition(("batch",), wanted.shape[:1], mesh)[0]
  )
  # Devices that share the head have to skip chunks together.
  alone = mesh is None or (
    math.prod(mesh.shape[a] for a in split or ()) == mesh.size
  )
  local = functools.partial(local, alone)
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


def _map_local(score, sort, alone, head, wanted, parts):
  """`map_positions` of the rows of a device."""
  sort = sort and alone
  flat, back = _as_one_row(wanted, parts, sort)
  scores = _chunked(
    functools.partial(score, head), flat, _chunk_of(wanted), skip=sort
  )
  return tuple(back(x) for x in scores)


def _chunk_of(wanted: jax.Array) -> int:
  return min(_LOGIT_CHUNK, wanted.size)


def _as_one_row(wanted, parts, sort):
  """The positions as one row, wanted ones first, and the way back."""
  flat = jax.tree.map(
    lambda x: x.reshape(-1, *x.shape[2:])[None], (wanted, *parts)
  )
  order = None
  if sort:
    order = jnp.argsort(~flat[0], axis=1, stable=True)
    flat = jax.tree.map(functools.partial(_reorder, order=order), flat)

  def back(x):
    if order is not None:
      x = _reorder(x, jnp.argsort(order, axis=1))
    return jnp.where(wanted, x.reshape(wanted.shape), 0.0)

  return flat, back


def _linear_scores(sort, alone, head, wanted, parts):
  """Log-probs, and entropies as constants, of the rows of a device."""
  sort = sort and alone
  flat, back = _as_one_row(wanted, parts, sort)
  size = _chunk_of(wanted)
  chunks = jax.tree.map(lambda x: _cut(x, size)[:, 0], flat)
  scores = _linear(sort, head, *chunks)
  return tuple(back(x.reshape(1, -1)[:, : wanted.size]) for x in scores)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(skip, head, real, h, ids, temperature):
  """Log-prob and entropy [chunks, size] of hidden states [chunks, size, D].

  With the expected column of the head, E = Σ p_v head_v, both the entropy,
  log Z − h·E/τ, and the gradient by h, (head_id − E)/τ, are at hand: neither
  needs another pass over the vocabulary, and E is one more matrix product,
  which the backward pass then is spared.
  """
  return _linear_forward(skip, head, real, h, ids, temperature)[0]


def _chunk_logits(head, real, h, temperature):
  scale = 1 / jnp.where(real, temperature, 1.0)[..., None]
  return transformer.logits(head, h[None])[0] * scale, scale


def _linear_forward(skip, head, real, h, ids, temperature):
  def score(part):
    real, h, ids, temperature = part
    logits, scale = _chunk_logits(head, real, h, temperature)
    top = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    expected = jnp.dot(weights, head.T, preferred_element_type=jnp.float32)
    expected /= total
    log_z = (top + jnp.log(total))[:, 0]
    chosen = head.T[ids].astype(jnp.float32)
    wide = h.astype(jnp.float32) * scale
    logp = (wide * chosen).sum(-1) - log_z
    entropy = log_z - (wide * expected).sum(-1)
    return logp, entropy, log_z, (chosen - expected) * scale

  def score_if_wanted(part):
    if not skip:
      return score(part)
    shapes = jax.eval_shape(score, part)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.cond(part[0].any(), score, lambda _: nothing, part)

  logp, entropy, log_z, slope = jax.lax.map(
    score_if_wanted, (real, h, ids, temperature)
  )
  kept = (head, real, h, ids, temperature, log_z, slope)
  return (logp, entropy), kept


def _linear_backward(skip, kept, gradients):
  head, real, h, ids, temperature, log_z, slope = kept
  # The entropy is a constant.
  by_logp = jnp.where(real, gradients[0], 0.0)

  def add(total, part):
    real, h, ids, temperature, log_z, by_logp = part

    def more(total):
      logits, scale = _chunk_logits(head, real, h, temperature)
      by_logit = by_logp[:, None] * scale
      p = jnp.exp(logits - log_z[:, None])
      chosen = jnp.arange(p.shape[-1]) == ids[:, None]
      by_logits = by_logit * (jnp.where(chosen, 1.0, 0.0) - p)
      return total + jnp.dot(h.T, by_logits, preferred_element_type=jnp.float32)

    if not skip:
      return more(total), None
    return jax.lax.cond(real.any(), more, lambda x: x, total), None

  by_head, _ = jax.lax.scan(
    add,
    jnp.zeros(head.shape, jnp.float32),
    (real, h, ids, temperature, log_z, by_logp),
  )
  by_hidden = by_logp[..., None] * slope
  return by_head.astype(head.dtype), None, by_hidden.astype(h.dtype), None, None


_linear.defvjp(_linear_forward, _linear_backward)


def _reorder(x: jax.Array, order: jax.Array) -> jax.Array:
  index = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, 1)


def _chunked(score, parts, chunk, *, skip):
  """`score` along the second axis of the parts [rows, T, ...]."""
  rows, t = parts[0].shape

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

  scores = jax.lax.map(
    score_if_wanted, jax.tree.map(lambda x: _cut(x, chunk), parts)
  )
  return tuple(jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :t] for x in scores)


def _cut(x: jax.Array, chunk: int) -> jax.Array:
  """[rows, T, ...] -> [chunks, rows, chunk, ...]."""
  rows, t = x.shape[:2]
  padding = ((0, 0), (0, -t % chunk)) + ((0, 0),) * (x.ndim - 2)
  wide = jnp.pad(x, padding).reshape(rows, -1, chunk, *x.shape[2:])
  return jnp.moveaxis(wide, 1, 0)
