"""A run in many processes: all of them from here, or one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NoReturn

from arl_jax.cluster.local_processes import LocalProcesses, assign_addresses
from arl_jax.cluster.signs import QueueSigns
from arl_jax.cluster.supervisor import (
  Processes,
  Signs,
  Supervisor,
  processes_of,
)
from arl_jax.runtime.config import Config
from launch.role import ROLES


def run_all(
  config: Config,
  engine: str,
  learner_flags: Sequence[str],
  should_stop: Callable[[], bool],
) -> int:
  """Runs all processes of a run until its learner is done.

  Args:
    config: resolved; queue and servers get addresses if they have none.
    engine: one of `ENGINES`.
    learner_flags: of `launch.role`, such as "--resume".
    should_stop: asked several times a second.

  Returns:
    The exit code (see `Supervisor.run`).

  Raises:
    ValueError: the run can't be started this way.
    OSError: likewise.
  """
  with contextlib.ExitStack() as stack:
    opened = _opened(config.run_dir)
    processes, signs = _ENGINES[engine](config, learner_flags, stack)
    print(f"queue at {config.cluster.queue}", file=sys.stderr)
    supervisor = Supervisor(
      processes, config.cluster, signs, opened=opened, should_stop=should_stop
    )
    return supervisor.run()


def _local(
  config: Config, learner_flags: Sequence[str], stack: contextlib.ExitStack
) -> tuple[Processes, Signs]:
  assign_addresses(config.cluster)
  folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="arl-"))
  path = pathlib.Path(folder) / "config.json"
  path.write_text(json.dumps(dataclasses.asdict(config)))
  # Beside the run's folder, which belongs to the learner.
  logs = pathlib.Path(f"{config.run_dir.rstrip('/')}.logs")
  print(f"processes other than the learner print to {logs}", file=sys.stderr)
  signs = stack.enter_context(QueueSigns(config.cluster))
  return LocalProcesses(path, logs, learner_flags=learner_flags), signs


def _ray(
  config: Config, learner_flags: Sequence[str], stack: contextlib.ExitStack
) -> tuple[Processes, Signs]:
  # Few have Ray.
  from arl_jax.runtime.ray_cluster import RayProcesses, RaySigns

  for name in ("learners", "server_hosts"):
    if getattr(config.cluster, name) > 1:
      raise ValueError(
        f"cluster.{name} is {getattr(config.cluster, name)}; with Ray it must"
        " be 1"
      )
  processes = RayProcesses(config, ROLES, learner_flags=learner_flags)
  stack.enter_context(processes)
  return processes, stack.enter_context(RaySigns(config.cluster))


_ENGINES = {"local": _local, "ray": _ray}
ENGINES = tuple(_ENGINES)


def _opened(run_dir: str) -> Callable[[], bool]:
  """Whether a learner has opened the run's folder since this call."""
  path = pathlib.Path(run_dir) / "config.json"

  def stamp() -> tuple[int, int] | None:
    try:
      status = path.stat()
    except OSError:
      return None
    return status.st_ino, status.st_mtime_ns

  before = stamp()
  return lambda: stamp() not in (None, before)


def become(
  config: Config, role: str, index: int, learner_flags: Sequence[str]
) -> NoReturn:
  """Replaces this process by one role of a run whose others are elsewhere.

  Args:
    config: resolved, with the addresses of queue and servers.
    role: "queue", "learner", "server", "actor" or "evaluator".
    index: of the process among those of its role.
    learner_flags: of `launch.role`, such as "--resume".

  Raises:
    ValueError: an address is missing, or the run has no such process.
  """
  cluster = config.cluster
  if not cluster.queue:
    raise ValueError(
      f"cluster.queue is empty; --role={role} needs the address of the run's"
      " queue, such as http://10.0.0.7:7000"
    )
  if role in ("server", "actor") and (
    len(cluster.replica_urls) != cluster.servers
  ):
    raise ValueError(
      f"cluster.replicas has {len(cluster.replica_urls)} addresses for"
      f" cluster.servers {cluster.servers}; --role={role} needs all of them"
    )
  if role == "learner" and cluster.learners > 1 and not cluster.coordinator:
    raise ValueError(
      "cluster.coordinator is empty; --role=learner needs the address of the"
      " first learner's host, such as 10.0.0.8:7001"
    )
  if (
    role == "server"
    and cluster.server_hosts > 1
    and not cluster.replica_coordinators
  ):
    raise ValueError(
      "cluster.server_coordinators is empty; --role=server needs an address of"
      " each replica's first host, such as 10.0.0.8:7001"
    )
  if (role, index) not in processes_of(cluster):
    count = sum(r == role for r, _ in processes_of(cluster))
    raise ValueError(
      f"--index={index} of --role={role} is none of the {count} that the"
      " configuration's cluster has"
    )
  # A file without a name, which nobody has to remove.
  file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - stays open in `execv`
  json.dump(dataclasses.asdict(config), file)
  file.flush()
  file.seek(0)
  os.set_inheritable(file.fileno(), True)
  arguments = [
    *(sys.executable, "-m", "launch.role", f"--role={role}"),
    *(f"--index={index}", f"--config_json=/dev/fd/{file.fileno()}"),
    *(learner_flags if role == "learner" else ()),
  ]
  sys.stdout.flush()
  sys.stderr.flush()
  os.execv(sys.executable, arguments)
