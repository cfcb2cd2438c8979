"""What of a source is in no index, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class LeftOut:
  """Counts by reason, each with the first example."""

  def __init__(self, counts: Mapping[str, Any] | None = None):
    """Args: counts: as `to_json` gives them."""
    self._counts: dict[str, tuple[int, str]] = {
      reason: (int(count), str(example))
      for reason, (count, example) in (counts or {}).items()
    }

  def add(self, reason: str, where: str, count: int = 1) -> None:
    """Counts something.

    Args:
      reason: that others share.
      where: which file or line, and what is wrong with it.
      count: of them.
    """
    before, example = self._counts.get(reason, (0, where))
    self._counts[reason] = (before + count, example)

  def merge(self, other: LeftOut) -> None:
    for reason, count, example in other:
      self.add(reason, example, count)

  def __iter__(self) -> Iterator[tuple[str, int, str]]:
    """(reason, count, example), the most frequent first."""
    for reason, (count, example) in sorted(
      self._counts.items(), key=lambda item: (-item[1][0], item[0])
    ):
      yield reason, count, example

  def count(self, reason: str) -> int:
    return self._counts.get(reason, (0, ""))[0]

  def to_json(self) -> dict[str, Any]:
    return {reason: list(found) for reason, found in self._counts.items()}
