"""What one generate call sampled, for every slot."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class SlotData:
  """Tokens of one slot, under JetStream's names; arrays [samples, n].

  Attributes:
    tokens: int32.
    valid: int32, 1 where a token counts.
    lengths: [samples] int32, tokens the request has sampled in all.
    log_prob: float32, nats, behaviour log-probs.
  """

  tokens: np.ndarray
  valid: np.ndarray
  lengths: np.ndarray
  log_prob: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class ResultTokens:
  """Tokens of every slot.

  Attributes:
    tokens: [S, n] int32.
    log_prob: [S, n] float32, nats, behaviour log-probs.
    sampled_logp: [S, n] float32, nats, of the distribution drawn from.
    experts: [S, n, MoE layers, K] int32 that the token went through as an
      input; None for models without experts.
    lengths: [S] int32, entries of each row that count.
    totals: [S] int32, tokens each request has sampled in all.
    active: [S] bool, requests that go on.
    stopped: [S] bool, requests that ended on a stop id.
    finite: [S] bool; False where logits weren't numbers: the row is worthless.
    version: policy version of every token here.
  """

  tokens: np.ndarray
  log_prob: np.ndarray
  sampled_logp: np.ndarray
  experts: np.ndarray | None
  lengths: np.ndarray
  totals: np.ndarray
  active: np.ndarray
  stopped: np.ndarray
  finite: np.ndarray
  version: int = -1

  @property
  def valid(self) -> np.ndarray:
    """[S, n] bool."""
    return np.arange(self.tokens.shape[1]) < self.lengths[:, None]

  def get_result_at_slot(self, slot: int) -> SlotData:
    """What JetStream's clients read of a slot."""
    part = slice(slot, slot + 1)
    return SlotData(
      tokens=self.tokens[part],
      valid=self.valid[part].astype(np.int32),
      lengths=self.totals[part],
      log_prob=self.log_prob[part],
    )
