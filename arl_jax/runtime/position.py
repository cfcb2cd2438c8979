"""Where a run is, what it has taken so far: part of every commit."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(slots=True)
class Position:
  """Counts of what is done.

  Attributes:
    warm_start: updates done.
    rl: steps done.
    seconds: spent in each phase.
    tokens: by kind, with the seconds they took under "<kind>_seconds".
  """

  warm_start: int = 0
  rl: int = 0
  seconds: dict[str, float] = dataclasses.field(
    default_factory=lambda: defaultdict(float)
  )
  tokens: dict[str, float] = dataclasses.field(
    default_factory=lambda: defaultdict(float)
  )

  @property
  def rounded_seconds(self) -> dict[str, float]:
    return {name: round(value, 1) for name, value in self.seconds.items()}

  @property
  def number(self) -> int:
    return self.warm_start + self.rl

  def to_record(self) -> dict[str, Any]:
    """JSON values."""
    return {
      "warm_start": self.warm_start,
      "rl": self.rl,
      "seconds": dict(self.seconds),
      "tokens": dict(self.tokens),
    }

  @classmethod
  def from_record(cls, record: Mapping[str, Any]) -> Position:
    """Inverse of `to_record`; other fields are ignored."""
    return cls(
      warm_start=record["warm_start"],
      rl=record["rl"],
      seconds=defaultdict(float, record["seconds"]),
      tokens=defaultdict(float, record["tokens"]),
    )
