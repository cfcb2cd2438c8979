"""Launches runs with XManager: processes as jobs, values of a sweep as runs.

  python -m launch.xm_train --config.cluster.actors=2 \
    --sweep=config.rl.optimizer.learning_rate=1e-3,1e-4

Each role of a run is a job of its work unit's JobGroup. --dry_run prints them;
only a launch needs `pip install 'arl-jax[xm]'`. docs/cluster.md says more.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from typing import Any

from absl import flags
from ml_collections import config_flags

from arl_jax.runtime.config import Config
from launch import command
from launch.xm_jobs import Run, jobs, requirements, sweep

_CONFIG = config_flags.DEFINE_config_file("config")
_SWEEP = flags.DEFINE_multi_string(
  "sweep", [], "FIELD=VALUE,...: a run for each; of several, for each pair."
)
_EXECUTOR = flags.DEFINE_enum(
  "executor", "local", ["local", "kubernetes"], "Of XManager: xm_local's."
)
_IMAGE = flags.DEFINE_string(
  "image", "", "With kubernetes: whose entry point is Python with this package."
)
_REQUIREMENTS = flags.DEFINE_multi_string(
  "requirements", [], "With kubernetes: ROLE:RESOURCE=AMOUNT,... of XManager."
)
_TITLE = flags.DEFINE_string("title", "arl_jax", "Of the experiment.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the jobs, stop.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on from the last checkpoints.")


def jobs_of(run: Run, unit: str) -> dict[str, list[str]]:
  """See `jobs`. Args: unit: experiment and number, as in names of pods."""
  domain = f"{unit}-{{}}.experiments" if _EXECUTOR.value != "local" else ""
  return jobs(run, domain=domain, resume=_RESUME.value)


async def launch(runs: list[Run], program: str) -> None:
  """Starts all runs; on this machine, waits for them.

  Args:
    runs: of the experiment.
    program: that runs the jobs here.

  Raises:
    ValueError: XManager isn't installed.
    RuntimeError: a process failed.
  """
  try:
    from xmanager import xm, xm_local
  except ModuleNotFoundError as error:
    raise ValueError(
      f"{error}; pip install 'arl-jax[xm]', or look at the jobs with --dry_run"
    ) from error
  asked = requirements(_REQUIREMENTS.value)
  local = _EXECUTOR.value == "local"
  kind: Any = xm_local.Local if local else xm_local.Kubernetes
  spec: Any = xm.Container(_IMAGE.value)
  before: list[Any] = []
  if local:
    # A job is a command of a shell, which wouldn't hand on that it is to stop.
    spec = xm.Binary("/bin/true")
    before = [xm.ShellSafeArg("&& exec"), program]
  async with xm_local.create_experiment(_TITLE.value) as experiment:
    (executable,) = experiment.package([xm.Packageable(spec, kind.Spec())])
    units = []
    for number, run in enumerate(runs, 1):
      group = {}
      started = jobs_of(run, f"{experiment.experiment_id}-{number}")
      for name, arguments in started.items():
        needs = xm.JobRequirements(asked.get(name.partition("_")[0], {}))
        executor = kind(requirements=needs)
        args = [*before, *arguments]
        group[name] = xm.Job(executable, executor, name=name, args=args)
      units.append(await experiment.add(xm.JobGroup(**group)))
    if local:
      await asyncio.gather(*map(_follow, units))


async def _follow(unit: Any) -> None:
  """Asks a run's other processes to stop once its learner has ended."""
  # XManager itself waits for all jobs of a group together only.
  handles = {h.name: h for h in unit._local_execution_handles}
  try:
    await handles.pop("learner_0").wait()
  finally:
    for handle in handles.values():
      handle.terminate()


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
  if _EXECUTOR.value == "kubernetes" and not _IMAGE.value:
    raise ValueError("--executor=kubernetes needs an --image")
  if not isinstance(config := _CONFIG.value, Config):
    raise ValueError("--config must be of a run with RL, as quickstart.py's")
  path = config_flags.get_config_filename(flags.FLAGS["config"])
  ours = ("--config.", "--noconfig.", "-config.", "-noconfig.")
  given = [a for a in sys.argv[1:] if a.startswith(ours)]
  runs = sweep(_SWEEP.value, config, [f"--config={path}", *given])
  asked = requirements(_REQUIREMENTS.value)
  if not _DRY_RUN.value:
    asyncio.run(launch(runs, sys.executable))
    return
  for number, run in enumerate(runs, 1):
    print(f"work unit {number}:")
    for name, arguments in jobs_of(run, f"EXPERIMENT-{number}").items():
      needs = asked.get(name.partition("_")[0])
      print(f"  {name}{f' on {needs}' if needs else ''}:")
      print(f"    {shlex.join(['python', *arguments])}")


def run() -> None:
  command.run(main, Config(), "configs/quickstart.py")


if __name__ == "__main__":
  run()
