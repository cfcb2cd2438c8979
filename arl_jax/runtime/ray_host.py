"""The process of a role that Ray started. Imports no jax."""

from __future__ import annotations

import asyncio
import functools
import importlib
import pathlib
import random
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from arl_jax.actors import config as actor_config
from arl_jax.actors.jobs import Interrupted
from arl_jax.queueing import ray_queue
from arl_jax.queueing.service import address

# Below the ports that the system gives to connections.
_PORTS = range(10000, 32768)
_LAST_LINES = 10


class Place(NamedTuple):
  """Where a process is: its node's id and address, and a port that is free."""

  node: str
  ip: str
  port: int

  @property
  def url(self) -> str:
    host = f"[{self.ip}]" if ":" in self.ip else self.ip
    return f"http://{host}:{self.port}"


class RoleHost:
  """A Ray actor whose process is one of a run's.

  The role runs in a thread, so that the process can be asked to stop, and for
  the groups that it has rolled out, meanwhile.
  """

  def __init__(self):
    """Runs nothing yet."""
    import ray

    context = ray.get_runtime_context()
    self._node = context.get_node_id()
    self._ip = ray.util.get_node_ip_address()
    self._stop = threading.Event()
    self._host = ray_queue.Host(context.current_actor)
    ray_queue.set_host(self._host)
    self._service: ray_queue.RayQueueService | None = None
    self._loop: asyncio.AbstractEventLoop | None = None

  async def place(self, before: Place | None) -> Place:
    """Where this process is; with the port from before on the same node."""
    if before is not None and before.node == self._node:
      return before
    return Place(self._node, self._ip, _free_port(self._ip))

  async def run(
    self,
    role: str,
    index: int,
    module: str,
    config: Mapping[str, Any],
    token: str,
    options: Mapping[str, bool],
  ) -> tuple[int, str]:
    """Runs the role to its end; its exit code, and what an error says."""
    cls: Any = actor_config.ActorConfig
    if "run_dir" in config:
      cls = importlib.import_module("arl_jax.runtime.config").Config
    made = actor_config.from_json(cls, config)
    made.cluster.host = self._ip
    with tempfile.TemporaryDirectory(prefix="arl-") as folder:
      made.cluster.token_file = write_token(folder, token)
      if role == "queue":
        work = functools.partial(self._serve_queue, made)
      else:
        loaded = importlib.import_module(module)
        work = functools.partial(
          loaded.run, made, index, self._stop.is_set, **options
        )
      return await asyncio.to_thread(_outcome, work)

  async def stop(self) -> None:
    """Asks the role to stop."""
    self._stop.set()

  async def hand_over(self, key: str) -> Any:
    return self._host.hand_over(key)

  async def call(self, method: str, *values: Any) -> Any:
    """What the queue says (see `RayQueueService`); only of its process.

    Raises:
      Starting: it is too early.
    """
    service, loop = self._service, self._loop
    if service is None or loop is None:
      raise ray_queue.Starting
    answer = getattr(service, method)(*values)
    return await asyncio.wrap_future(
      asyncio.run_coroutine_threadsafe(answer, loop)
    )

  def _serve_queue(self, config: actor_config.ActorConfig) -> None:
    async def serve() -> None:
      service = ray_queue.RayQueueService(config.cluster)
      self._loop, self._service = asyncio.get_running_loop(), service
      await service.run(*address(config.cluster), self._stop.is_set)

    asyncio.run(serve())


def _outcome(work: Callable[[], None]) -> tuple[int, str]:
  """Exit code and last lines, as those of a program with this work."""
  try:
    work()
  except Interrupted:
    return 130, ""
  except (ValueError, OSError) as error:
    return 1, f"error: {error}"
  except BaseException:
    text = traceback.format_exc()
    print(text, file=sys.stderr, flush=True)
    return 1, "\n".join(text.splitlines()[-_LAST_LINES:])
  return 0, ""


def write_token(folder: str, token: str) -> str:
  path = pathlib.Path(folder) / "token"
  path.touch(mode=0o600)
  path.write_text(token)
  return str(path)


def _free_port(ip: str) -> int:
  """Raises OSError: none is found."""
  family = socket.AF_INET6 if ":" in ip else socket.AF_INET
  for port in random.SystemRandom().sample(_PORTS, 200):
    with socket.socket(family, socket.SOCK_STREAM) as listener:
      try:
        listener.bind((ip, port))
      except OSError:
        continue
      return port
  raise OSError(f"found no free port of {ip}")
