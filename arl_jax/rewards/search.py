"""Reward of the search environment (Chroma's Context-1, 2026).

  r = min(r_pre, max(ε, r_pre − p_prune − p_turn))
  r_pre = 0.7·F_β + 0.3·r_traj + r_fa

An episode without a final answer that parses has −0.5 instead. An answer that
finds nothing, after seeing nothing, has 0: doing nothing has no reward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from arl_jax import types

PRUNE_TOOL = "prune_chunks"


def f_beta(precision: float, recall: float, beta: float) -> float:
  """(1 + β²)·P·R / (β²·P + R), 0 where both are 0.

  Recall weighs β² times as much as precision.
  """
  divisor = beta**2 * precision + recall
  return (1 + beta**2) * precision * recall / divisor if divisor > 0 else 0.0


def prune_penalty(
  calls: Sequence[str],
  *,
  tool: str = PRUNE_TOOL,
  free: int = 3,
  each: float = 0.1,
  most: float = 0.5,
) -> float:
  """`each` for every prune beyond `free` in one streak, at most `most`.

  Args:
    calls: tool names in order; any other tool ends a streak.
    tool: name of the prune tool.
    free: prunes of a streak that cost nothing.
    each: cost of a further one.
    most: largest penalty of an episode.
  """
  streak = excess = 0
  for call in calls:
    streak = streak + 1 if call == tool else 0
    excess += streak > free
  return min(most, each * excess)


def turn_penalty(
  turns: int, *, free: int = 64, limit: int = 128, most: float = 0.5
) -> float:
  """0 up to `free` turns, then linear to `most` at `limit` and beyond."""
  return most * min(max((turns - free) / (limit - free), 0.0), 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchReward:
  """A `types.RewardFn` for outcomes of `SearchEnvironment`.

  Reads `truth["relevant"]` and `truth["answer_chunks"]` (chunk ids; the second
  are relevant ones that hold the answer) and optionally `truth["facts"]`
  (lists of chunk ids). With facts recall is the share of facts of which some
  chunk was found; precision always counts chunks.

  Attributes:
    beta: recall weighs beta² times as much as precision in F_β.
    final_beta: what it is annealed to, linearly over `beta_epochs`; a task's
      epoch is `provenance["epoch"]`, and one without, as in evaluations, has
      `beta`. By default it stays.
    beta_epochs: after which it is `final_beta`, at least 1.
    floor: ε; penalties don't push a positive r_pre below it.
    malformed: reward of a scorable episode that did not end in an answer.
    answer_bonus: r_fa.
    answer_in: where a chunk with the answer earns the bonus: "output" (the
      final list) or "encountered" (anything shown).
    output_weight: of F_β over the final list.
    trajectory_weight: of the recall over everything shown, pruned or not.
    prune_free: prunes in a row that cost nothing.
    prune_each: cost of each further one.
    prune_most: largest prune penalty.
    turn_free: turns that cost nothing.
    turn_limit: turns at which the turn penalty is largest.
    turn_most: largest turn penalty.

  Raises:
    ValueError: a field is out of its range; when called, the episode isn't
      scorable or a field of its outcome or of the task's truth is unusable.
  """

  beta: float = 4.0
  final_beta: float | None = None
  beta_epochs: int = 1
  floor: float = 1e-3
  malformed: float = -0.5
  answer_bonus: float = 1.0
  answer_in: str = "output"
  output_weight: float = 0.7
  trajectory_weight: float = 0.3
  prune_free: int = 3
  prune_each: float = 0.1
  prune_most: float = 0.5
  turn_free: int = 64
  turn_limit: int = 128
  turn_most: float = 0.5

  def __post_init__(self) -> None:
    for name in ("beta", "final_beta"):
      value = getattr(self, name)
      if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}, not above 0 and finite")
    if self.beta_epochs < 1:
      raise ValueError(f"beta_epochs is {self.beta_epochs}, not at least 1")
    if self.answer_in not in ("output", "encountered"):
      raise ValueError(
        f"answer_in is {self.answer_in!r}, not 'output' or 'encountered'"
      )
    if self.turn_limit <= self.turn_free:
      raise ValueError(
        f"turn_limit is {self.turn_limit}, not above turn_free"
        f" ({self.turn_free})"
      )

  def __call__(self, task: types.Task, episode: types.Episode) -> types.Reward:
    """Scores an episode; the parts are finite whatever its stop reason."""
    if not episode.stop_reason.scorable:
      raise ValueError(
        f"episode of task {task.task_id} ended {episode.stop_reason.value};"
        " only scorable episodes have a reward"
      )
    answered = episode.stop_reason is types.StopReason.ANSWERED
    answer = episode.outcome.get("answer")
    if answered and answer is None:
      raise ValueError(
        f"episode of task {task.task_id} ended answered, but its"
        " outcome['answer'] is None; a list of chunk ids is needed"
      )
    output = set(answer or ()) if answered else set()
    encountered = set(episode.outcome.get("encountered", ()))
    parts = self._parts(task, output, encountered)
    parts["prune_penalty"] = prune_penalty(
      episode.outcome.get("calls", ()),
      free=self.prune_free,
      each=self.prune_each,
      most=self.prune_most,
    )
    parts["turn_penalty"] = turn_penalty(
      episode.turns,
      free=self.turn_free,
      limit=self.turn_limit,
      most=self.turn_most,
    )
    parts["malformed"] = 0.0 if answered else 1.0
    total = self._total(parts) if answered else self.malformed
    return types.Reward(total=total, parts=parts)

  def beta_of(self, task: types.Task) -> float:
    """β in the epoch that a task was drawn in."""
    last = self.beta if self.final_beta is None else self.final_beta
    done = min(task.provenance.get("epoch", 0) / self.beta_epochs, 1.0)
    return self.beta + (last - self.beta) * done

  def _parts(
    self, task: types.Task, output: set[str], encountered: set[str]
  ) -> dict[str, float]:
    relevant = set(_truth(task, "relevant"))
    if not relevant:
      raise ValueError(
        f"truth['relevant'] of task {task.task_id} is empty; name at least one"
        " chunk id"
      )
    facts = [set(fact) for fact in task.truth.get("facts") or ()]
    facts = facts or [{chunk_id} for chunk_id in relevant]
    precision = len(output & relevant) / len(output) if output else 0.0
    recall = _recall(facts, output)
    holders = output if self.answer_in == "output" else encountered
    return {
      "f_beta": f_beta(precision, recall, self.beta_of(task)),
      "output_recall": recall,
      "output_precision": precision,
      "trajectory_recall": _recall(facts, encountered),
      "answer_found": float(
        not holders.isdisjoint(_truth(task, "answer_chunks"))
      ),
    }

  def _total(self, parts: Mapping[str, float]) -> float:
    before = (
      self.output_weight * parts["f_beta"]
      + self.trajectory_weight * parts["trajectory_recall"]
      + self.answer_bonus * parts["answer_found"]
    )
    penalty = parts["prune_penalty"] + parts["turn_penalty"]
    return min(before, max(self.floor, before - penalty))


def _recall(facts: Sequence[Collection[str]], found: set[str]) -> float:
  return sum(not found.isdisjoint(fact) for fact in facts) / len(facts)


def _truth(task: types.Task, name: str) -> Any:
  value = task.truth.get(name)
  if not isinstance(value, (list, tuple)):
    raise ValueError(
      f"truth[{name!r}] of task {task.task_id} is {value!r}, not a list of"
      " chunk ids"
    )
  return value
