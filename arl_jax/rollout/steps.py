"""The engine's compiled steps: pure functions of parameters and state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from arl_jax.model import decoding, transformer
from arl_jax.model.config import ModelConfig
from arl_jax.rollout import sampling, speculative
from arl_jax.rollout.decode_state import DecodeState
from arl_jax.rollout.sampling import Draw
from arl_jax.rollout.speculative import DraftHead


class Burst(struct.PyTreeNode):
  """What a generate call found, as `ResultTokens`; and for the draft policy:

  Attributes:
    proposed: [k] int32, drafts whose predecessors were all accepted.
    accepted: [k] int32.
    steps: [] int32, steps that were made.
  """

  tokens: jax.Array
  log_prob: jax.Array
  sampled_logp: jax.Array
  experts: jax.Array | None
  lengths: jax.Array
  stopped: jax.Array
  finite: jax.Array
  proposed: jax.Array
  accepted: jax.Array
  steps: jax.Array


def extend(
  model: ModelConfig,
  span: int,
  params: Any,
  state: DecodeState,
  slots: jax.Array,
  start: jax.Array,
  ids: jax.Array,
  count: jax.Array,
) -> DecodeState:
  """Appends tokens to the named slots; the others are untouched.

  Args:
    model: the policy's configuration.
    span: tokens that none of these slots exceeds.
    params: of the policy.
    state: of all slots.
    slots: [R] int32; out of range for rows that are padding.
    start: [R] int32, tokens of the slot that stay.
    ids: [R, C] int32.
    count: [R] int32, ids that count.
  """
  rows = _rows_of(state.cache, slots, span)
  rows, hidden = decoding.extend(
    params, model, rows, ids, start, count, span=span
  )
  draft_cache = state.draft_cache
  if draft_cache is not None:
    known = state.hidden_at.at[slots].get(mode="fill", fill_value=-1) == start
    before = state.hidden.at[slots].get(mode="fill", fill_value=0)
    before = jnp.concatenate([before[:, None], hidden[:, :-1]], 1)
    columns = jnp.arange(ids.shape[1])
    # Pairs begin with a slot's second token, or where the state before the
    # first one here is at hand; else it is in the cache already.
    first = jnp.where(known & (start > 0), 0, 1)
    real = (columns >= first[:, None]) & (columns < count[:, None])
    drafted, _ = speculative.extend_draft(
      params,
      model,
      _rows_of(draft_cache, slots, span),
      ids,
      before,
      start[:, None] - 1 + columns,
      real,
      span=span,
    )
    draft_cache = _with_rows(draft_cache, slots, drafted)
  last = jnp.maximum(count - 1, 0)[:, None, None]
  newest = jnp.take_along_axis(hidden, last, 1)[:, 0]
  length = start + count
  return state.replace(
    cache=_with_rows(state.cache, slots, rows),
    draft_cache=draft_cache,
    length=state.length.at[slots].set(length, mode="drop"),
    hidden=state.hidden.at[slots].set(
      newest.astype(state.hidden.dtype), mode="drop"
    ),
    hidden_at=state.hidden_at.at[slots].set(length, mode="drop"),
  )


def _is_blocks(x: Any) -> bool:
  return isinstance(x, list)


def _rows_of(cache: Any, slots: jax.Array, span: int) -> Any:
  """The slots' rows of those blocks that reach as far as `span`."""

  def rows_of(blocks: list[jax.Array]) -> list[jax.Array]:
    found: list[jax.Array] = []
    while not found or sum(x.shape[-2] for x in found) < span:
      if len(found) == len(blocks):
        break
      block = blocks[len(found)]
      at = (slice(None),) * (block.ndim - 4) + (slots,)
      found.append(block.at[at].get(mode="fill", fill_value=0))
    return found

  return jax.tree.map(rows_of, cache, is_leaf=_is_blocks)


def _with_rows(cache: Any, slots: jax.Array, rows: Any) -> Any:
  """The cache with these rows in place of the slots' own."""

  def put(blocks: list[jax.Array], new: list[jax.Array]) -> list[jax.Array]:
    at = (slice(None),) * (blocks[0].ndim - 4) + (slots,)
    # Fewer than there are blocks: those beyond the span stay.
    changed = [
      block.at[at].set(x.astype(block.dtype), mode="drop")
      for block, x in zip(blocks, new, strict=False)
    ]
    return changed + blocks[len(new) :]

  return jax.tree.map(put, cache, rows, is_leaf=_is_blocks)


def generate(
  model: ModelConfig,
  steps: int,
  k: int,
  span: int,
  max_length: int,
  params: Any,
  head: DraftHead | None,
  state: DecodeState,
  chosen: jax.Array,
) -> tuple[DecodeState, Burst]:
  """Up to `steps` steps, of 1 to k + 1 tokens in every chosen active slot."""
  slots, width = state.length.shape[0], steps * (k + 1)
  numbers = jnp.zeros((slots, width))
  none = jnp.zeros(slots, jnp.int32)
  experts = None
  if model.moe_layers:
    shape = (slots, width, model.moe_layers, model.experts_per_token)
    experts = jnp.zeros(shape, jnp.int32)
  burst = Burst(
    tokens=numbers.astype(jnp.int32),
    log_prob=numbers,
    sampled_logp=numbers,
    experts=experts,
    lengths=none,
    stopped=none > 0,
    finite=none == 0,
    proposed=jnp.zeros(k, jnp.int32),
    accepted=jnp.zeros(k, jnp.int32),
    steps=jnp.zeros((), jnp.int32),
  )

  # With drafts a step draws its successor's first token too, so that the head
  # is read once for all of them.
  first = None
  if k:
    logits = transformer.unembed(params, state.hidden)
    first = sampling.draw(logits, state.sampling)

  def go_on(carry: tuple[DecodeState, Burst, Draw | None]) -> jax.Array:
    state, burst, _ = carry
    return (burst.steps < steps) & (state.active & chosen).any()

  def step(
    carry: tuple[DecodeState, Burst, Draw | None],
  ) -> tuple[DecodeState, Burst, Draw | None]:
    return _step(model, k, span, max_length, params, head, chosen, *carry)

  state, burst, _ = jax.lax.while_loop(go_on, step, (state, burst, first))
  return state, burst


def _step(
  model, k, span, max_length, params, head, chosen, state, burst, first
):
  """Draws a token, drafts k more, scores them all, keeps what agrees."""
  on = state.active & chosen
  if first is None:
    logits = transformer.unembed(params, state.hidden)
    first = sampling.draw(logits, state.sampling)
  # No room is needed for what a request may not have.
  room = jnp.minimum(
    state.sampling.limit - state.sampling.sampled, max_length - state.length
  )
  count = jnp.where(on, jnp.minimum(k + 1, room), 0)
  tokens = first.ids[:, None]
  if k:
    draft_cache, drafts = speculative.propose(
      params, model, head, state, first.ids, count, k, span=span
    )
    state = state.replace(draft_cache=draft_cache)
    tokens = jnp.concatenate([tokens, drafts], 1)
  cache, hidden, *chosen_experts = decoding.extend(
    params,
    model,
    state.cache,
    tokens,
    state.length,
    count,
    span=span,
    return_experts=bool(model.moe_layers),
  )
  draws = [first]
  if k:
    logits = transformer.unembed(params, hidden)
    for i in range(k + 1):
      draws.append(sampling.draw(logits[:, i], state.sampling, i + 1))
  agreed = jnp.stack(
    [tokens[:, i] == draws[i].ids for i in range(k + 1)], 1
  ) & (jnp.arange(k + 1) < count[:, None])
  stops = (tokens[..., None] == state.sampling.stop[:, None]).any(-1)
  # A token follows only where all before it agree and none of them stops.
  stopped_before = jnp.cumsum(stops, 1) - stops > 0
  kept = jnp.cumprod(agreed & ~stopped_before, 1).astype(bool)
  n = kept.sum(1)
  own = draws[: k + 1]
  finite = jnp.stack([d.finite for d in own], 1)
  finite = jnp.where(kept, finite, True).all(1)
  draws_of = {
    "tokens": tokens,
    "log_prob": jnp.stack([d.logp for d in own], 1),
    "sampled_logp": jnp.stack([d.sampled_logp for d in own], 1),
  }
  if chosen_experts:
    draws_of["experts"] = chosen_experts[0]
  ended = (kept & stops).any(1)
  state = _advanced(
    params,
    model,
    state,
    cache,
    tokens,
    hidden,
    kept,
    n,
    ended,
    finite,
    span,
    max_length,
  )
  tried = kept[:, :k] & ~stops[:, :k] & (jnp.arange(1, k + 1) < count[:, None])
  burst = burst.replace(
    **_written(burst, draws_of, n),
    lengths=burst.lengths + n,
    stopped=burst.stopped | ended,
    finite=burst.finite & finite,
    proposed=burst.proposed + tried.sum(0),
    accepted=burst.accepted + (tried & kept[:, 1:]).sum(0),
    steps=burst.steps + 1,
  )
  return state, burst, _nth(draws, n) if k else None


def _nth(draws: list[Draw], n: jax.Array) -> Draw:
  """Of each slot its own one, counted from 0."""
  at = jnp.arange(n.shape[0])
  return jax.tree.map(lambda *parts: jnp.stack(parts)[n, at], *draws)


def _advanced(
  params,
  model,
  state,
  cache,
  tokens,
  hidden,
  kept,
  n,
  ended,
  finite,
  span,
  max_length,
):
  """The state after the kept tokens; what was drafted beyond is forgotten."""
  draft_cache = state.draft_cache
  if draft_cache is not None:
    k1 = tokens.shape[1]
    # With the policy's own states in place of the module's guesses. Without
    # drafts it is how the pair of the token just drawn gets there.
    before = jnp.concatenate([state.hidden[:, None], hidden[:, :-1]], 1)
    draft_cache, _ = speculative.extend_draft(
      params,
      model,
      draft_cache,
      tokens,
      before,
      state.length[:, None] - 1 + jnp.arange(k1),
      kept,
      span=span,
    )
  last = jnp.maximum(n - 1, 0)[:, None, None]
  newest = jnp.take_along_axis(hidden, last, 1)[:, 0]
  # Caches, and with them this state, may be of another type than parameters.
  newest = newest.astype(state.hidden.dtype)
  sampled = state.sampling.sampled + n
  length = state.length + n
  on = n > 0
  room = (sampled < state.sampling.limit) & (length < max_length)
  return state.replace(
    cache=cache,
    draft_cache=draft_cache,
    length=length,
    hidden=jnp.where(on[:, None], newest, state.hidden),
    hidden_at=jnp.where(on, length, state.hidden_at),
    active=state.active & ~ended & finite & room,
    sampling=state.sampling.replace(sampled=sampled),
  )


def _written(burst, values, n):
  """The burst's arrays with `n` more entries in each row."""
  rows = jnp.arange(n.shape[0])[:, None]
  width = burst.tokens.shape[1]
  new = {}
  for name, value in values.items():
    column = jnp.arange(value.shape[1])
    at = jnp.where(column < n[:, None], burst.lengths[:, None] + column, width)
    new[name] = getattr(burst, name).at[rows, at].set(value, mode="drop")
  return new


def start(
  state: DecodeState,
  slot: jax.Array,
  how: sampling.SamplingState,
  active: jax.Array,
) -> DecodeState:
  """Lets a slot sample from its last token on; `how` is of that one slot."""
  return state.replace(
    active=state.active.at[slot].set(active),
    sampling=jax.tree.map(
      lambda whole, one: whole.at[slot].set(one[0]), state.sampling, how
    ),
  )


def stop(state: DecodeState, slot: jax.Array) -> DecodeState:
  return state.replace(active=state.active.at[slot].set(False))
