"""Demonstrations in files: made by a teacher, shown in a warm start."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arl_jax.actors.jobs import Job, run_jobs
from arl_jax.observability.run_directory import write_atomically
from arl_jax.problems.problem import Problem
from arl_jax.runtime import recorded_groups
from arl_jax.runtime.config import Config
from arl_jax.runtime.recorded_groups import RecordedGroups
from arl_jax.types import Episode, Group, PolicyClient

# Episodes of a file: what a kill may lose.
_FILE = 64
_MADE_FROM = "demonstrations.json"


def group(job: Job, episode: Episode) -> Group:
  """A group of one."""
  return Group(
    group_id=f"{job.rollout_index}/{job.task.task_id}",
    task=job.task,
    episodes=(episode,),
  )


def read(config: Config, problem: Problem) -> list[Group]:
  """The groups in `warm_start.demonstrations`.

  Raises:
    ValueError: there are none, they are of held-out tasks, or can't have been
      recorded with this tokenizer, these tools and these sizes.
    OSError: they can't be read.
  """
  name = "warm_start.demonstrations"
  folder = config.warm_start.demonstrations
  recorded = RecordedGroups(folder, name)
  heldout = {task.task_id for task in problem.heldout}
  found: list[Group] = []
  for step in recorded.steps:
    groups = recorded.read(step)
    for each in groups:
      where = f"{name} {folder}: step {step}, group {each.group_id}"
      if each.task.task_id in heldout or each.task.split == "heldout":
        raise ValueError(
          f"{where} is of task {each.task.task_id}, which is held out"
        )
      _check_sizes(where, each, config, problem)
    for each in groups[:1]:
      where = f"{name} {folder}: step {step}, group {each.group_id}"
      _check_prompt(where, each, problem)
    found += groups
  if not any(g.episodes for g in found):
    raise ValueError(f"{name} is {folder!r}, whose files hold no episode")
  return found


def _check_sizes(
  where: str, found: Group, config: Config, problem: Problem
) -> None:
  longest = config.learner.row_length
  known = problem.renderer.tokenizer.vocab_size
  for segment in (s for e in found.episodes for s in e.segments):
    if segment.trained.any() and len(segment) > longest:
      raise ValueError(
        f"{where} has a segment of {len(segment)} tokens, more than"
        f" learner.row_length, {longest}"
      )
    largest = int(segment.ids.max(initial=0))
    if largest >= known:
      raise ValueError(
        f"{where} has the id {largest}; the tokenizer has {known}"
      )


def _check_prompt(where: str, found: Group, problem: Problem) -> None:
  """Raises ValueError unless the same ids would be shown now."""

  async def prompt() -> list[int]:
    environment = problem.environment(found.task, 0)
    opening = await environment.start(found.task)
    return problem.renderer.prompt(opening, environment.tool_names)

  wanted = asyncio.run(prompt())
  for segment in (s for e in found.episodes for s in e.segments[:1]):
    if segment.ids[: len(wanted)].tolist() != wanted:
      raise ValueError(
        f"{where} doesn't begin with the prompt that its task has now: it was"
        " recorded with another tokenizer, other tools or another problem"
      )


async def record(
  out: str | os.PathLike[str],
  jobs: Sequence[Job],
  problem: Problem,
  client_of: Callable[[Job], PolicyClient],
  config: Config,
  *,
  made_from: Mapping[str, Any],
  concurrency: int,
  on_done: Callable[[int], None],
  should_stop: Callable[[], bool],
) -> list[Group]:
  """Plays what a folder lacks yet, and writes it there as recorded groups.

  Args:
    out: folder; made if there is none.
    jobs: in order; an episode that failed for good is left out.
    problem: where environments and rewards come from.
    client_of: who plays a job.
    config: resolved.
    made_from: JSON values that tell this teacher from another.
    concurrency: episodes in flight.
    on_done: called with the number of jobs that are done.
    should_stop: asked before each episode.

  Returns:
    All that the folder holds now.

  Raises:
    Interrupted: `should_stop` said so; the folder keeps whole files.
    ValueError: the folder is of other jobs, another teacher or another problem,
      or every episode of a file failed.
    OSError: the folder can't be read or written.
  """
  out = pathlib.Path(out)
  _open(out, _identity(config, problem, jobs, made_from))
  found: list[Group] = []
  for first in range(0, len(jobs), _FILE):
    step, some = first // _FILE + 1, jobs[first : first + _FILE]
    if (out / "groups" / f"{step:06d}.jsonl").exists():
      found += RecordedGroups(out, "out").read(step)
      continue
    episodes = await run_jobs(
      some,
      problem,
      client_of,
      config.agent,
      concurrency=concurrency,
      training=True,
      on_done=functools.partial(_shifted, on_done, first),
      should_stop=should_stop,
    )
    groups = [
      group(job, episode)
      for job, episode in zip(some, episodes, strict=True)
      if episode is not None
    ]
    if not groups:
      raise ValueError(
        f"all of the {len(some)} episodes failed that were next; the warnings"
        " above say why"
      )
    recorded_groups.write(out, step, groups)
    found += groups
  return found


def _shifted(on_done: Callable[[int], None], first: int, done: int) -> None:
  on_done(first + done)


def _identity(
  config: Config,
  problem: Problem,
  jobs: Sequence[Job],
  made_from: Mapping[str, Any],
) -> dict[str, Any]:
  return {
    **made_from,
    **problem.digests(),
    "tokenizer": config.tokenizer,
    "agent": dataclasses.asdict(config.agent),
    "search": dataclasses.asdict(config.search),
    "seed": config.seed,
    "episodes": len(jobs),
  }


def _open(out: pathlib.Path, identity: Mapping[str, Any]) -> None:
  """Raises ValueError if a folder is of something else."""
  path = out / _MADE_FROM
  text = json.dumps(identity, indent=2)
  if not path.exists():
    if out.exists() and any(out.iterdir()):
      raise ValueError(f"{out} holds something else; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text + "\n")
    return
  try:
    before = json.loads(path.read_bytes())
  except ValueError as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  now = json.loads(text)
  if before != now:
    before = before if isinstance(before, dict) else {}
    changed = [k for k in {**before, **now} if before.get(k) != now.get(k)]
    raise ValueError(
      f"{out} was made with another {', '.join(sorted(changed))}; go on"
      " with the same or name another folder"
    )
