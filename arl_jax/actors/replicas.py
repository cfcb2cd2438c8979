"""The rollout servers of a run, as an actor samples from them. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from absl import logging

from arl_jax.agents.harness import derive_seed
from arl_jax.queueing.group_queue import Lease
from arl_jax.rollout.request import Overloaded
from arl_jax.serving.client import RemoteClient
from arl_jax.serving.stream import Unavailable
from arl_jax.types import Sample

# A replica that takes no request for so long is left for another one, ...
_LEAVE_SECONDS = 20.0
# ... and begins no group for so long.
_AVOID_SECONDS = 30.0
# Seconds that closing a session may take: a replica that is gone holds nothing.
_CLOSE_SECONDS = 10.0
# Of a session's name, as its harness has it.
_SESSION_CHARACTERS = 128
# Requests of one connection pool: for each, httpcore compares all idle
# connections with each other.
_POOL_REQUESTS = 8
_AWAY = (Unavailable, Overloaded, httpx.TransportError)


class Replicas:
  """Clients of all servers; `async with` closes their connections."""

  def __init__(
    self,
    urls: Sequence[str],
    *,
    token: str = "",
    requests: int = 1024,
    patience: float = 600.0,
    leave_seconds: float = _LEAVE_SECONDS,
  ):
    """Connects at the first request.

    Args:
      urls: of the servers.
      token: that they want.
      requests: at a time, in all, about.
      patience: seconds that a request waits for any of them, at least.
      leave_seconds: that it waits for one of them before it tries another.

    Raises:
      ValueError: there is no server, or an address isn't one of HTTP.
    """
    if not urls:
      raise ValueError(
        "cluster.replicas is empty; it must be the servers' addresses"
      )
    self.urls, self.patience = tuple(urls), patience
    pools = math.ceil(requests / len(urls) / _POOL_REQUESTS)
    self._clients = [
      [
        RemoteClient(
          url,
          token=token,
          patience=min(leave_seconds, patience / 2),
          # Sessions are closed while all requests go on.
          max_connections=requests + _POOL_REQUESTS,
        )
        for _ in range(pools)
      ]
      for url in urls
    ]
    self._avoid_until = [0.0] * len(urls)

  async def __aenter__(self) -> Replicas:
    return self

  async def __aexit__(self, *_: Any) -> None:
    for clients in self._clients:
      for client in clients:
        await client.__aexit__()

  @property
  def resent(self) -> int:
    """Requests that were sent again."""
    return sum(c.retries for clients in self._clients for c in clients)

  def of_group(
    self, lease: Lease, on_sample: Callable[[Sample], None]
  ) -> GroupClient:
    """What the episodes of a lease sample from."""
    return GroupClient(self, lease, on_sample)

  def home(self, number: int) -> int:
    """The replica of a group, or the next one that isn't avoided."""
    first = derive_seed("replica", number) % len(self.urls)
    now = time.monotonic()
    order = [(first + i) % len(self.urls) for i in range(len(self.urls))]
    return next((i for i in order if self._avoid_until[i] <= now), first)

  def leave(self, replica: int, error: Exception) -> int:
    """The replica after one that takes no requests, for now."""
    now = time.monotonic()
    if self._avoid_until[replica] <= now:
      logging.warning("%s takes no requests: %r", self.urls[replica], error)
    self._avoid_until[replica] = now + _AVOID_SECONDS
    return (replica + 1) % len(self.urls)

  def client(self, replica: int, session: str) -> RemoteClient:
    """The same one for all requests of a session."""
    clients = self._clients[replica]
    return clients[derive_seed(session) % len(clients)]


class GroupClient:
  """A `types.PolicyClient` for the episodes of one group.

  All their turns go to one replica, which keeps their prefixes, as long as it
  takes requests; then all go on at the next one. A request says everything
  that a replica must know, so that an episode goes on there as it was.
  """

  def __init__(
    self,
    replicas: Replicas,
    lease: Lease,
    on_sample: Callable[[Sample], None],
  ):
    self._replicas, self._lease = replicas, lease
    self._on_sample = on_sample
    self._replica = replicas.home(lease.number)
    # A task that is handed out twice must not share sessions.
    self._prefix = uuid.uuid4().hex[:16]

  async def sample(
    self,
    session: str,
    ids: Sequence[int],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    seed: int,
    temperature: float = 1.0,
  ) -> Sample:
    """See `types.PolicyClient`.

    Raises:
      TimeoutError: a server needed too long for it.
      NoReplica: no server took it.
      ValueError: a server refuses it, or its answer can't be.
      RequestFailed, Aborted: as the server says.
    """
    began, lease = time.monotonic(), self._lease
    name = self._name(session)
    while True:
      replica = self._replica
      try:
        sample = await self._replicas.client(replica, name).sample(
          name,
          ids,
          max_tokens=max_tokens,
          stop_ids=stop_ids,
          seed=seed,
          temperature=temperature,
          lineage=lease.lineage,
          min_version=lease.version,
        )
      except _AWAY as error:
        waited = time.monotonic() - began
        if waited >= self._replicas.patience:
          raise NoReplica(
            f"none of {', '.join(self._replicas.urls)} sampled with version"
            f" {lease.version} or newer of lineage {lease.lineage} in"
            f" {waited:.0f} s: {error!r}"
          ) from error
        following = self._replicas.leave(replica, error)
        # Others of the group may have gone on already.
        if self._replica == replica:
          self._replica = following
        continue
      if sample.versions.size and int(sample.versions.min()) < lease.version:
        raise ValueError(
          f"{self._replicas.urls[replica]} sampled with version"
          f" {int(sample.versions.min())}; {lease.version} was wanted"
        )
      self._on_sample(sample)
      return sample

  async def close(self, session: str) -> None:
    name = self._name(session)
    client = self._replicas.client(self._replica, name)
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_CLOSE_SECONDS):
        await client.close(name)

  def _name(self, session: str) -> str:
    """Of a session at a server; ids of tasks may be longer than names there."""
    if len(session) > _SESSION_CHARACTERS:
      session = hashlib.blake2b(session.encode(), digest_size=16).hexdigest()
    return f"{self._prefix}/{session}"


class NoReplica(TimeoutError):
  """No server took a request within an actor's patience."""
