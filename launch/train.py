"""Trains an agent: warm start, evaluation, RL, evaluation, report.

python -m launch.train --config=configs/quickstart.py --config.rl.steps=20
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable

from absl import app, flags, logging
from ml_collections import config_flags

from arl_jax.evaluation.experiment import run_experiment
from arl_jax.observability.progress import Progress
from arl_jax.observability.run_directory import Mode, RunDirectory
from arl_jax.runtime.actor import Interrupted
from arl_jax.runtime.problem import SearchProblem

_CONFIG = config_flags.DEFINE_config_file("config", "configs/quickstart.py")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the configuration, stop.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on from the last checkpoint.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Empty the run directory.")

# Fields that may differ when a run goes on.
_MUTABLE = ("run_dir", "rl.steps", "checkpoint_every", "keep_checkpoints")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  config = _CONFIG.value
  config.resolve()
  resolved = dataclasses.asdict(config)
  if _DRY_RUN.value:
    print(json.dumps(resolved, indent=2))
    return
  if _RESUME.value and _OVERWRITE.value:
    raise app.UsageError("--resume and --overwrite exclude each other")
  mode: Mode = "new"
  if _RESUME.value or _OVERWRITE.value:
    mode = "resume" if _RESUME.value else "overwrite"
  should_stop = _stop_on_signals()
  with (
    RunDirectory.open(
      config.run_dir, config=resolved, mode=mode, mutable_on_resume=_MUTABLE
    ) as run,
    Progress() as progress,
  ):
    progress.phase("corpus and tasks", 1)
    problem = SearchProblem(config)
    run.record_data(problem.digests())
    progress.update(1, chunks=len(problem.corpus.chunks))
    summary = run_experiment(
      config, problem, run, progress, should_stop=should_stop
    )
  _show(summary, config.run_dir)


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


def _show(summary: dict, run_dir: str) -> None:
  print(f"\n{'held-out':22}{'before RL':>26}{'after RL':>26}")
  for metric, before in summary["before"].items():
    cells = []
    for mean, low, high in (before, summary["after"][metric]):
      known = mean is not None
      cells.append(f"{mean:.3f} [{low:.3f}, {high:.3f}]" if known else "none")
    print(f"{metric:22}{cells[0]:>26}{cells[1]:>26}")
  mean, low, high = summary["paired_reward_difference"]
  print(f"\npaired reward difference {mean:.3f} [{low:.3f}, {high:.3f}]")
  print(f"report: {run_dir}/report.html")


def run() -> None:
  """Entry point: known errors are one line and an exit code, no traceback."""
  logging.set_verbosity(logging.WARNING)
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

  def guarded(argv: list[str]) -> None:
    try:
      main(argv)
    except Interrupted:
      print("stopped at a checkpoint; go on with --resume", file=sys.stderr)
      sys.exit(130)
    except (ValueError, OSError) as error:
      print(f"error: {error}", file=sys.stderr)
      sys.exit(1)

  app.run(guarded)


if __name__ == "__main__":
  run()
