"""The context of one agent and the tree of segments it leaves behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from arl_jax.types import NO_VERSION, Role, Sample, Segment


@dataclasses.dataclass(slots=True)
class Piece:
  """A run of tokens that stays or leaves as a whole.

  Attributes:
    ids: token ids.
    role: of all its tokens.
    key: what a rewrite names it by.
    sample: what the policy sampled, for `Role.SAMPLED`.
    fresh: appended since the current segment began.
  """

  ids: tuple[int, ...]
  role: Role
  key: str | None = None
  sample: Sample | None = None
  fresh: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Rewrite:
  """What a rewrite did.

  Attributes:
    segment: index of the segment that begins.
    removed: token ranges [first, last) of its parent that are gone.
  """

  segment: int
  removed: tuple[tuple[int, int], ...]


class Context:
  """Append-only view of one agent, except for explicit rewrites.

  Every sampled token is fresh in exactly one segment, and that segment holds
  exactly what the token was conditioned on.
  """

  def __init__(
    self,
    *,
    agent: str = "main",
    temperature: float = 1.0,
    record_experts: bool = False,
  ):
    self._agent = agent
    self._temperature = temperature
    self._record_experts = record_experts
    self._pieces: list[Piece] = []
    self._segments: list[Segment] = []
    self._reason = "start"

  def __len__(self) -> int:
    return sum(len(p.ids) for p in self._pieces)

  @property
  def ids(self) -> list[int]:
    """The view, as the policy is given it."""
    return [i for p in self._pieces for i in p.ids]

  @property
  def pieces(self) -> tuple[Piece, ...]:
    return tuple(self._pieces)

  def append(
    self, ids: Sequence[int], role: Role, *, key: str | None = None
  ) -> None:
    self._pieces.append(Piece(tuple(int(i) for i in ids), role, key))

  def append_sample(self, sample: Sample) -> None:
    ids = tuple(int(i) for i in sample.ids)
    self._pieces.append(Piece(ids, Role.SAMPLED, None, sample))

  def rewrite(self, leaves: Callable[[Piece], bool], reason: str) -> Rewrite:
    """Takes pieces out of the view; a new segment begins.

    Args:
      leaves: True for pieces that go.
      reason: recorded as `Segment.reason`.
    """
    removed: list[tuple[int, int]] = []
    at = 0
    for piece in self._pieces:
      if leaves(piece):
        removed.append((at, at + len(piece.ids)))
      at += len(piece.ids)
    self._close()
    self._pieces = [p for p in self._pieces if not leaves(p)]
    for piece in self._pieces:
      piece.fresh = False
    self._reason = reason
    return Rewrite(len(self._segments), tuple(removed))

  def finish(self) -> tuple[Segment, ...]:
    """Every segment, the current one included."""
    self._close()
    return tuple(self._segments)

  def _close(self) -> None:
    pieces = self._pieces
    sizes = [len(p.ids) for p in pieces]
    total = sum(sizes)
    sampled = np.zeros(total, np.bool_)
    logp = np.zeros(total, np.float32)
    version = np.full(total, NO_VERSION, np.int32)
    at = 0
    for piece, size in zip(pieces, sizes, strict=True):
      if piece.sample is not None and piece.fresh:
        span = slice(at, at + size)
        sampled[span] = True
        logp[span] = piece.sample.logp
        version[span] = piece.sample.versions
      at += size
    roles = np.array([p.role for p in pieces], np.uint8)
    self._segments.append(
      Segment(
        ids=np.array(self.ids, np.int32),
        roles=np.repeat(roles, sizes),
        sampled=sampled,
        behaviour_logp=logp,
        policy_version=version,
        parent=len(self._segments) - 1 if self._segments else None,
        reason=self._reason,
        agent=self._agent,
        temperature=self._temperature,
        experts=self._experts(total) if self._record_experts else None,
      )
    )

  def _experts(self, total: int) -> np.ndarray | None:
    """[T, MoE layers, K] int32, -1 where none were recorded.

    What was sampled before a rewrite is read anew, and routed anew, after it.
    """
    experts = None
    at = 0
    for piece in self._pieces:
      found = piece.sample.experts if piece.sample and piece.fresh else None
      if found is not None:
        if experts is None:
          experts = np.full((total, *found.shape[1:]), -1, np.int32)
        experts[at : at + len(piece.ids)] = found
      at += len(piece.ids)
    return experts
