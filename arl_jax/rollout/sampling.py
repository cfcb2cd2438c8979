"""Drawing tokens, with a random stream per request.

A token is drawn by an exponential race: of independent E_v ~ Exp(1), the v that
maximises p_v / E_v has distribution p. E depends on (seed, index, v) alone, so
that the same request gets the same token whatever shares its batch (up to the
rounding of p), and a draft model that knows the E guesses what the policy
itself will draw.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from arl_jax.rollout.request import Sampling

# Stop ids, and ids with a bias or forbidden, that a request may have.
MAX_STOP_IDS, MAX_BIASED = 8, 64


class SamplingState(struct.PyTreeNode):
  """How each slot samples.

  Attributes:
    temperature: [S]; 0 takes the most likely token.
    top_k: [S] int32; 0 = all.
    top_p: [S], share of the probability that the kept tokens reach at least.
    min_p: [S], of the most likely token's probability.
    biased: [S, 64] int32 ids; V (out of range) is none.
    bias: [S, 64], added to the logits of those; -inf forbids.
    seed: [S] int32.
    sampled: [S] int32, tokens the request has sampled: its next index.
    limit: [S] int32, tokens it may sample.
    stop: [S, 8] int32, stop ids, padded with -1.
  """

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  biased: jax.Array
  bias: jax.Array
  seed: jax.Array
  sampled: jax.Array
  limit: jax.Array
  stop: jax.Array


class Draw(struct.PyTreeNode):
  """What `draw` found.

  Attributes:
    ids: [S] int32.
    logp: [S] nats, behaviour log-prob: log-softmax(logits / temperature), of
      the unfiltered, unbiased distribution; at temperature 0 that of
      temperature 1.
    sampled_logp: [S] nats, of the distribution that was drawn from.
    finite: [S] bool, whether the logits were numbers.
  """

  ids: jax.Array
  logp: jax.Array
  sampled_logp: jax.Array
  finite: jax.Array


def initial(slots: int, vocab_size: int) -> SamplingState:
  def whole(value: float, dtype: Any = jnp.int32) -> jax.Array:
    return jnp.full(slots, value, dtype)

  return SamplingState(
    temperature=whole(1, jnp.float32),
    top_k=whole(0),
    top_p=whole(1, jnp.float32),
    min_p=whole(0, jnp.float32),
    biased=jnp.full((slots, MAX_BIASED), vocab_size, jnp.int32),
    bias=jnp.zeros((slots, MAX_BIASED)),
    seed=whole(0),
    sampled=whole(0),
    limit=whole(0),
    stop=jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32),
  )


def of_request(
  how: Sampling, vocab_size: int, sampled: int = 0
) -> SamplingState:
  """A request as a state of one slot; `sampled` tokens of it are there."""
  stop = np.full((1, MAX_STOP_IDS), -1, np.int32)
  stop[0, : len(how.stop_ids)] = how.stop_ids
  biased = np.full((1, MAX_BIASED), vocab_size, np.int32)
  bias = np.zeros((1, MAX_BIASED), np.float32)
  entries = {**how.logit_bias, **dict.fromkeys(how.forbidden, -np.inf)}
  biased[0, : len(entries)] = list(entries)
  bias[0, : len(entries)] = list(entries.values())

  def one(value: float, dtype: Any = np.float32) -> Any:
    return np.full(1, value, dtype)

  state: Any = SamplingState
  return state(
    temperature=one(how.temperature),
    top_k=one(how.top_k, np.int32),
    top_p=one(how.top_p),
    min_p=one(how.min_p),
    biased=biased,
    bias=bias,
    seed=one(how.seed, np.int32),
    sampled=one(sampled, np.int32),
    limit=one(how.max_tokens, np.int32),
    stop=stop,
  )


def draw(
  logits: jax.Array, state: SamplingState, ahead: int | jax.Array = 0
) -> Draw:
  """One token a slot.

  Args:
    logits: [S, V] float32.
    state: how.
    ahead: tokens between the request's next index and the one drawn here.
  """
  greedy = state.temperature <= 0
  z = logits / jnp.where(greedy, 1.0, state.temperature)[:, None]
  top = z.max(-1, keepdims=True)
  log_total = jnp.log(jnp.exp(z - top).sum(-1, keepdims=True))
  ids = jnp.arange(z.shape[1], dtype=jnp.int32)

  def plain() -> tuple[jax.Array, jax.Array]:
    drawn = _race(z, top, state, ids, ahead)
    return drawn, jnp.zeros(drawn.shape)

  def filtered() -> tuple[jax.Array, jax.Array]:
    kept = _filtered(z, state)
    highest = kept.max(-1, keepdims=True)
    drawn = _race(kept, highest, state, ids, ahead)
    own = jnp.take_along_axis(kept, drawn[:, None], 1)[:, 0]
    logp = own - jax.nn.logsumexp(kept, -1)
    whole = jnp.take_along_axis(z - top - log_total, drawn[:, None], 1)[:, 0]
    # Relative to the unfiltered one, so that both branches add to it.
    return drawn, logp - whole

  wanted = (
    (state.top_k > 0)
    | (state.top_p < 1)
    | (state.min_p > 0)
    | (state.biased < z.shape[1]).any(1)
  )
  drawn, more = jax.lax.cond(wanted.any(), filtered, plain)
  own = jnp.take_along_axis(z, drawn[:, None], 1)
  logp = (own - top - log_total)[:, 0]
  filtered_logp = logp + jnp.where(wanted, more, 0.0)
  return Draw(
    ids=drawn,
    logp=logp,
    sampled_logp=jnp.where(greedy, 0.0, filtered_logp),
    finite=jnp.isfinite(log_total[:, 0] + top[:, 0] + filtered_logp),
  )


def guess(
  logits: jax.Array,
  ids: jax.Array,
  state: SamplingState,
  ahead: int | jax.Array = 0,
) -> jax.Array:
  """The token [S] that `draw` would draw of these logits, by the same race.

  Args:
    logits: [S, N] of a draft model.
    ids: [N] int32, the tokens they are of.
    state: how; filters and biases are left to the policy's own draw.
    ahead: as in `draw`.
  """
  temperature = jnp.where(state.temperature > 0, state.temperature, 1.0)
  z = logits / temperature[:, None]
  place = _race(z, z.max(-1, keepdims=True), state, ids, ahead)
  return ids[place]


def _race(z, top, state, ids, ahead):
  """Place [S] of the winner; without noise at temperature 0."""
  noise = _exponential(state.seed, state.sampled + ahead, ids)
  greedy = (state.temperature <= 0)[:, None]
  speed = jnp.where(greedy, z, jnp.exp(z - top) / noise)
  best = speed.max(-1, keepdims=True)
  # A reduction over pairs, as argmax is one, takes CPUs five times as long.
  place = jnp.arange(z.shape[1], dtype=jnp.int32)
  found = jnp.where(speed == best, place, z.shape[1]).min(-1)
  # Nothing equals NaN.
  return jnp.minimum(found, z.shape[1] - 1)


def _exponential(seed: jax.Array, index: jax.Array, ids: jax.Array):
  """Exp(1) noise [S, N] of each slot's (seed, index) and each token id."""

  def key(own_seed: jax.Array, own_index: jax.Array) -> jax.Array:
    own = jax.random.fold_in(jax.random.key(own_seed), own_index)
    return jax.random.key_data(own)

  keys = jax.vmap(key)(seed, index)
  bits = ids.astype(jnp.uint32)[None] * jnp.uint32(0x9E3779B1)
  bits = _mixed(bits + keys[:, :1])
  bits = _mixed(bits ^ keys[:, 1:])
  # Small numbers decide: they are as fine as 32 bits allow, and never 0.
  share = ((bits >> 1).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-31
  return -jnp.log1p(-jnp.minimum(share, 1 - 2.0**-24))


def _mixed(bits: jax.Array) -> jax.Array:
  """A bijection of 32 bits in which each input bit flips half of the output."""
  bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
  bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
  return bits ^ (bits >> 16)


def _filtered(z: jax.Array, state: SamplingState) -> jax.Array:
  """Biased logits, -inf where top-k, top-p or min-p leave a token out.

  In this order, each of what the one before left; tokens as likely as the last
  one kept are kept too.
  """
  rows = jnp.arange(z.shape[0])[:, None]
  temperature = jnp.where(state.temperature > 0, state.temperature, 1.0)
  bias = state.bias / temperature[:, None]
  z = z.at[rows, state.biased].add(bias, mode="drop")
  ordered = -jnp.sort(-z, axis=-1)
  size = z.shape[1]
  last = jnp.where(state.top_k > 0, jnp.minimum(state.top_k, size), size) - 1
  least = jnp.take_along_axis(ordered, last[:, None], 1)
  kept = jnp.where(ordered >= least, ordered, -jnp.inf)
  p = jax.nn.softmax(kept, -1)
  before = jnp.cumsum(p, -1) - p
  needed = (before < state.top_p[:, None]) & jnp.isfinite(kept)
  count = jnp.maximum(needed.sum(-1), 1)
  least = jnp.maximum(
    least, jnp.take_along_axis(ordered, count[:, None] - 1, 1)
  )
  floor = ordered[:, :1] + jnp.log(state.min_p[:, None])
  return jnp.where((z >= least) & (z >= floor), z, -jnp.inf)
