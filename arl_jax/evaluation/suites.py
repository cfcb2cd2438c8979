"""What a set of held-out episodes says about a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arl_jax.evaluation.statistics import (
  Interval,
  bootstrap_mean,
  bootstrap_ratio,
)
from arl_jax.types import Episode, StopReason, Task

# Metrics that are a part of the reward or lie beside it.
_PARTS = {
  "final_answer_found": "answer_found",
  "output_recall": "output_recall",
  "output_precision": "output_precision",
  "trajectory_recall": "trajectory_recall",
}


def score(
  tasks: Sequence[Task], episodes: Sequence[Episode], *, seed: int
) -> dict[str, Interval]:
  """Metrics of held-out episodes, each with a bootstrap 95 % interval.

  Args:
    tasks: [n].
    episodes: [n], scored, one a task; resampled together with their task.
    seed: of the bootstrap.

  Returns:
    reward; turns; answered_rate (share that ended with an answer);
    sampled_tokens; malformed_call_rate (share of calls that could not be
    executed as written). Of search also final_answer_found, output_recall,
    output_precision and trajectory_recall (0..1), and prune_accuracy (share of
    pruned chunks that were irrelevant).
  """
  rewards = [e.reward.total if e.reward else 0.0 for e in episodes]
  columns: dict[str, list[float]] = {"reward": rewards}
  parts = [e.reward.parts if e.reward else {} for e in episodes]
  for name, part in _PARTS.items():
    if any(part in p for p in parts):
      columns[name] = [p.get(part, 0.0) for p in parts]
  columns["turns"] = [float(e.turns) for e in episodes]
  columns["answered_rate"] = [
    float(e.stop_reason is StopReason.ANSWERED) for e in episodes
  ]
  columns["sampled_tokens"] = [float(e.trained_tokens) for e in episodes]
  result = {k: bootstrap_mean(v, seed=seed) for k, v in columns.items()}
  if any("pruned" in e.outcome for e in episodes):
    pruned = [len(e.outcome["pruned"]) for e in episodes]
    right = [_pruned_right(t, e) for t, e in zip(tasks, episodes, strict=True)]
    result["prune_accuracy"] = bootstrap_ratio(right, pruned, seed=seed)
  malformed = [_count(e, "malformed_call") for e in episodes]
  wellformed = [
    _count(e, "tool_call") + _count(e, "refused_call") for e in episodes
  ]
  calls = [m + w for m, w in zip(malformed, wellformed, strict=True)]
  result["malformed_call_rate"] = bootstrap_ratio(malformed, calls, seed=seed)
  return result


def _pruned_right(task: Task, episode: Episode) -> int:
  relevant = set(task.truth["relevant"])
  return sum(chunk not in relevant for chunk in episode.outcome["pruned"])


def _count(episode: Episode, kind: str) -> int:
  return sum(event.kind == kind for event in episode.events)


def table(summary: Mapping[str, Any]) -> str:
  """Before and after as text, a metric a line, with 95 % intervals."""
  lines = ["", f"{'held-out':22}{'before RL':>28}{'after RL':>28}"]
  for metric, before in summary["before"].items():
    cells = [_cell(before), _cell(summary["after"][metric])]
    lines.append(f"{metric:22}{cells[0]:>28}{cells[1]:>28}")
  difference = _cell(summary["paired_reward_difference"])
  return "\n".join([*lines, "", f"paired reward difference {difference}"])


def _cell(interval: Sequence[float | None]) -> str:
  mean, low, high = interval
  return "none" if mean is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"
