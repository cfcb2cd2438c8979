"""Trains an agent: warm start, evaluation, RL, evaluation, report.

python -m launch.train --config=configs/quickstart.py --config.rl.steps=20
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Callable

from absl import flags
from ml_collections import config_flags

from arl_jax.evaluation import suites
from arl_jax.evaluation.experiment import run_experiment
from arl_jax.observability.progress import Progress
from arl_jax.observability.run_directory import Mode, RunDirectory
from arl_jax.runtime.config import Config
from arl_jax.runtime.problem import SearchProblem
from launch import command

_CONFIG = config_flags.DEFINE_config_file("config")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the configuration, stop.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on from the last checkpoint.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Empty the run directory.")

# Fields that may differ when a run goes on.
_MUTABLE = ("rl.steps", "checkpoint_every", "keep_checkpoints")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
  config = _CONFIG.value
  config.resolve()
  resolved = dataclasses.asdict(config)
  if _DRY_RUN.value:
    print(json.dumps(resolved, indent=2))
    return
  if _RESUME.value and _OVERWRITE.value:
    raise ValueError("--resume and --overwrite exclude each other")
  # A run may be moved: where it lies is not part of what it is.
  del resolved["run_dir"]
  mode: Mode = "new"
  if _RESUME.value or _OVERWRITE.value:
    mode = "resume" if _RESUME.value else "overwrite"
  should_stop = _stop_on_signals()
  with Progress() as progress:
    progress.phase("corpus and tasks", 1)
    # Before the folder is touched: a corpus that can't be used costs nothing.
    problem = SearchProblem(config)
    progress.update(1, chunks=len(problem.corpus.chunks))
    with RunDirectory.open(
      config.run_dir,
      config=resolved,
      data=problem.digests(),
      mode=mode,
      mutable_on_resume=_MUTABLE,
    ) as run:
      summary = run_experiment(
        config, problem, run, progress, should_stop=should_stop
      )
  print(suites.table(summary))
  print(f"report: {config.run_dir}/report.html")


def _stop_on_signals() -> Callable[[], bool]:
  """The first Ctrl-C or SIGTERM asks the run to stop; a second one ends it."""
  asked: list[int] = []

  def ask(number: int, _: object) -> None:
    if asked:
      raise KeyboardInterrupt
    asked.append(number)
    print("\nstopping after this step; again to stop at once", file=sys.stderr)

  signal.signal(signal.SIGINT, ask)
  signal.signal(signal.SIGTERM, ask)
  return lambda: bool(asked)


def run() -> None:
  command.run(main, Config(), "configs/quickstart.py")


if __name__ == "__main__":
  run()
