"""Several processes, each with a host's devices, as a `jax.distributed` job."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any, Self

import jax
from jax._src import distributed

from arl_jax.cluster.config import ClusterConfig
from arl_jax.observability import provenance
from arl_jax.serving.config import is_loopback
from arl_jax.serving.listening import listen

_DEADLINE, _MISSING = "DEADLINE_EXCEEDED", "NOT_FOUND"


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
  """One process of a job, and how messages call it.

  Attributes:
    job: as "the learner".
    naming: of its processes, as "learner {}".
    index: of the process in the job.
    count: of the job's processes.
    field: that says how many there are.
    coordinator: where the first one has the others find it.
    coordinator_field: that says so.
  """

  job: str
  naming: str
  index: int
  count: int
  field: str
  coordinator: str
  coordinator_field: str

  def name(self, index: int) -> str:
    """Of any process of the job."""
    return self.naming.format(index)

  @property
  def host(self) -> str:
    """That the first process is found at."""
    return urllib.parse.urlsplit(f"//{self.coordinator}").hostname or ""


class JobHosts:
  """All processes of a job, as one of them sees it.

  A context manager that joins and leaves; with one process nothing is joined.

  Attributes:
    index: of this process in the job.
    count: of the job's processes.
  """

  def __init__(self, member: Member, cluster: ClusterConfig, mesh_field: str):
    """Connects to nothing yet.

    Args:
      member: this process.
      cluster: of the run.
      mesh_field: that the job's mesh is made from.
    """
    self.index, self.count = member.index, member.count
    self._member, self._cluster = member, cluster
    self._mesh_field = mesh_field
    self._board = Board()

  @property
  def first(self) -> bool:
    """Whether this is the job's first process."""
    return self.index == 0

  def __enter__(self) -> Self:
    """Joins the others; ends the process if they don't come in time.

    Raises:
      ValueError: the accelerators' own order of hosts is another one.
    """
    if self.count > 1:
      join(self._member, self._cluster)
    return self

  def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
    if self.count > 1:
      self._end(error)

  def _end(self, error: BaseException | None) -> None:
    """Ends what `__enter__` began; only of several processes."""
    del error
    leave()

  def check(self, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError if a process has no device of the job's mesh."""
    member = self._member
    there = {device.process_index for device in mesh.devices.flat}
    for index in range(self.count):
      if index not in there:
        raise ValueError(
          f"{self._mesh_field} has no device of {member.name(index)}, of"
          f" {member.field} {self.count}: it has {mesh.size} of"
          f" {len(jax.devices())}; with an axis of -1 it takes all"
        )


def join(member: Member, cluster: ClusterConfig) -> None:
  """Joins the others; ends the process if they don't come in time.

  If one of them dies later, `jax.distributed` ends the others within
  `cluster.lost_seconds`, at least 10.

  Raises:
    ValueError: the others can't reach the first one where it listens, or the
      accelerators' own order of hosts is another one.
    OSError: something else has the first one's address.
  """
  index, count = member.index, member.count
  if index == 0:
    _check_address(member, cluster)
  seconds = math.ceil(cluster.patience)
  # What ends the process if nobody comes doesn't name what was waited for.
  print(
    f"{member.name(index)} waits up to {seconds} s for all {count} processes of"
    f" {member.job}, the first of them at {member.coordinator}",
    file=sys.stderr,
    flush=True,
  )
  # It would take SIGTERM away from this program, which ends in order.
  jax.config.update("jax_enable_preemption_service", False)
  patience = math.ceil(max(cluster.lost_seconds, 10.0))
  with _default_signals():
    jax.distributed.initialize(
      member.coordinator,
      count,
      index,
      initialization_timeout=seconds,
      heartbeat_timeout_seconds=patience,
      shutdown_timeout_seconds=patience,
      coordinator_bind_address=_bind_address(member, cluster),
      cluster_detection_method="deactivate",
    )
  if (jax.process_index(), jax.process_count()) != (index, count):
    raise ValueError(
      f"this is {member.name(index)}, of {member.field} {count}, but by its"
      f" accelerators this host is {jax.process_index()} of"
      f" {jax.process_count()}; start it as that one"
    )


def _check_address(member: Member, cluster: ClusterConfig) -> None:
  """That the coordinator, who says nothing of it, can listen and be reached."""
  host = bind_host(member, cluster)
  if is_loopback(host) and not is_loopback(member.host):
    raise ValueError(
      f"cluster.host is {host!r}, where nobody else can reach this process;"
      f" {member.coordinator_field} {member.coordinator} needs the address of"
      " an interface, or 0.0.0.0"
    )
  # Coordinators may share a port, and processes of one job would join another.
  listen(host, _port(member), member.coordinator_field).close()


@contextlib.contextmanager
def _default_signals() -> Iterator[None]:
  """Signals end the process at once: nothing else ends a wait in C++."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  numbers = (signal.SIGTERM, signal.SIGINT)
  before = [(n, signal.signal(n, signal.SIG_DFL)) for n in numbers]
  try:
    yield
  finally:
    for number, handler in before:
      # None is one that Python doesn't know, and can't set again.
      if handler is not None:
        signal.signal(number, handler)


def leave() -> None:
  """Leaves the job, together with the others."""
  jax.distributed.shutdown()


def bind_host(member: Member, cluster: ClusterConfig) -> str:
  """Where the first process listens."""
  return member.host if is_loopback(member.host) else cluster.host


def _port(member: Member) -> int:
  return urllib.parse.urlsplit(f"//{member.coordinator}").port or 0


def _bind_address(member: Member, cluster: ClusterConfig) -> str:
  host = bind_host(member, cluster)
  port = _port(member)
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def refuse_other(there: Any, here: Any, name: str) -> None:
  """Raises ValueError if a process isn't started as the first one is.

  Args:
    there: what that one was made from, nested; JSON values.
    here: the same of this one.
    name: of this one.
  """
  if fields := provenance.differences(there, here):
    raise ValueError(
      f"{name} isn't started as the first one is:"
      f" {provenance.describe(there, here, fields)}"
    )


class Board:
  """Where processes of a job leave short texts for each other, by name."""

  @property
  def _client(self) -> Any:
    return distributed.global_state.client

  def put(self, name: str, text: str) -> None:
    self._client.key_value_set(name, text, allow_overwrite=True)

  def remove(self, name: str) -> None:
    self._client.key_value_delete(name)

  def look(self, name: str, seconds: float = 0.0) -> str | None:
    """What a text is, None if there is none within some seconds."""
    try:
      if seconds:
        return self._client.blocking_key_value_get(name, int(1000 * seconds))
      return self._client.key_value_try_get(name)
    except jax.errors.JaxRuntimeError as error:
      if not str(error).startswith((_DEADLINE, _MISSING)):
        raise
    return None
