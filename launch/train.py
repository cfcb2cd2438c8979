"""Trains an agent: warm start, evaluation, RL, evaluation, report.

  python -m launch.train --config=configs/quickstart.py --config.rl.steps=20

or a policy on files of conversations or recorded groups:

  python -m launch.train --config=configs/sft_tiny.py

With actors, an agent is trained by many processes, of which it is the
supervisor; on several machines, each process is started by its role:

  python -m launch.train --config.cluster.actors=2
  python -m launch.train --config.cluster.actors=2 --role=actor --index=1 \
    --config.cluster.queue=http://10.0.0.7:7000 \
    --config.cluster.replicas=http://10.0.0.8:8000
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import NoReturn

from absl import flags
from ml_collections import config_flags

from arl_jax.evaluation.run_record import report
from arl_jax.observability.progress import Progress
from arl_jax.runtime.config import MODES, Config
from arl_jax.runtime.offline import (
  Data,
  OfflineTrainer,
  check_export,
  make_learner,
)
from arl_jax.runtime.offline_config import OfflineConfig
from arl_jax.runtime.pod_config import PodConfig
from launch import command, learner_role, supervise

_CONFIG = config_flags.DEFINE_config_file("config")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the configuration, stop.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on from the last checkpoint.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Empty the run directory.")

_FALL_BACK = flags.DEFINE_bool(
  "fall_back", False, "With --resume: an earlier checkpoint will do."
)
_ROLE = flags.DEFINE_enum(
  "role",
  "all",
  ["all", "learner", "actor", "server", "evaluator", "queue"],
  "What this process does of a run with --config.cluster.actors.",
)
_MODE = flags.DEFINE_enum("mode", None, MODES, "As --config.mode.")
_INDEX = flags.DEFINE_integer(
  "index", 0, "Of the process in its role.", lower_bound=0
)
_ENGINE = flags.DEFINE_enum(
  "engine", "local", supervise.ENGINES, "What starts the processes of a run."
)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
  config = _CONFIG.value
  if isinstance(config, PodConfig):
    raise ValueError(
      "--config describes a pod, which launch.compile takes; a run's begins"
      " with Config or OfflineConfig"
    )
  if _MODE.value is not None:
    if not isinstance(config, Config):
      raise ValueError(f"--mode={_MODE.value} is for runs of agents")
    config.mode = _MODE.value
  config.resolve()
  if _DRY_RUN.value:
    print(json.dumps(dataclasses.asdict(config), indent=2))
    return
  mode = learner_role.open_mode(_RESUME.value, _OVERWRITE.value)
  if _INDEX.value and _ROLE.value == "all":
    raise ValueError(f"--index={_INDEX.value} is of a process; name its --role")
  if isinstance(config, Config) and config.cluster.actors:
    _in_many_processes(config)
  if _ROLE.value != "all" or _ENGINE.value != "local":
    raise ValueError(
      f"--role={_ROLE.value} --engine={_ENGINE.value} is for runs of agents in"
      " many processes; set config.cluster.actors, or leave both out"
    )
  should_stop = command.stop_on_signals()
  with Progress() as progress:
    if isinstance(config, OfflineConfig):
      print(_train_offline(config, progress, should_stop))
    else:
      print(
        learner_role.train(
          config,
          progress,
          should_stop,
          mode=mode,
          fall_back=_FALL_BACK.value,
        )
      )


def _in_many_processes(config: Config) -> NoReturn:
  """Is one of a run's processes, or the supervisor of all."""
  given = {
    "--resume": _RESUME.value,
    "--overwrite": _OVERWRITE.value,
    "--fall_back": _FALL_BACK.value,
  }
  learner_flags = [flag for flag, value in given.items() if value]
  if _ROLE.value != "all":
    supervise.become(config, _ROLE.value, _INDEX.value, learner_flags)
  should_stop = command.stop_on_signals("stopping the learner, then the others")
  sys.exit(supervise.run_all(config, _ENGINE.value, learner_flags, should_stop))


def _train_offline(
  config: OfflineConfig, progress: Progress, should_stop: Callable[[], bool]
) -> str:
  # Before the folder is touched: what can't be trained costs nothing.
  if not _RESUME.value and not _inside(config.export, config.run_dir):
    check_export(config)
  data = Data(config)
  learner = make_learner(config, data)
  mode = learner_role.open_mode(_RESUME.value, _OVERWRITE.value)
  with learner_role.open_run(config, data.digests, mode) as run:
    trainer = OfflineTrainer(
      config,
      data,
      learner,
      run,
      progress,
      should_stop=should_stop,
      fall_back=_FALL_BACK.value,
    )
    try:
      values = trainer.train()
    finally:
      trainer.close()
    run.write_json("summary.json", values)
    report(run.path)
  shown = (f"  {name} {value:.4g}" for name, value in sorted(values.items()))
  return "\n".join(
    ["last update:", *shown, f"report: {config.run_dir}/report.html"]
  )


def _inside(path: str, folder: str) -> bool:
  """Whether `path` lies in a folder that --overwrite empties."""
  inner, outer = pathlib.Path(path).resolve(), pathlib.Path(folder).resolve()
  return _OVERWRITE.value and outer in inner.parents


def run() -> None:
  command.run(main, Config(), "configs/quickstart.py")


if __name__ == "__main__":
  run()
