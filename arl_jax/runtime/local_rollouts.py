"""Rollouts by an engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from arl_jax.actors.jobs import Job, run_jobs
from arl_jax.agents.harness import derive_seed
from arl_jax.model.config import ModelConfig
from arl_jax.problems.problem import Problem
from arl_jax.rollout.client import LocalClient
from arl_jax.rollout.engine import Engine
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.runtime.config import Config
from arl_jax.types import Episode, Task


class LocalRollouts:
  """Runs jobs to their end, with the weights it is given.

  Attributes:
    tokens: sampled and prefilled so far, and the seconds that took.
  """

  def __init__(self, config: Config, problem: Problem, model: ModelConfig):
    """Compiles nothing yet."""
    self._config, self._problem = config, problem
    self._engine = Engine(
      model, config.engine, max_length=config.agent.token_budget + 1
    )
    self.tokens = {
      "rollout_sampled": 0.0,
      "rollout_prefilled": 0.0,
      "rollout_seconds": 0.0,
    }

  def run(
    self,
    jobs: Sequence[Job],
    params: Any,
    version: int,
    *,
    training: bool,
    on_done: Callable[[int], None] = lambda done: None,
    should_stop: Callable[[], bool] = lambda: False,
  ) -> list[Episode | None]:
    """Rolls out jobs; results in their order, None for what failed for good.

    Args:
      jobs: what to roll out.
      params: on the engine's device.
      version: of them.
      training: see `run_episode`.
      on_done: called with the number of finished episodes.
      should_stop: asked before each episode.

    Raises:
      Interrupted: `should_stop` said so.
    """
    began = time.monotonic()
    # The last bits of a number depend on which requests share a call, so none
    # may depend on what was rolled out before: a resumed run hasn't done that.
    scheduler = Scheduler(self._engine, self._engine.place(params), version)

    async def run() -> list[Episode | None]:
      async with LocalClient(scheduler) as client:
        return await run_jobs(
          jobs,
          self._problem,
          lambda job: client,
          self._config.agent,
          concurrency=self._engine.slots,
          training=training,
          on_done=on_done,
          should_stop=should_stop,
        )

    episodes = asyncio.run(run())
    self.tokens["rollout_sampled"] += scheduler.sampled_tokens
    self.tokens["rollout_prefilled"] += scheduler.prefilled_tokens
    self.tokens["rollout_seconds"] += time.monotonic() - began
    return episodes


def heldout_jobs(
  config: Config, tasks: Sequence[Task], rollouts: int = 1
) -> list[Job]:
  """Rollouts of held-out tasks, always with the same seeds.

  Args:
    config: of the run.
    tasks: that are rolled out.
    rollouts: of each, side by side; the first doesn't depend on how many.
  """
  return [
    Job(
      task=task,
      rollout_index=index,
      seed=_heldout_seed(config, task, index),
    )
    for task in tasks
    for index in range(rollouts)
  ]


def _heldout_seed(config: Config, task: Task, index: int) -> int:
  first = derive_seed(config.evaluation_seed, task.task_id)
  return derive_seed(first, index) if index else first
