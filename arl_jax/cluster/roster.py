"""Which processes of a run showed a sign of life, and when. Imports no jax."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

ROLES = ("queue", "learner", "server", "actor", "evaluator")
# All of them, with their counters, are told in one answer.
_MOST_PROCESSES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
  """A process's sign of life.

  Attributes:
    role: one of `ROLES`.
    index: of the process in its role, from 0.
    pid: of the process on its machine.
    idle_seconds: since it last got on with its work.
    counters: what it did since it started, by name.
  """

  role: str
  index: int
  pid: int
  idle_seconds: float
  counters: Mapping[str, float]


class Roster:
  """The latest beat of each (role, index). One thread at a time may call."""

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    """Knows nobody.

    Args:
      clock: returns seconds.
    """
    self._clock = clock
    self._beats: dict[tuple[str, int], tuple[float, Beat]] = {}

  def beat(self, beat: Beat) -> None:
    """Takes a sign of life, in place of the last one of that role and index.

    Raises:
      ValueError: no run has so many processes.
    """
    who = beat.role, beat.index
    if who not in self._beats and len(self._beats) >= _MOST_PROCESSES:
      raise ValueError(
        f"{beat.role} {beat.index} is one process more than the"
        f" {_MOST_PROCESSES} that a queue keeps signs of life of"
      )
    self._beats[who] = self._clock(), beat

  def roles(self) -> list[dict[str, Any]]:
    """The beats by role and index, with `age` in seconds; JSON values."""
    now = self._clock()
    return [
      {
        "role": beat.role,
        "index": beat.index,
        "pid": beat.pid,
        "age": now - when,
        "idle_seconds": beat.idle_seconds,
        "counters": dict(beat.counters),
      }
      for _, (when, beat) in sorted(self._beats.items(), key=lambda x: x[0])
    ]
