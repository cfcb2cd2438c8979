"""Slots of an engine: who has them and what their caches hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from arl_jax.rollout.request import Request


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
  """One slot.

  Attributes:
    index: the engine's number of it.
    session: that may come back to it, None if it is free.
    request: that runs in it.
    held: token ids in its cache.
    version: that computed all of them; None if that isn't one version.
    written: tokens that were in it before `held` was cut. Layers that keep a
      window have forgotten as if all of them were still there.
    used: when a request last began or ended here.
  """

  index: int
  session: str | None = None
  request: Request | None = None
  held: list[int] = dataclasses.field(default_factory=list)
  version: int | None = None
  written: int = 0
  used: int = 0

  def keep(self, length: int, version: int | None) -> None:
    """Forgets what comes after the first `length` tokens."""
    del self.held[length:]
    self.version = version
    if not length:
      self.written = 0

  def append(self, tokens: list[int]) -> None:
    self.held += tokens
    self.written = max(self.written, len(self.held))

  def copy(self, source: Slot, length: int) -> None:
    """Holds the first `length` tokens of another slot."""
    self.held = source.held[:length]
    self.version, self.written = source.version, source.written


class Slots:
  """All slots of an engine."""

  def __init__(self, engine: Any):
    self._engine = engine
    self._slots = [Slot(i) for i in range(engine.slots)]
    self._time = 0

  def __iter__(self) -> Iterator[Slot]:
    return iter(self._slots)

  def __getitem__(self, index: int) -> Slot:
    return self._slots[index]

  def touch(self, slot: Slot) -> None:
    self._time += 1
    slot.used = self._time

  def idle(self) -> list[Slot]:
    """Slots in which nothing runs."""
    return [s for s in self._slots if s.request is None]

  def find(self, request: Request) -> Slot | None:
    """The slot to run a request in, None if all are busy.

    Its session's own with the longest prefix, else a free one, else the one
    whose session has been away longest.
    """
    idle = self.idle()
    own = [s for s in idle if s.session == request.session]
    if own:
      context, version = request.context, request.version
      return max(own, key=lambda s: self.usable(s, context, version))
    free = [s for s in idle if s.session is None]
    return min(free or idle, key=lambda s: s.used, default=None)

  def usable(self, slot: Slot, context: list[int], version: int) -> int:
    """Tokens of `context` that needn't be computed in this slot.

    Caches of another version, or of several, don't count. At least one token is
    left to compute, since sampling starts from a hidden state.
    """
    if slot.version != version:
      return 0
    common = common_prefix(slot.held, context[:-1])
    return self._engine.reusable(slot.written, common) if common else 0

  def longest(
    self, context: list[int], version: int
  ) -> tuple[Slot | None, int]:
    """The slot with most tokens to copy, and how many."""
    found, most = None, 0
    for slot in self._slots:
      if min(len(slot.held), len(context) - 1) > most:
        n = self.usable(slot, context, version)
        if n > most:
          found, most = slot, n
    return found, most


def common_prefix(a: list[int], b: list[int]) -> int:
  """Tokens that two lists have in common at their beginning."""
  low, high = 0, min(len(a), len(b))
  if a[:high] == b[:high]:
    return high
  # Comparing slices is much faster than a loop over tokens.
  while high - low > 1:
    middle = (low + high) // 2
    if a[low:middle] == b[low:middle]:
      low = middle
    else:
      high = middle
  return low
