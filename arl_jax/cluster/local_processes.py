"""Processes of a run on this machine. Imports no jax."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from arl_jax.cluster.config import ClusterConfig
from arl_jax.serving.config import is_loopback

# Of what a process printed last, as far as it is shown.
_LAST_BYTES, _LAST_LINES = 4096, 10
# Below the ports that the system gives to connections: one of those could have
# the port of a process that is just being started again.
_PORTS = range(10000, 32768)


class LocalProcesses:
  """Starts `launch.role` here; see `supervisor.Processes`.

  Each process leads a session of its own, so that Ctrl-C reaches the supervisor
  alone, and holds the end of a pipe, by which it learns that the supervisor is
  gone. The learner's first process prints where the supervisor does; each other
  process appends to a file of its own.
  """

  def __init__(
    self,
    config_json: pathlib.Path,
    logs: pathlib.Path,
    *,
    learner_flags: Sequence[str] = (),
    program: Sequence[str] = ("-m", "launch.role"),
  ):
    """Starts nothing yet.

    Args:
      config_json: file with the resolved configuration.
      logs: folder, made if need be, of `<role>-<index>.log`.
      learner_flags: of `launch.role` for a learner, such as "--overwrite".
      program: arguments of Python.
    """
    self._config_json, self._logs = config_json, logs
    self._learner_flags, self._program = tuple(learner_flags), tuple(program)

  def start(self, role: str, index: int, *, resume: bool) -> LocalHandle:
    """See `supervisor.Processes`."""
    command = [
      *(sys.executable, *self._program),
      *(f"--role={role}", f"--index={index}"),
      *(f"--config_json={self._config_json}", "--supervised"),
    ]
    # The others hear from the first how it opened the run.
    if (role, index) == ("learner", 0):
      flags = self._learner_flags
      if resume:
        flags = ("--resume", *(f for f in flags if f == "--fall_back"))
      return LocalHandle(_popen([*command, *flags], None), None, 0)
    self._logs.mkdir(parents=True, exist_ok=True)
    path = self._logs / f"{role}-{index}.log"
    with open(path, "ab") as log:
      log.write(f"-- started {time.strftime('%F %T')}\n".encode())
      log.flush()
      return LocalHandle(_popen(command, log.fileno()), path, log.tell())


def _popen(command: Sequence[str], output: int | None) -> subprocess.Popen:
  return subprocess.Popen(
    command,
    stdin=subprocess.PIPE,
    stdout=output,
    stderr=output,
    start_new_session=True,
  )


class LocalHandle:
  """A process and its session; see `supervisor.Handle`."""

  def __init__(
    self, process: subprocess.Popen, log: pathlib.Path | None, offset: int
  ):
    """Takes over a process that leads a session.

    Args:
      process: with a pipe as its standard input.
      log: that it prints to.
      offset: bytes of the log that are older.
    """
    self._process, self._log, self._offset = process, log, offset

  @property
  def pid(self) -> int:
    return self._process.pid

  def poll(self) -> int | None:
    if self._process.returncode is None and self._process.poll() is not None:
      # What it had started, such as environment workers, goes with it.
      self._signal_group(signal.SIGKILL)
      if self._process.stdin is not None:
        self._process.stdin.close()
    return self._process.returncode

  def terminate(self) -> None:
    self._process.terminate()

  def kill(self) -> None:
    if self._process.returncode is None:
      self._signal_group(signal.SIGKILL)

  def last_lines(self) -> str:
    if self._log is None:
      return ""
    try:
      with open(self._log, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(self._offset, end - _LAST_BYTES))
        text = file.read(_LAST_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
      return f"{self._log} can't be read: {error.strerror}"
    # Others' words may be in it, and escape sequences move the cursor.
    lines = [
      "".join(c for c in line if c.isprintable())
      for line in text.splitlines()[-_LAST_LINES:]
    ]
    return "\n".join([*lines, f"(from {self._log})"] if lines else [])

  def _signal_group(self, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, number)


def assign_addresses(cluster: ClusterConfig) -> None:
  """Gives those of one machine who listen free ports, if need be.

  Raises:
    ValueError: there are addresses, but not one for each server.
    OSError: no port is free.
  """
  urls = cluster.replica_urls
  if urls and len(urls) != cluster.servers:
    raise ValueError(
      f"cluster.replicas has {len(urls)} addresses for cluster.servers"
      f" {cluster.servers}; give one for each, or none"
    )
  host = cluster.host if is_loopback(cluster.host) else "127.0.0.1"
  coordinated = cluster.learners > 1 and not cluster.coordinator
  replicas_of_hosts = 0
  if cluster.server_hosts > 1 and not cluster.replica_coordinators:
    replicas_of_hosts = cluster.servers
  count = (0 if cluster.queue else 1) + (0 if urls else cluster.servers)
  count += coordinated + replicas_of_hosts
  ports = _free_ports(host, count)
  base = f"http://[{host}]" if ":" in host else f"http://{host}"
  if not cluster.queue:
    cluster.queue = f"{base}:{ports.pop()}"
  if coordinated:
    cluster.coordinator = f"{base.removeprefix('http://')}:{ports.pop()}"
  if replicas_of_hosts:
    cluster.server_coordinators = ",".join(
      f"{base.removeprefix('http://')}:{ports.pop()}"
      for _ in range(replicas_of_hosts)
    )
  if not urls:
    cluster.replicas = ",".join(f"{base}:{port}" for port in ports)


def _free_ports(host: str, count: int) -> list[int]:
  """Distinct ports that nobody listens at."""
  found: list[int] = []
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  for port in random.SystemRandom().sample(_PORTS, 200 + 10 * count):
    if len(found) == count:
      break
    with socket.socket(family, socket.SOCK_STREAM) as listener:
      try:
        listener.bind((host, port))
      except OSError:
        continue
    found.append(port)
  if len(found) < count:
    raise OSError(
      f"found {len(found)} free ports of {host}, not {count}; set cluster.queue"
      " and cluster.replicas"
    )
  return found
