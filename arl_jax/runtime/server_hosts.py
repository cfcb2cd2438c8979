"""The processes of a replica that spans several hosts."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from arl_jax.actors.jobs import Interrupted
from arl_jax.cluster.config import ClusterConfig
from arl_jax.runtime import distributed_job
from arl_jax.runtime.distributed_job import JobHosts
from arl_jax.serving import host_link
from arl_jax.serving.config import read_token
from arl_jax.serving.followers import Followers
from arl_jax.serving.listening import listen

_FIRST, _MADE = "arl/first", "arl/made"
_LOOK_SECONDS = 1.0
# Exit codes: of an error here, of one that every start meets, and of a process
# whose replica has lost another one, which says nothing of what its user must
# mend.
_KNOWN_ERROR, _USAGE, _LOST = 1, 2, 3


class Misconfigured(ValueError):
  """What only shows once all hosts are there: another start won't help."""


class ServerHosts(JobHosts):
  """All processes of one replica: a `jax.distributed` job.

  The first one has the scheduler and the addresses. It announces each call of
  the engine to the others over connections of its own, not by a collective
  operation: that would be one more program on all devices before each call,
  with messages of one size, and whoever waits for it can neither wait for long
  nor see that the other end is gone.

  A context manager; with one process nothing is joined.

  Attributes:
    replica: index of the replica.
    index: of this process in it.
    count: of its processes.
  """

  def __init__(
    self,
    cluster: ClusterConfig,
    process: int,
    *,
    on_wait: Callable[[], None] = lambda: None,
  ):
    """Connects to nothing yet.

    Args:
      cluster: with the addresses of all coordinators.
      process: `--index` of this process.
      on_wait: called at least every few seconds while others are waited for.

    Raises:
      ValueError: there is no such process, or no coordinator.
      OSError: the token can't be read.
    """
    count = cluster.server_hosts
    self.replica, index = divmod(process, count)
    if self.replica >= cluster.servers:
      raise ValueError(
        f"--index is {process}, but cluster.servers is {cluster.servers} and"
        f" cluster.server_hosts {count}: the servers' processes are 0 to"
        f" {cluster.servers * count - 1}"
      )
    coordinators = cluster.replica_coordinators
    if count > 1 and not coordinators:
      raise ValueError(
        f"cluster.server_coordinators is empty; replicas of {count}"
        " processes need an address of each one's first host, such as"
        " 10.0.0.8:7001"
      )
    member = distributed_job.Member(
      f"replica {self.replica}",
      f"host {{}} of replica {self.replica}",
      index,
      count,
      "cluster.server_hosts",
      coordinators[self.replica] if count > 1 else "",
      "cluster.server_coordinators",
    )
    super().__init__(member, cluster, "serve_mesh")
    self._on_wait = on_wait
    self._token = read_token(cluster.token_file)

  def _end(self, error: BaseException | None) -> None:
    if error is None:
      distributed_job.leave()
      return
    # The others may be anywhere: an end in order would wait for them in vain.
    if isinstance(error, Interrupted):
      end_process("asked to stop before all hosts were there")
    if isinstance(error, Misconfigured):
      end_process(str(error), _USAGE)
    if not isinstance(error, ValueError | OSError):
      traceback.print_exception(error)
    end_process(str(error), _KNOWN_ERROR)

  def agree(self, made: Any) -> None:
    """Raises ValueError if the first process was made from something else.

    Args:
      made: configuration and data, nested; JSON values.
    """
    if self.first:
      self._board.put(_MADE, json.dumps(made))
    else:
      there = json.loads(self._await(_MADE))
      name = self._member.name(self.index)
      distributed_job.refuse_other(there, made, name)

  def followers(self) -> Followers:
    """The other processes, in the first one.

    Raises:
      TimeoutError: they didn't connect.
      OSError: no port can be had.
    """
    secret = secrets.token_hex()
    host = distributed_job.bind_host(self._member, self._cluster)
    with contextlib.closing(
      listen(host, 0, "cluster.server_coordinators: a free port")
    ) as listener:
      port = listener.getsockname()[1]
      self._board.put(_FIRST, json.dumps({"port": port, "secret": secret}))
      links = host_link.accept(
        listener,
        self.count,
        self._key(secret),
        seconds=self._cluster.patience,
        on_wait=self._on_wait,
      )
    return Followers(links, end_process)

  def link(self) -> socket.socket:
    """The connection to the first process, in the others.

    Raises:
      OSError: it can't be reached, or isn't the one.
    """
    said = json.loads(self._await(_FIRST))
    return host_link.connect(
      (self._member.host, said["port"]),
      self.index,
      self._key(said["secret"]),
      seconds=self._cluster.patience,
    )

  def _key(self, secret: str) -> bytes:
    # Whoever can ask the coordinator knows the secret; not so the token.
    return f"{secret} {self._token}".encode()

  def _await(self, name: str) -> str:
    limit = time.monotonic() + self._cluster.patience
    while True:
      self._on_wait()
      found = self._board.look(name, _LOOK_SECONDS)
      if found is not None:
        return found
      if time.monotonic() > limit:
        raise TimeoutError(
          f"waited {self._cluster.patience:.0f} s (cluster.patience) for the"
          f" first host of replica {self.replica}, which said nothing"
        )


def end_process(why: str, code: int = _LOST) -> NoReturn:
  """Ends a process whose threads may wait for a host that is gone."""
  print(f"error: {why}", file=sys.stderr, flush=True)
  os._exit(code)
