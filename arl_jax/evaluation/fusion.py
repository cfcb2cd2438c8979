"""Several rollouts of a task, fused into one answer (Context-1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from arl_jax.types import Episode, RewardFn, StopReason, Task

# Of reciprocal rank fusion, as in search.
_RRF_K = 20


def fuse(rankings: Sequence[Sequence[str]], *, most: int) -> list[str]:
  """Reciprocal rank fusion: by Σ 1 / (20 + rank) over the rankings.

  Equal ones go by the best rank, then by the first ranking that has them.

  Args:
    rankings: ids, best first; an id counts once in each.
    most: ids that are kept.
  """
  scores: dict[str, float] = {}
  first: dict[str, tuple[int, int]] = {}
  for which, ranking in enumerate(rankings):
    for rank, name in enumerate(dict.fromkeys(ranking), 1):
      scores[name] = scores.get(name, 0.0) + 1.0 / (_RRF_K + rank)
      first[name] = min(first.get(name, (rank, which)), (rank, which))
  best = sorted(scores, key=lambda name: (-scores[name], first[name]))
  return best[:most]


def fused(
  task: Task, episodes: Sequence[Episode], reward: RewardFn, *, most: int
) -> Episode:
  """One episode that stands for several rollouts of a task.

  Its answer is that of `fuse`; what it encountered and pruned is what any of
  them did; turns and calls are those of the longest, which others ran beside.

  Args:
    task: of all episodes.
    episodes: at least one, whose outcomes are those of a search.
    reward: scores the result.
    most: ids that the answer keeps.

  Raises:
    ValueError: there is no episode, or one that isn't of a search.
  """
  if not episodes:
    raise ValueError(f"task {task.task_id} has no episode to fuse")
  for name in ("answer", "encountered", "pruned", "calls"):
    if any(name not in e.outcome for e in episodes):
      raise ValueError(
        f"an episode of task {task.task_id} reports no {name!r}; only answers"
        " of searches can be fused"
      )
  answers = [
    e.outcome["answer"]
    for e in episodes
    if e.stop_reason is StopReason.ANSWERED
  ]
  longest = max(episodes, key=lambda e: e.turns)
  outcome = {
    "encountered": _union(e.outcome["encountered"] for e in episodes),
    "pruned": _union(e.outcome["pruned"] for e in episodes),
    "answer": fuse(answers, most=most) if answers else None,
    "calls": longest.outcome["calls"],
  }
  whole = dataclasses.replace(
    longest,
    outcome=outcome,
    stop_reason=StopReason.ANSWERED if answers else longest.stop_reason,
    reward=None,
  )
  return dataclasses.replace(whole, reward=reward(task, whole))


def _union(lists) -> list[str]:
  return list(dict.fromkeys(name for names in lists for name in names))
