"""Processes of a run on the nodes of a Ray cluster. Imports no jax."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from arl_jax.actors import config as actor_config
from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.signs import QueueSigns
from arl_jax.cluster.supervisor import Sign, processes_of
from arl_jax.queueing import ray_queue
from arl_jax.runtime.ray_host import Place, RoleHost, write_token
from arl_jax.serving.config import read_token

# Roles that others call, and who must know their address.
_CALLED = {
  "queue": ("learner", "server", "actor", "evaluator"),
  "server": ("actor",),
}
# Calls of a process at a time: each actor may wait for tasks and deliver some.
_CALLS = 10_000
_LAST_LINES = 10
# For a place, after which people are told what is waited for.
_PLACE_SECONDS = 30.0


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
  """Keeps Ray from replacing what SIGTERM does here."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


class RayHandle:
  """A process on some node; see `supervisor.Handle`.

  It starts its role once it is known where it is, as others must know.
  """

  def __init__(self, processes: RayProcesses, role: str, index: int, host: Any):
    """Takes over a `RoleHost` that runs nothing yet."""
    self.role, self.index, self.host = role, index, host
    self.resume = False
    self._processes = processes
    self._place: Any = host.place.remote(processes.places.get((role, index)))
    self._patient_until = time.monotonic() + _PLACE_SECONDS
    self._run: Any = None
    self._code: int | None = None
    self._lines = ""

  def poll(self) -> int | None:
    import ray

    if self._code is None:
      try:
        if self._run is None and self.find_place():
          self._run = self._processes.run(self)
        elif self._run is not None and ray.wait([self._run], timeout=0)[0]:
          self._end(*ray.get(self._run))
      except ray.exceptions.RayActorError as error:
        # Ray doesn't say by which signal.
        self._end(-signal.SIGKILL, str(error))
      except ray.exceptions.RayTaskError as error:
        self._end(1, f"error: {error.cause}")
    return self._code

  def find_place(self) -> bool:
    """Whether it is known where it is. Raises RayError if it has died."""
    import ray

    if self._place is not None and ray.wait([self._place], timeout=0)[0]:
      place, self._place = ray.get(self._place), None
      self._processes.placed(self, place)
    elif self._place is not None and time.monotonic() > self._patient_until:
      self._patient_until = math.inf
      logging.warning("still no place: %s", self._processes.no_room(self))
    return self._place is None

  def terminate(self) -> None:
    if self._run is None:
      self.kill()
    elif self._code is None:
      self.host.stop.remote()

  def kill(self, reason: str = "") -> None:
    """Args: reason: that `last_lines` gives instead of Ray's."""
    import ray

    if self._code is None:
      self._lines = self._lines or reason
      ray.kill(self.host)

  def last_lines(self) -> str:
    return self._lines

  def _end(self, code: int, lines: str) -> None:
    import ray

    self._code = code
    said = self._lines or lines
    self._lines = "\n".join(said.splitlines()[-_LAST_LINES:])
    # Its resources are for the next one.
    ray.kill(self.host)


class RayProcesses:
  """Starts roles on the nodes of a Ray cluster; see `supervisor.Processes`.

  A context manager. On entering, queue and servers get their places, and
  `cluster` their addresses. A process is started again where it was; if that
  node is gone, elsewhere, and those who must know its new address are started
  again. All processes end with the one that entered this.
  """

  def __init__(
    self,
    config: actor_config.ActorConfig,
    modules: Mapping[str, tuple[str, bool]],
    *,
    learner_flags: Sequence[str] = (),
  ):
    """Starts nothing yet.

    Args:
      config: resolved; its cluster's addresses will be set.
      modules: by role, the module whose `run` it is, and whether it gets all of
        the configuration, or an `ActorConfig`.
      learner_flags: of the first learner, such as "--overwrite".

    Raises:
      ValueError: Ray isn't installed, or addresses are set already.
      OSError: the token can't be read.
    """
    self.cluster = config.cluster
    if self.cluster.queue or self.cluster.replicas:
      raise ValueError(
        "cluster.queue and cluster.replicas must be empty with Ray, which finds"
        f" places for them; they are {self.cluster.queue!r} and"
        f" {self.cluster.replicas!r}"
      )
    try:
      importlib.import_module("ray")
    except ModuleNotFoundError as error:
      raise ValueError(
        "Ray isn't installed; pip install 'arl-jax[ray]'"
      ) from error
    self._config, self._modules = config, dict(modules)
    self._learner_flags = tuple(learner_flags)
    self._token = read_token(self.cluster.token_file)
    self._token = self._token or secrets.token_urlsafe(32)
    self.places: dict[tuple[str, int], Place] = {}
    self._ready: dict[tuple[str, int], RayHandle] = {}
    self._handles: list[RayHandle] = []

  def __enter__(self) -> RayProcesses:
    """Connects to Ray, and waits for places of queue and servers.

    Raises:
      TimeoutError: the cluster has no room for one of them.
      ConnectionError: there is no such cluster.
    """
    import ray

    address = self.cluster.ray.address or None
    options: dict[str, Any] = {}
    if address is None and "RAY_ADDRESS" not in os.environ:
      # A machine that is the run's alone: all that it asks for goes there.
      asked = [
        self.cluster.ray.resources(role).get("CPU", 0)
        for role, _ in processes_of(self.cluster)
      ]
      options["num_cpus"] = max(math.ceil(sum(asked)), os.cpu_count() or 1)
      options["include_dashboard"] = False
    with _own_signal_handlers():
      ray.init(
        address=address,
        namespace=f"arl-{secrets.token_hex(8)}",
        logging_level="WARNING",
        **options,
      )
    try:
      servers = [("server", i) for i in range(self.cluster.servers)]
      for role, index in [("queue", 0), *servers]:
        self._ready[role, index] = self._make(role, index)
      self._wait()
    except BaseException:
      ray.shutdown()
      raise
    # The supervisor asks the queue as well.
    self._folder = tempfile.TemporaryDirectory(prefix="arl-")
    self.cluster.token_file = write_token(self._folder.name, self._token)
    return self

  def __exit__(self, *_: Any) -> None:
    import ray

    ray.shutdown()
    self._folder.cleanup()

  def start(self, role: str, index: int, *, resume: bool) -> RayHandle:
    """See `supervisor.Processes`."""
    handle = self._ready.pop((role, index), None) or self._make(role, index)
    handle.resume = resume
    self._handles = [h for h in self._handles if h.poll() is None]
    self._handles.append(handle)
    return handle

  def placed(self, handle: RayHandle, place: Place) -> None:
    """Takes in where a process is, and tells those who must know."""
    key = handle.role, handle.index
    before = self.places.get(key)
    self.places[key] = place
    if before is None or before == place or handle.role not in _CALLED:
      return
    self._set_addresses()
    for other in self._handles:
      if other.role in _CALLED[handle.role] and other is not handle:
        other.kill(f"{handle.role}-{handle.index} moved to {place.url}")

  def run(self, handle: RayHandle) -> Any:
    """`ray.ObjectRef` of the exit code and last lines."""
    module, everything = self._modules[handle.role]
    config = dataclasses.asdict(self._config)
    if not everything:
      fields = dataclasses.fields(actor_config.ActorConfig)
      config = {field.name: config[field.name] for field in fields}
    options: dict[str, bool] = {}
    if handle.role == "learner":
      flags = self._learner_flags
      if handle.resume:
        flags = ("--resume", *(f for f in flags if f == "--fall_back"))
      names = ("resume", "overwrite", "fall_back")
      options = {name: f"--{name}" in flags for name in names}
    return handle.host.run.remote(
      handle.role, handle.index, module, config, self._token, options
    )

  def _make(self, role: str, index: int) -> RayHandle:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = self.cluster.ray.resources(role)
    options: dict[str, Any] = {
      "num_cpus": asked.pop("CPU", 0),
      "num_gpus": asked.pop("GPU", 0),
      "resources": asked,
      "max_restarts": 0,
      "max_concurrency": _CALLS,
    }
    if role == "queue":
      options["name"] = ray_queue.QUEUE
    if (place := self.places.get((role, index))) is not None:
      options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
        place.node, soft=True
      )
    try:
      host = ray.remote(RoleHost).options(**options).remote()
    except ValueError as error:  # The queue before still has its name.
      raise OSError(str(error)) from error
    return RayHandle(self, role, index, host)

  def _wait(self) -> None:
    """Until queue and servers have places."""
    import ray

    limit = time.monotonic() + self.cluster.patience
    waiting = list(self._ready.values())
    while waiting:
      try:
        waiting = [handle for handle in waiting if not handle.find_place()]
      except ray.exceptions.RayError as error:
        raise OSError(
          f"a process can't be started with Ray: {error}"
        ) from error
      if waiting and time.monotonic() > limit:
        reasons = "; ".join(self.no_room(handle) for handle in waiting)
        raise TimeoutError(f"waited {self.cluster.patience:.0f} s: {reasons}")
      time.sleep(0.05)
    self._set_addresses()

  def no_room(self, handle: RayHandle) -> str:
    """What a process asks for that nothing is free for."""
    import ray

    role = handle.role
    free, has = (
      {k: v for k, v in known.items() if ":" not in k and "memory" not in k}
      for known in (ray.available_resources(), ray.cluster_resources())
    )
    return (
      f"Ray has no node for {role}-{handle.index}, for which cluster.ray.{role}"
      f" asks {getattr(self.cluster.ray, role)!r}; all nodes have {has}, of"
      f" which {free} is free"
    )

  def _set_addresses(self) -> None:
    self.cluster.queue = self.places["queue", 0].url
    servers = range(self.cluster.servers)
    urls = [self.places["server", i].url for i in servers]
    self.cluster.replicas = ",".join(urls)


class RaySigns:
  """Asks the queue wherever it is now; see `supervisor.Signs`."""

  def __init__(self, cluster: ClusterConfig):
    """Args: cluster: that of a `RayProcesses` that is entered."""
    self._cluster, self._url = cluster, ""
    self._signs: QueueSigns | None = None

  def __enter__(self) -> RaySigns:
    return self

  def __exit__(self, *error: Any) -> None:
    if self._signs is not None:
      self._signs.__exit__(*error)

  def look(self) -> list[Sign] | None:
    """See `QueueSigns.look`."""
    if self._signs is None or self._url != self._cluster.queue:
      self.__exit__(None, None, None)
      self._url = self._cluster.queue
      self._signs = QueueSigns(self._cluster)
    return self._signs.look()
