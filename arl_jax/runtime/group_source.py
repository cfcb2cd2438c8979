"""Where a step's groups come from: rolled out here, elsewhere, or recorded."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from arl_jax.actors.jobs import Job
from arl_jax.agents.harness import derive_seed
from arl_jax.problems.problem import Problem
from arl_jax.queueing.group_queue import Batch
from arl_jax.queueing.task_source import (
  Source,
  TaskSource,
  mixed,
  of_epoch,
  parse_mixture,
)
from arl_jax.runtime.config import Config
from arl_jax.runtime.recorded_groups import RecordedGroups
from arl_jax.types import Episode, Group, Task


class GroupSource(abc.ABC):
  """What the trainer asks for groups."""

  def begin(
    self,
    lineage: str,
    version: int,
    ledger: Mapping[str, Any] | None,
    groups: Sequence[Group],
  ) -> None:
    """Goes on from a commit, if its position matters.

    Args:
      lineage: of the weights from here on.
      version: of the policy.
      ledger: of the commit; None for the first task.
      groups: that waited in it.
    """
    del lineage, version, ledger, groups

  @abc.abstractmethod
  def take(self, step: int, version: int) -> Batch:
    """The groups of a step, by weights no older than allowed.

    Raises:
      Interrupted: the run was asked to stop.
      TimeoutError: there were none in time; says what was waited for.
    """

  def waiting(self, ledger: Mapping[str, Any]) -> tuple[Group, ...]:
    """Groups of tasks that are open in a ledger and rolled out already."""
    del ledger
    return ()

  def metrics(self) -> dict[str, float]:
    """Of the roles that roll out, since the call before."""
    return {}


def sources(config: Config, tasks: Sequence[Task]) -> tuple[Source, ...]:
  """Of the tasks to train on, as `rl.mixture` and `rl.order` have them."""
  rl = config.rl
  return tuple(mixed(tasks, parse_mixture(rl.mixture), rl.order))


def groups_per_step(config: Config, found: Sequence[Source]) -> int:
  """No task twice in a step; others than those of the mixture don't count."""
  return min(config.rl.tasks_per_step, sum(len(s.task_ids) for s in found))


def say_ended(config: Config, step: int, drops: Mapping[str, int]) -> None:
  """Says why a run ends before its last step; it may be by mistake."""
  rl = config.rl
  why = [f"rl.epochs is {rl.epochs}"] if rl.epochs else []
  if rl.skip_below > -math.inf or rl.skip_above < math.inf:
    why.append("others are left out by rl.skip_below and rl.skip_above")
  if given_up := drops.get("task_given_up"):
    why.append(f"rollouts of {given_up} failed for good")
  logging.warning(
    "no tasks are left at step %d of %d: %s", step, rl.steps, "; ".join(why)
  )


class LocalGroups(GroupSource):
  """Rolled out in this process, by the weights that the step updates."""

  def __init__(
    self,
    config: Config,
    problem: Problem,
    rollout: Callable[[Sequence[Job]], list[Episode | None]],
  ):
    """Args: rollout: runs jobs with the current weights, results in order."""
    self._config, self._rollout = config, rollout
    self._tasks = {task.task_id: task for task in problem.train}
    found = sources(config, problem.train)
    self._wanted = groups_per_step(config, found)
    self._given_up = 0
    rl = config.rl
    self._source = TaskSource(
      found,
      seed=config.seed,
      epochs=rl.epochs,
      skip_below=rl.skip_below,
      skip_above=rl.skip_above,
    )

  def begin(
    self,
    lineage: str,
    version: int,
    ledger: Mapping[str, Any] | None,
    groups: Sequence[Group],
  ) -> None:
    del lineage, version, groups
    if ledger is not None:
      self._source.go_to(ledger["source"])

  def take(self, step: int, version: int) -> Batch:
    draws = [self._source.draw() for _ in range(self._wanted)]
    drawn = [draw for draw in draws if draw is not None]
    tasks = [of_epoch(self._tasks[d.task_id], d.epoch) for d in drawn]
    size = self._config.rl.group_size
    jobs = [
      Job(
        task=task,
        rollout_index=i,
        seed=derive_seed(self._config.seed, task.task_id, i, version),
      )
      for task in tasks
      for i in range(size)
    ]
    episodes = self._rollout(jobs)
    groups = []
    for n, draw in enumerate(drawn):
      members = episodes[n * size : (n + 1) * size]
      whole = tuple(e for e in members if e is not None)
      if len(whole) < 2:
        self._given_up += 1
        continue
      group = Group(
        group_id=f"{draw.number}/{draw.task_id}",
        task=tasks[n],
        episodes=whole,
      )
      self._source.measure(draw.task_id, float(np.mean(group.rewards)))
      groups.append(group)
    drops = {"task_given_up": self._given_up} if self._given_up else {}
    ended = len(drawn) < self._wanted
    if ended and step < self._config.rl.steps:
      say_ended(self._config, step, drops)
    return Batch(
      groups=tuple(groups),
      ledger={"source": self._source.state(), "open": []},
      ended=ended,
      drops=drops,
      waiting=0,
    )


class Replay(GroupSource):
  """Those that another run recorded, step by step."""

  def __init__(self, run_dir: str):
    """Args: run_dir: of that run. Raises as `RecordedGroups`."""
    self._recorded = RecordedGroups(run_dir, "replay")

  def take(self, step: int, version: int) -> Batch:
    """Raises ValueError for a file that holds something else."""
    del version
    return Batch(
      groups=self._recorded.read(step),
      ledger={},
      ended=step >= self._recorded.steps[-1],
      drops={},
      waiting=0,
    )
