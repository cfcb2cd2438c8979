"""What the warm start trains on: openings, then whole demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from arl_jax.agents.harness import derive_seed
from arl_jax.data import sft
from arl_jax.runtime.actor import Job
from arl_jax.runtime.config import Config
from arl_jax.runtime.problem import Problem
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
