"""What the warm start trains on: openings, then whole demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from absl import logging

from arl_jax.actors.jobs import Job, run_jobs
from arl_jax.agents.harness import derive_seed
from arl_jax.data import sft
from arl_jax.data.trajectory_filter import FilterConfig, filter_trajectories
from arl_jax.problems.problem import Demonstrated, Problem
from arl_jax.runtime import demonstrations
from arl_jax.runtime.config import Config
from arl_jax.types import Episode, Group, Segment, Task


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
  problem: Demonstrated,
  *,
  on_done: Callable[[int], None],
  should_stop: Callable[[], bool],
) -> list[Episode]:
  """The demonstrations, without those that failed for good.

  Args:
    config: resolved.
    problem: whose demonstrator plays, unless they are recorded already.
    on_done: called with the number of finished episodes.
    should_stop: asked before each episode.

  Raises:
    Interrupted: `should_stop` said so.
    ValueError: `warm_start.filter` keeps none, or can't tell; or
      `warm_start.demonstrations` holds what can't be shown.
    OSError: it can't be read.
  """
  if config.warm_start.demonstrations:
    return _kept(config, demonstrations.read(config, problem))
  wanted = jobs(config, problem)
  episodes = asyncio.run(
    run_jobs(
      wanted,
      problem,
      lambda job: problem.demonstrator(job.task, job.seed),
      config.agent,
      concurrency=64,
      training=True,
      on_done=on_done,
      should_stop=should_stop,
    )
  )
  return _kept(
    config,
    [
      demonstrations.group(job, episode)
      for job, episode in zip(wanted, episodes, strict=True)
      if episode is not None
    ],
  )


def _kept(config: Config, groups: Sequence[Group]) -> list[Episode]:
  """All, or what the published rules keep; see `data.trajectory_filter`."""
  if config.warm_start.filter:
    found = filter_trajectories(groups, FilterConfig(seed=config.seed))
    logging.info("demonstrations: kept %s, not %s", found.kept, found.dropped)
    if not found.groups:
      raise ValueError(
        f"warm_start.filter keeps none of {len(groups)} demonstrations:"
        f" {dict(found.dropped)}"
      )
    groups = found.groups
  return [episode for group in groups for episode in group.episodes]


def batches(
  config: Config, problem: Demonstrated, episodes: Sequence[Episode]
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
    sft.segments_of(episodes), derive_seed(config.seed, "whole")
  )
  for source, length, steps in (
    (openings, warm.opening_row_length, warm.opening_steps),
    (whole, config.learner.row_length, warm.steps - warm.opening_steps),
  ):
    for batch in sft.batches(source, tokens=warm.batch_tokens, steps=steps):
      yield batch, length
