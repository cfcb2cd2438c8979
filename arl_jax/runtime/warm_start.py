"""What the warm start trains on: openings, then whole demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from arl_jax.actors.jobs import Job, run_jobs
from arl_jax.agents.harness import derive_seed
from arl_jax.data import sft
from arl_jax.problems.problem import Problem
from arl_jax.runtime.config import Config
from arl_jax.types import Episode, Segment, Task


def jobs(config: Config, problem: Problem) -> list[Job]:
  """Episodes of the demonstrator: one a training task, then a second, ..."""
  made = []
  for i in range(config.warm_start.episodes):
    index, place = divmod(i, len(problem.train))
    task = problem.train[place]
    seed = derive_seed(config.seed, "script", task.task_id, index)
    made.append(Job(task=task, rollout_index=index, seed=seed))
  return made


def play(
  config: Config,
  problem: Problem,
  *,
  on_done: Callable[[int], None],
  should_stop: Callable[[], bool],
) -> list[Episode]:
  """The demonstrator's episodes, without those that failed for good.

  Args:
    config: resolved.
    problem: whose demonstrator plays.
    on_done: called with the number of finished episodes.
    should_stop: asked before each episode.

  Raises:
    Interrupted: `should_stop` said so.
  """
  episodes = asyncio.run(
    run_jobs(
      jobs(config, problem),
      problem,
      lambda job: problem.demonstrator(job.task, job.seed),
      config.agent,
      concurrency=64,
      training=True,
      on_done=on_done,
      should_stop=should_stop,
    )
  )
  return [e for e in episodes if e is not None]


def batches(
  config: Config, problem: Problem, demonstrations: Sequence[Episode]
) -> Iterator[tuple[list[Segment], int]]:
  """Segments and row length of each update, always the same ones."""

  def player(question: str):
    task = Task(task_id=question, prompt=question, truth={})
    seed = derive_seed(config.seed, "opening", question)
    return lambda ids: problem.demonstrator(task, seed).play(
      ids, config.agent.message_tokens
    )

  warm = config.warm_start
  openings = sft.openings(
    problem.practice(derive_seed(config.seed, "practice")),
    problem.renderer,
    player,
  )
  whole = sft.shuffled(
    sft.segments_of(demonstrations), derive_seed(config.seed, "whole")
  )
  for source, length, steps in (
    (openings, warm.opening_row_length, warm.opening_steps),
    (whole, config.learner.row_length, warm.steps - warm.opening_steps),
  ):
    for batch in sft.batches(source, tokens=warm.batch_tokens, steps=steps):
      yield batch, length
