"""Many episodes in flight in one process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from absl import logging

from arl_jax.actors.environments import scored
from arl_jax.agents.harness import AgentConfig, run_episode
from arl_jax.problems.problem import Problem
from arl_jax.types import Episode, PolicyClient, Task

# Tries of an episode whose infrastructure failed, before it is left out.
_TRIES = 2


class Interrupted(Exception):
  """The run was asked to stop."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
  """One episode to roll out."""

  task: Task
  rollout_index: int
  seed: int


async def run_jobs(
  jobs: Sequence[Job],
  problem: Problem,
  client_of: Callable[[Job], PolicyClient],
  agent: AgentConfig,
  *,
  concurrency: int,
  training: bool,
  on_done: Callable[[int], None] = lambda done: None,
  should_stop: Callable[[], bool] = lambda: False,
) -> list[Episode | None]:
  """Rolls out and scores every job; results in order of jobs.

  An episode whose infrastructure failed is tried again, then left out (None):
  it is never scored as the policy's failure.

  Args:
    jobs: what to roll out.
    problem: where environments and rewards come from.
    client_of: what a job samples from.
    agent: budgets.
    concurrency: episodes in flight.
    training: see `run_episode`.
    on_done: called with the number of finished episodes.
    should_stop: asked before each episode.

  Raises:
    Interrupted: `should_stop` said so.
  """
  slots = asyncio.Semaphore(concurrency)
  done = 0

  async def attempt(job: Job) -> Episode:
    episode = await run_episode(
      job.task,
      problem.environment(job.task, job.seed),
      client_of(job),
      problem.renderer,
      agent,
      rollout_index=job.rollout_index,
      seed=job.seed,
      training=training,
    )
    reward = scored(problem.reward, job.task, episode)
    return dataclasses.replace(episode, reward=reward)

  async def one(job: Job) -> Episode | None:
    nonlocal done
    async with slots:
      for tried in range(1, _TRIES + 1):
        if should_stop():
          raise Interrupted
        try:
          episode = await attempt(job)
        except Exception as error:
          logging.warning(
            "episode %s/%d failed (try %d of %d): %r",
            job.task.task_id,
            job.rollout_index,
            tried,
            _TRIES,
            error,
          )
          continue
        done += 1
        on_done(done)
        return episode
      return None

  try:
    async with asyncio.TaskGroup() as group:
      tasks = [group.create_task(one(job)) for job in jobs]
  except* Interrupted:
    raise Interrupted from None
  return [task.result() for task in tasks]
