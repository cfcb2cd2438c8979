"""Which processes of a run showed a sign of life, and when. Imports no jax."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ROLES = ("queue", "learner", "server", "actor", "evaluator")

# Incarnations of a role whose counters are told apart.
_INCARNATIONS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
  """A process's sign of life.

  Attributes:
    role: one of `ROLES`.
    index: of the process in its role, from 0.
    pid: of the process on its machine.
    process: tells it from those that had the place before, whose pid may have
      been the same.
    idle_seconds: since it last got on with its work.
    counters: what it did since it started, by name.
  """

  role: str
  index: int
  pid: int
  process: str
  idle_seconds: float
  counters: Mapping[str, float]


@dataclasses.dataclass(slots=True)
class _Place:
  """What is known of one (role, index)."""

  beat: Beat
  when: float
  # Counters of each incarnation, oldest first, and of those forgotten.
  counters: dict[str, Mapping[str, float]]
  before: Mapping[str, float]


class Roster:
  """The latest beat of each (role, index). One thread at a time may call."""

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    """Knows nobody.

    Args:
      clock: returns seconds.
    """
    self._clock = clock
    self._places: dict[tuple[str, int], _Place] = {}

  def beat(self, beat: Beat) -> None:
    """Takes a sign of life."""
    key, now = (beat.role, beat.index), self._clock()
    place = self._places.get(key)
    if place is None:
      place = _Place(beat, now, {}, {})
      self._places[key] = place
    place.beat, place.when = beat, now
    place.counters[beat.process] = beat.counters
    if len(place.counters) > _INCARNATIONS:
      oldest = place.counters.pop(next(iter(place.counters)))
      place.before = _sum([place.before, oldest])

  def roles(self) -> list[dict[str, Any]]:
    """What is known of each place, by role and index; JSON values.

    Each has `role`, `index`, `pid`, `age` (seconds since the beat),
    `idle_seconds` as the beat said, and `counters`: sums over all processes
    that had the place since this roster began, so that none goes back when a
    process is started anew.
    """
    now = self._clock()
    return [
      {
        "role": place.beat.role,
        "index": place.beat.index,
        "pid": place.beat.pid,
        "age": now - place.when,
        "idle_seconds": place.beat.idle_seconds,
        "counters": _sum([place.before, *place.counters.values()]),
      }
      for _, place in sorted(self._places.items())
    ]


def _sum(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
  total: dict[str, float] = {}
  for some in counters:
    for name, amount in some.items():
      total[name] = total.get(name, 0.0) + amount
  return total
