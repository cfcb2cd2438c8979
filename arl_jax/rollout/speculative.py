"""Drafts by the MTP module, accepted exactly; how many of them pay.

The module proposes k tokens, the policy scores all of them at once, and as many
stay as equal what the policy itself draws. Both draw by the same race (see
`sampling`), so that with or without drafts a request gets the same tokens: the
acceptance is exact token by token, and greedy output the same. At temperature 1
a draft is accepted with a probability of at least (1 - d) / (1 + d), where d is
the total variation distance of the two distributions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from arl_jax.model import attention, decoding, transformer
from arl_jax.model.config import ModelConfig
from arl_jax.rollout import sampling


class DraftHead(struct.PyTreeNode):
  """Attributes: rows: [N, D] of the head; ids: [N] int32, their tokens."""

  rows: jax.Array
  ids: jax.Array


def draft_head(params: Any, ids: np.ndarray | None) -> DraftHead | None:
  """A head over the named tokens only; None for all of them."""
  if ids is None:
    return None
  chosen = jnp.asarray(ids, jnp.int32)
  if "head_rows" in params:
    return DraftHead(rows=params["head_rows"][chosen], ids=chosen)
  return DraftHead(rows=transformer.head(params).T[chosen], ids=chosen)


def extend_draft(
  params: Any,
  config: ModelConfig,
  cache: Any,
  ids: jax.Array,
  before: jax.Array,
  positions: jax.Array,
  real: jax.Array,
  *,
  span: int | None = None,
) -> tuple[Any, jax.Array]:
  """Appends pairs of a token and the hidden state before it.

  Args:
    params: with "mtp".
    config: the model's.
    cache: of the module.
    ids: [S, C] int32, tokens.
    before: [S, C, D], trunk outputs at the tokens before them.
    positions: [S, C] int32, of those; the module's own.
    real: [S, C] bool, pairs that count; they stand together.
    span: as in `decoding.extend`.

  Returns:
    The cache, and what the head takes, [S, C, D].
  """
  p = params["mtp"]
  eps = config.norm_eps
  joined = jnp.concatenate(
    [
      attention.rms_norm(
        transformer.embed(params, config, ids), p["embed_norm"], eps
      ),
      attention.rms_norm(before, p["hidden_norm"], eps),
    ],
    -1,
  )
  cache, x, _ = decoding.extend_layer(
    p["block"],
    config,
    config.layer(config.layers - 1),
    cache,
    joined @ p["project"],
    positions=positions,
    real=real,
    span=span,
  )
  return cache, attention.rms_norm(x, p["norm"], eps)


def propose(
  params: Any,
  config: ModelConfig,
  head: DraftHead | None,
  state: Any,
  first: jax.Array,
  count: jax.Array,
  k: int,
  *,
  span: int | None = None,
) -> tuple[Any, jax.Array]:
  """K tokens to follow the one just drawn.

  Args:
    params: of the policy.
    config: the model's.
    head: of the drafts; None takes the policy's.
    state: the decode state.
    first: [S] int32, the token just drawn, not yet in the cache.
    count: [S] int32, tokens that a slot has room for, the one just drawn
      included; 0 for slots that don't sample.
    k: drafts.
    span: as in `decoding.extend`.

  Returns:
    The module's cache, and drafts [S, k] int32.
  """
  cache, hidden, last = state.draft_cache, state.hidden, first
  everything = jnp.arange(config.vocab_size, dtype=jnp.int32)
  drafts = []
  for i in range(k):
    positions = (state.length - 1 + i)[:, None]
    cache, out = extend_draft(
      params,
      config,
      cache,
      last[:, None],
      hidden[:, None],
      positions,
      (i < count)[:, None],
      span=span,
    )
    hidden = out[:, 0]
    if head is None:
      logits, ids = transformer.unembed(params, hidden), everything
    else:
      logits, ids = transformer.logits_of_rows(head.rows, hidden), head.ids
    last = sampling.guess(logits, ids, state.sampling, i + 1)
    drafts.append(last)
  return cache, jnp.stack(drafts, 1)


class DraftPolicy:
  """Chooses how many drafts pay, by what was accepted and what steps cost.

  A step with k drafts gives 1 + Σ_j Π_(i≤j) a_i tokens, where a_i is the share
  of drafts at position i that were accepted when all before them were. The k
  with most tokens a second is taken, 0 among them; one draft more is tried now
  and then, so that better ones are noticed.

  Attributes:
    proposed: [K] drafts that could be accepted, by position.
    accepted: [K] those that were.
  """

  # Weight of the newest step in the running shares.
  _RATE = 0.02
  # Drafts that the hopeful beginning counts as.
  _HOPE = 4
  # Calls after which one draft more is tried once.
  _RETRY = 128

  def __init__(self, limit: int, *, adaptive: bool = True):
    self._limit, self._adaptive = limit, adaptive
    self.proposed = np.zeros(limit, np.int64)
    self.accepted = np.zeros(limit, np.int64)
    # Begins hopeful, so that every k is tried.
    self._share = np.full(limit, 0.8)
    self._cost: dict[int, float] = {}
    self._calls = 0

  def choose(self) -> int:
    """Drafts of the next step."""
    if not self._limit or not self._adaptive:
      return self._limit
    self._calls += 1
    unknown = [k for k in range(self._limit + 1) if k not in self._cost]
    if unknown:
      return unknown[-1]
    best = int(np.argmax([self.rate(k) for k in range(self._limit + 1)]))
    retries = self._calls % self._RETRY == 0
    return min(best + retries, self._limit)

  def rate(self, k: int) -> float:
    """Tokens a second and slot that k drafts promise."""
    tokens = 1 + np.cumprod(self._share[:k]).sum()
    return tokens / self._cost[k]

  def learn(
    self, k: int, proposed: np.ndarray, accepted: np.ndarray, seconds: float
  ) -> None:
    """Takes in one step.

    Args:
      k: its drafts.
      proposed: [k] slots whose draft at a position could be accepted.
      accepted: [k] slots where it was.
      seconds: of a step.
    """
    self.proposed[:k] += proposed
    self.accepted[:k] += accepted
    for i in range(k):
      if proposed[i]:
        # A plain mean at first: what it begins with soon counts for little.
        rate = max(self._RATE, 1 / (self._HOPE + int(self.proposed[i])))
        keep = (1 - rate) ** int(proposed[i])
        share = accepted[i] / proposed[i]
        self._share[i] = keep * self._share[i] + (1 - keep) * share
    old = self._cost.get(k, seconds)
    # What a busy machine adds is not a cost of k: fast steps count more.
    self._cost[k] = min(seconds, 0.9 * old + 0.1 * seconds)

  @property
  def acceptance(self) -> list[float]:
    """Share accepted at each position, of those whose predecessors were."""
    return (self.accepted / np.maximum(self.proposed, 1)).tolist()
