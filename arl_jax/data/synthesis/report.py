"""What became of the attempts at making tasks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from arl_jax import types

_EXAMPLES = 3


@dataclasses.dataclass(kw_only=True, slots=True)
class Report:
  """Counts, and a few examples of what was rejected.

  Attributes:
    attempts: in all.
    accepted: tasks.
    by: of the tasks, counts by split, hops, domain, source, difficulty and
      generator.
    distractors: of all tasks.
    rejected: attempts that gave no task, by reason.
    examples: the first few of each reason.
    missing: tasks that were asked for and not made, by split and hops.
  """

  attempts: int = 0
  accepted: int = 0
  by: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
  distractors: int = 0
  rejected: Counter[str] = dataclasses.field(default_factory=Counter)
  examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)
  missing: dict[str, int] = dataclasses.field(default_factory=dict)

  def accept(self, task: types.Task) -> None:
    """Counts a task."""
    self.accepted += 1
    self.distractors += len(task.truth.get("distractors", ()))
    counted = {"split": task.split}
    for name in ("hops", "domain", "source", "difficulty", "generator"):
      counted[name] = str(task.provenance.get(name, ""))
    for name, value in counted.items():
      self.by.setdefault(name, Counter())[value] += 1

  def reject(self, reason: str, example: str) -> None:
    """Counts an attempt that gave no task."""
    self.rejected[reason] += 1
    shown = self.examples.setdefault(reason, [])
    if example and len(shown) < _EXAMPLES:
      shown.append(example[:200])

  def to_json(self) -> Mapping[str, Any]:
    """JSON values, in an order that says the most frequent first."""
    return {
      "attempts": self.attempts,
      "tasks": self.accepted,
      "missing": dict(self.missing),
      "by": {k: dict(sorted(v.items())) for k, v in self.by.items()},
      "distractors_per_task": round(
        self.distractors / max(self.accepted, 1), 2
      ),
      "rejected": {
        reason: {"count": count, "examples": self.examples[reason]}
        for reason, count in sorted(
          self.rejected.items(), key=lambda item: (-item[1], item[0])
        )
      },
    }

  def lines(self) -> list[str]:
    """A summary for people."""
    found = [f"{self.accepted} tasks from {self.attempts} attempts"]
    for name in ("split", "hops", "domain", "difficulty"):
      counts = sorted(self.by.get(name, Counter()).items())
      found.append(f"by {name}: " + ", ".join(f"{k} {n}" for k, n in counts))
    rejected = self.rejected.most_common()
    if rejected:
      found.append("rejected: " + ", ".join(f"{k} {n}" for k, n in rejected))
    if self.missing:
      missing = ", ".join(f"{k}: {n}" for k, n in self.missing.items())
      found.append(f"asked for but not made: {missing}")
    return found
