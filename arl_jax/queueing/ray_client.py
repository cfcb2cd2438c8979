"""A Ray run's group queue as the learner and actors see it. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

from arl_jax.cluster.config import ClusterConfig
from arl_jax.queueing.group_queue import Batch, Lease, NotBegun, Start
from arl_jax.queueing.ray_queue import (
  QUEUE,
  GroupReference,
  Starting,
  get_host,
  outline,
  whole,
)
from arl_jax.types import Group

# For an answer, beyond what the queue may wait for something to tell.
_TAKE_SECONDS, _ANSWER_SECONDS = 10.0, 120.0
# What isn't worth waiting longer for: the learner goes on without.
_GLANCE_SECONDS = 5.0
# Between two tries to find a queue that is away.
_AWAY_SECONDS = 0.5


class _Away(Exception):
  """The queue's process can't be reached; says why."""


class _Caller:
  """Finds the queue's process, again after each failure."""

  def __init__(self, patience: float):
    import ray

    if (host := get_host()) is None:
      raise ValueError(
        "groups go through Ray only in processes that it started"
      )
    self.host, self.patience = host, patience
    self._ray = ray
    self._queue: Any = None

  def ask(self, method: str, *values: Any) -> Any:
    """`ray.ObjectRef` of what a method of `RayQueueService` returns."""
    if self._queue is None:
      try:
        self._queue = self._ray.get_actor(QUEUE)
      except ValueError as error:
        raise _Away("it isn't there") from error
    return self._queue.call.remote(method, *values)

  def explain(self, error: Exception) -> Exception:
    """What a failed call means."""
    errors = self._ray.exceptions
    if isinstance(error, errors.RayTaskError):
      error = error.cause
    if isinstance(error, Starting):
      return _Away("it is just starting")
    if isinstance(error, errors.RayActorError | TimeoutError | _Away):
      self._queue = None
      return _Away(str(error).partition("\n")[0])
    return error

  def check(
    self,
    since: float,
    what: str,
    error: Exception,
    patience: float | None = None,
  ) -> None:
    """Raises TimeoutError once the queue was away for too long."""
    seconds = self.patience if patience is None else patience
    if time.monotonic() - since > seconds:
      raise TimeoutError(
        f"the group queue in Ray didn't {what} in {seconds:g} s: {error}"
      ) from error


class RayLearnerQueue:
  """The same as `queue_client.LearnerQueue`; groups come from their nodes."""

  def __init__(self, cluster: ClusterConfig):
    """Raises ValueError: Ray didn't start this process."""
    self._caller = _Caller(cluster.patience)
    self._lineage: str | None = None
    # Since when takes find no queue; lasts over calls, which may be shorter.
    self._away_since: float | None = None

  def __enter__(self) -> RayLearnerQueue:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    """Nothing stays open."""

  def begin(self, start: Start) -> None:
    """See `LearnerQueue.begin`."""
    outlines = tuple(outline(group) for group in start.groups)
    said = dataclasses.replace(start, groups=outlines)
    with self._caller.host.hold(start.groups) as keys:
      self._patiently("begin", "begin", said, self._caller.host.handle, keys)
    self._lineage = start.lineage

  def take(self, step: int, version: int, timeout: float) -> Batch | None:
    """See `LearnerQueue.take`.

    Raises:
      NotBegun: likewise if a group went with its node: what was open before is
        to be rolled out again.
    """
    until = time.monotonic() + timeout
    what = f"give the groups of step {step}"
    while True:
      left = max(0.0, until - time.monotonic())
      try:
        batch = self._once("take", self._begun(), step, version, left)
        self._away_since = None
      except _Away as error:
        self._away_since = self._away_since or time.monotonic()
        self._caller.check(self._away_since, what, error)
        batch = None
        time.sleep(min(left, _AWAY_SECONDS))
      if batch is not None:
        return dataclasses.replace(batch, groups=self._get(batch.groups))
      if time.monotonic() >= until:
        return None

  def waiting(self) -> tuple[Group, ...]:
    """See `LearnerQueue.waiting`; raises NotBegun as `take`."""
    what = "say what waits"
    return self._get(
      self._patiently(what, "waiting", self._begun(), patience=_GLANCE_SECONDS)
    )

  def status(self) -> dict[str, Any]:
    """See `LearnerQueue.status`."""
    what = "say its status"
    return self._patiently(what, "status", patience=_GLANCE_SECONDS)

  def roles(self) -> list[dict[str, Any]]:
    """See `LearnerQueue.roles`."""
    what = "say who lives"
    return self._patiently(what, "roles", patience=_GLANCE_SECONDS)

  def _get(self, groups: Sequence[GroupReference]) -> tuple[Group, ...]:
    import ray

    until = time.monotonic() + _ANSWER_SECONDS
    futures = [group.reference.future() for group in groups]
    try:
      found = [f.result(until - time.monotonic()) for f in futures]
    except (ray.exceptions.RayError, TimeoutError) as error:
      reason = str(error).partition("\n")[0]
      raise NotBegun(f"groups are lost with their node: {reason}") from error
    return tuple(whole(g, f) for g, f in zip(groups, found, strict=True))

  def _begun(self) -> str:
    if self._lineage is None:
      raise NotBegun("this learner hasn't begun with the queue")
    return self._lineage

  def _patiently(
    self, what: str, method: str, *values: Any, patience: float | None = None
  ) -> Any:
    since = time.monotonic()
    while True:
      try:
        return self._once(method, *values)
      except _Away as error:
        self._caller.check(since, what, error, patience)
        time.sleep(_AWAY_SECONDS)

  def _once(self, method: str, *values: Any) -> Any:
    try:
      answer = self._caller.ask(method, *values).future()
      return answer.result(_TAKE_SECONDS + _ANSWER_SECONDS)
    except Exception as error:
      raise self._caller.explain(error) from error


class RayActorQueue:
  """The same as `queue_client.ActorQueue`; groups stay on this node."""

  def __init__(self, cluster: ClusterConfig, index: int):
    """Raises ValueError: Ray didn't start this process."""
    host = socket.gethostname()[:64]
    self.name = f"{index}-{host}-{secrets.token_hex(4)}"
    self._caller = _Caller(cluster.patience)

  async def __aenter__(self) -> RayActorQueue:
    return self

  async def __aexit__(self, *_: Any) -> None:
    pass

  async def lease(self, most: int) -> list[Lease]:
    """See `ActorQueue.lease`."""
    try:
      return await self._patiently("lease tasks", "lease", self.name, most)
    except NotBegun:
      return []

  async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
    """See `ActorQueue.renew`."""
    try:
      what = "renew leases"
      return await self._patiently(what, "renew", self.name, leases)
    except NotBegun:
      return []

  async def give_back(self, leases: Sequence[Lease]) -> None:
    """See `ActorQueue.give_back`."""
    with contextlib.suppress(NotBegun):
      what = "take leases back"
      await self._patiently(what, "give_back", self.name, leases)

  async def deliver(self, lease: Lease, group: Group | None) -> str:
    """See `ActorQueue.deliver`."""
    what = f"take the group of task {lease.task_id}"
    host, said = self._caller.host, None if group is None else outline(group)
    with host.hold(() if group is None else (group,)) as keys:
      since = time.monotonic()
      while True:
        key = keys[0] if keys else ""
        values = (self.name, lease, said, host.handle, key)
        try:
          return await self._patiently(what, "deliver", *values)
        except NotBegun as error:
          self._caller.check(since, what, error)
        await asyncio.sleep(_AWAY_SECONDS)

  async def _patiently(self, what: str, method: str, *values: Any) -> Any:
    since = time.monotonic()
    while True:
      try:
        return await self._once(method, *values)
      except _Away as error:
        self._caller.check(since, what, error)
      await asyncio.sleep(_AWAY_SECONDS)

  async def _once(self, method: str, *values: Any) -> Any:
    try:
      answer = asyncio.wrap_future(self._caller.ask(method, *values).future())
      return await asyncio.wait_for(answer, 2 * _ANSWER_SECONDS)
    except Exception as error:
      raise self._caller.explain(error) from error
