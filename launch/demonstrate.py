"""A chat model shows how a run's tasks are done, for its warm start.

  python -m launch.demonstrate --config=configs/search_smollm2.py \
    --teacher=http://10.0.0.7:8000 --model=my-model --out=runs/shown

The same command goes on after a kill. What comes out is learned with

  python -m launch.train --config=configs/search_smollm2.py \
    --config.warm_start.demonstrations=runs/shown --config.warm_start.filter
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence

from absl import flags
from ml_collections import config_flags

from arl_jax.actors.jobs import Job
from arl_jax.agents.teacher import Teacher
from arl_jax.data.trajectory_filter import filter_trajectories
from arl_jax.observability.progress import Progress
from arl_jax.problems.problem import Taught, make_problem
from arl_jax.runtime import demonstrations, warm_start
from arl_jax.runtime.config import Config
from arl_jax.serving.chat_endpoint import ChatEndpoint
from arl_jax.serving.config import read_token
from arl_jax.types import Group
from launch import command

_CONFIG = config_flags.DEFINE_config_file("config")
_TEACHER = flags.DEFINE_string(
  "teacher", "", "URL of an OpenAI-compatible endpoint that knows tools."
)
_MODEL = flags.DEFINE_string("model", "default", "Name that requests carry.")
_OUT = flags.DEFINE_string("out", "", "Folder to write, or to go on with.")
_TOKEN_FILE = flags.DEFINE_string("token_file", "", "Holds the URL's token.")
_CONCURRENCY = flags.DEFINE_integer("concurrency", 8, "Episodes at a time.")
_TIMEOUT = flags.DEFINE_float("timeout", 120.0, "Seconds for one answer.")
_MAX_TOKENS = flags.DEFINE_integer(
  "max_tokens", 2048, "Of the teacher's own, in an answer with its thoughts."
)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of the teacher.")


def main(argv: list[str]) -> None:
  """Raises ValueError or OSError for what can't be."""
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
  for name, value in (("teacher", _TEACHER.value), ("out", _OUT.value)):
    if not value:
      raise ValueError(f"--{name} is missing")
  config = _CONFIG.value
  if not isinstance(config, Config):
    raise ValueError("--config is no run of agents; it must give a Config")
  config.resolve()
  problem = _taught(config)
  should_stop = command.stop_on_signals("stopping; the same command goes on")
  with Progress() as progress:
    groups = asyncio.run(_record(config, problem, progress, should_stop))
  _report(groups)


def _taught(config: Config) -> Taught:
  problem = make_problem(config)
  if not isinstance(problem, Taught):
    raise ValueError(
      f"problem is {config.problem!r}, which makes a {type(problem).__name__}"
      " without `system` and `tools`, which a teacher must know"
    )
  return problem


async def _record(
  config: Config,
  problem: Taught,
  progress: Progress,
  should_stop: Callable[[], bool],
) -> list[Group]:
  jobs = warm_start.jobs(config, problem)
  chat = ChatEndpoint(
    _TEACHER.value,
    model=_MODEL.value,
    token=read_token(_TOKEN_FILE.value),
    concurrency=_CONCURRENCY.value,
    timeout=_TIMEOUT.value,
    max_tokens=_MAX_TOKENS.value,
    temperature=_TEMPERATURE.value,
  )

  def teacher(job: Job) -> Teacher:
    return Teacher(
      chat,
      problem.renderer,
      system=problem.system,
      question=job.task.prompt,
      tools=problem.tools,
    )

  async with chat:
    progress.phase("demonstrations", len(jobs))
    return await demonstrations.record(
      _OUT.value,
      jobs,
      problem,
      teacher,
      config,
      made_from={
        "teacher": _TEACHER.value,
        "model": _MODEL.value,
        "temperature": _TEMPERATURE.value,
      },
      concurrency=_CONCURRENCY.value,
      on_done=progress.update,
      should_stop=should_stop,
    )


def _report(groups: Sequence[Group]) -> None:
  episodes = [episode for group in groups for episode in group.episodes]
  stops = Counter(episode.stop_reason.value for episode in episodes)
  rewards = [float(reward) for group in groups for reward in group.rewards]
  print(
    f"{len(episodes)} episodes in {_OUT.value}: mean reward"
    f" {math.fsum(rewards) / len(rewards):.3f}; ended by {dict(stops)}"
  )
  try:
    kept = filter_trajectories(groups)
  except ValueError:
    # Rewards of other problems needn't have recalls.
    return
  print(
    f"warm_start.filter would keep {dict(kept.kept)}, not {dict(kept.dropped)}"
  )


def run() -> None:
  command.run(main, Config(), "configs/quickstart.py")


if __name__ == "__main__":
  run()
