"""A run without a model: real processes, supervised, that do as files say.

python -m tests.cluster.tiny_run --role=... is one of its processes;
python -m tests.cluster.tiny_run FOLDER is their supervisor. What happens lies
in FOLDER (see `world`).
"""

import os
import pathlib
import sys

from arl_jax.actors.config import ActorConfig
from arl_jax.cluster.local_processes import LocalProcesses
from arl_jax.cluster.signs import QueueSigns
from arl_jax.cluster.supervisor import Supervisor
from launch import command, role

_HERE = "tests.cluster.tiny_run"
_ROLES = {
  "queue": role.Role("arl_jax.queueing.service", False),
  "learner": role.Role(f"{_HERE}.learner", False),
  "actor": role.Role(f"{_HERE}.actor", False),
  "server": role.Role(f"{_HERE}.server", False),
}


def _supervise(argv: list[str]) -> None:
  folder = pathlib.Path(argv[1])
  should_stop = command.stop_on_signals("stopping all")
  config: ActorConfig = role.read_config(folder / "config.json", jax=False)
  with QueueSigns(config.cluster) as signs:
    processes = LocalProcesses(
      folder / "config.json",
      folder / "logs",
      learner_flags=argv[2:],
      program=("-m", _HERE),
    )
    supervisor = Supervisor(
      processes,
      config.cluster,
      signs,
      opened=(folder / "opened").exists,
      should_stop=should_stop,
    )
    sys.exit(supervisor.run())


def main(argv: list[str]) -> None:
  if argv[1].startswith("--"):
    seconds = float(os.environ.get("TINY_ORPHAN_SECONDS", "2"))
    role.main(argv, _ROLES, orphan_seconds=seconds)
  else:
    _supervise(argv)


if __name__ == "__main__":
  role.run(main)
