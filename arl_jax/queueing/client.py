"""The group queue as the learner and actors see it. Imports no jax."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx

from arl_jax.cluster.config import ClusterConfig
from arl_jax.queueing import messages
from arl_jax.queueing.group_queue import Batch, Lease, NotBegun, Start
from arl_jax.serving.body import Malformed, parse_object
from arl_jax.serving.config import read_token
from arl_jax.types import Group

# Seconds between tries grow from the first to the last of these.
_WAITS = (0.05, 2.0)
_CONNECT_SECONDS = 5.0
# For an answer, beyond what the queue may wait for something to tell: to what
# is small, and to groups, which are read with care.
_ANSWER_SECONDS = 30.0
_GROUPS_SECONDS = 180.0
# What isn't worth waiting longer for: the learner goes on without.
_GLANCE_SECONDS = 5.0
# What the queue may wait, at most (see `queue_service`).
_POLL_SECONDS = 10.0


class Superseded(Exception):
  """Another learner has begun with the queue since."""


class _Away(Exception):
  """The queue can't be reached, or not now; says why."""


class _Patience:
  """How long one request is tried again."""

  def __init__(self, url: str, seconds: float):
    self._url, self._seconds = url, seconds
    self.reset()

  def reset(self) -> None:
    """After an answer."""
    self._since: float | None = None
    self._wait = _WAITS[0]

  def pause(self, error: Exception, what: str, most: float = math.inf) -> float:
    """Seconds until the next try, `most` at most.

    Raises:
      TimeoutError: the queue was away for longer than patience.
    """
    now = time.monotonic()
    self._since = now if self._since is None else self._since
    left = self._since + self._seconds - now
    if left <= 0:
      raise TimeoutError(
        f"the group queue at {self._url} didn't {what} in {self._seconds:g} s:"
        f" {error}"
      ) from error
    # Apart from each other, or all come back at once.
    seconds = self._wait * random.uniform(0.5, 1.0)
    self._wait = min(2 * self._wait, _WAITS[1])
    return max(0.0, min(seconds, left, most))


def _settings(cluster: ClusterConfig) -> dict[str, Any]:
  """Of a client of the queue; see `LearnerQueue` for what it raises."""
  if not cluster.queue:
    raise ValueError("cluster.queue is empty; it must be the queue's address")
  headers = {"accept-encoding": "identity"}
  if token := read_token(cluster.token_file):
    headers["authorization"] = f"Bearer {token}"
  return {
    "base_url": cluster.queue.rstrip("/"),
    "headers": headers,
    # Processes of a run find each other directly.
    "trust_env": False,
  }


def _arguments(
  json: Mapping[str, Any] | None, packed: bytes | None
) -> dict[str, Any]:
  """Of a request with either body, or none: body and time."""
  seconds = _GLANCE_SECONDS
  more: dict[str, Any] = {}
  if json is not None:
    seconds, more = _POLL_SECONDS + _ANSWER_SECONDS, {"json": json}
  if packed is not None:
    seconds = _GROUPS_SECONDS
    more = {"content": packed, "headers": {"content-type": messages.LINES}}
  return {**more, "timeout": httpx.Timeout(seconds, connect=_CONNECT_SECONDS)}


def _body(header: Mapping[str, Any], groups: Iterable[Group]) -> bytes:
  packed = [messages.pack_group(group) for group in groups]
  return b"".join([messages.pack_json(header), *packed])


class _Parts:
  """Collects an answer, in bounds."""

  def __init__(self, response: httpx.Response, most: int):
    self._response, self._most = response, most
    self._parts: list[bytes] = []
    self._size = 0

  def add(self, part: bytes) -> None:
    self._parts.append(part)
    self._size += len(part)
    if self._size > self._most:
      raise ValueError(
        f"{self._response.url}: the answer is larger than {self._most} bytes"
      )

  def body(self) -> bytes:
    """What was collected. Raises what the answer says if it is an error."""
    status, body = self._response.status_code, b"".join(self._parts)
    if self._response.is_success:
      return body
    code, message = None, body[:200].decode("utf-8", "replace")
    try:
      error = parse_object(body)["error"]
      code, message = error["code"], str(error["message"])[:1000]
    except (ValueError, KeyError, TypeError):
      # Of whatever else listens there.
      pass
    text = f"{self._response.url}: {status}, {message or 'no reason given'}"
    if status >= 500 or status == 429:
      raise _Away(text)
    if status == 409 and code == "not_begun":
      raise NotBegun(text)
    if status == 409 and code == "superseded":
      raise Superseded(text)
    raise ValueError(text)


class LearnerQueue:
  """The queue as the learner sees it; one thread at a time.

  Requests that found no queue are sent again within `patience` seconds, then
  TimeoutError says what was waited for. A context manager closes connections.
  """

  def __init__(self, cluster: ClusterConfig, *, patience: float | None = None):
    """Connects at the first request.

    Args:
      cluster: names the queue, the token and the patience.
      patience: in place of the cluster's, in seconds.

    Raises:
      ValueError: there is no address, or the token file can't be used.
      OSError: the token can't be read.
    """
    self._http = httpx.Client(**_settings(cluster))
    self._url = cluster.queue
    self._patience = cluster.patience if patience is None else patience
    # Lasts over calls, which may be shorter.
    self._taking = _Patience(self._url, self._patience)
    self._lineage: str | None = None

  def __enter__(self) -> LearnerQueue:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    self._http.close()

  def begin(self, start: Start) -> None:
    """See `GroupQueue.begin`; whoever began before is superseded.

    Raises:
      ValueError: the queue refuses it.
      TimeoutError: there is no queue.
    """
    body = _body(messages.start_to_json(start), start.groups)
    patience = _Patience(self._url, self._patience)
    self._patiently(patience, "begin", "POST", "/begin", packed=body)
    self._lineage = start.lineage

  def take(self, step: int, version: int, timeout: float) -> Batch | None:
    """See `GroupQueue.take`; waits until there are enough groups.

    Args:
      step: of the learner.
      version: of the policy, published already.
      timeout: seconds, after which it returns None.

    Raises:
      NotBegun: the queue was started anew, or this learner didn't begin.
      Superseded: another learner has begun since.
      ValueError: the queue refuses it, or its answer can't be.
      TimeoutError: there is no queue.
    """
    until = time.monotonic() + timeout
    what = f"give the groups of step {step}"
    while True:
      request = {
        "lineage": self._begun(),
        "step": step,
        "version": version,
        "wait": min(max(0.0, until - time.monotonic()), _POLL_SECONDS),
      }
      try:
        body = self._once("POST", "/take", request)
        self._taking.reset()
        if body:
          lines = messages.unpack(body, messages.MAX_GROUPS[1])
          return messages.read_batch(lines)
      except _Away as error:
        left = max(0.0, until - time.monotonic())
        time.sleep(self._taking.pause(error, what, left))
      if time.monotonic() >= until:
        return None

  def waiting(self) -> tuple[Group, ...]:
    """See `GroupQueue.waiting`.

    Raises:
      Like `take`, but TimeoutError after a few seconds already: nothing waits
      in a queue that was started anew.
    """
    request = {"lineage": self._begun()}
    body = self._glance("say what waits", "POST", "/waiting", request)
    lines = messages.unpack(body, messages.MAX_GROUPS[1])
    return messages.read_waiting(lines)

  def status(self) -> dict[str, Any]:
    """See `GroupQueue.status`. Raises TimeoutError after a few seconds."""
    body = self._glance("say its status", "GET", "/status")
    return parse_object(body)

  def roles(self) -> list[dict[str, Any]]:
    """See `Roster.roles`. Raises TimeoutError after a few seconds."""
    roles = parse_object(self._glance("say who lives", "GET", "/roles"))
    return messages.read_roles(roles)

  def _begun(self) -> str:
    if self._lineage is None:
      raise NotBegun("this learner hasn't begun with the queue")
    return self._lineage

  def _glance(
    self,
    what: str,
    method: str,
    path: str,
    json: Mapping[str, Any] | None = None,
  ) -> bytes:
    seconds = min(self._patience, _GLANCE_SECONDS)
    patience = _Patience(self._url, seconds)
    return self._patiently(patience, what, method, path, json)

  def _patiently(
    self,
    patience: _Patience,
    what: str,
    method: str,
    path: str,
    json: Mapping[str, Any] | None = None,
    packed: bytes | None = None,
  ) -> bytes:
    while True:
      try:
        return self._once(method, path, json, packed)
      except _Away as error:
        time.sleep(patience.pause(error, what))

  def _once(
    self,
    method: str,
    path: str,
    json: Mapping[str, Any] | None = None,
    packed: bytes | None = None,
  ) -> bytes:
    try:
      with self._http.stream(
        method, path, **_arguments(json, packed)
      ) as answer:
        parts = _Parts(answer, messages.MAX_GROUPS[0])
        for part in answer.iter_raw():
          parts.add(part)
    except httpx.TransportError as error:
      raise _Away(f"{type(error).__name__}: {error}") from error
    return parts.body()


class ActorQueue:
  """The queue as one actor process sees it, for many concurrent episodes.

  Requests that found no queue are sent again within `patience` seconds, then
  TimeoutError says what was waited for. `async with` closes the connections.

  Attributes:
    name: of this process; another one of the same index has another.
  """

  def __init__(
    self, cluster: ClusterConfig, index: int, *, patience: float | None = None
  ):
    """Connects at the first request.

    Args:
      cluster: names the queue, the token and the patience.
      index: of the actor.
      patience: in place of the cluster's, in seconds.

    Raises:
      ValueError: there is no address, or the token file can't be used.
      OSError: the token can't be read.
    """
    host = socket.gethostname()[:64]
    self.name = f"{index}-{host}-{secrets.token_hex(4)}"
    self._http = httpx.AsyncClient(**_settings(cluster))
    self._url = cluster.queue
    self._patience = cluster.patience if patience is None else patience

  async def __aenter__(self) -> ActorQueue:
    return self

  async def __aexit__(self, *_: Any) -> None:
    await self._http.aclose()

  async def lease(self, most: int) -> list[Lease]:
    """Up to `most` tasks; none after a few seconds without anything to do.

    Raises:
      ValueError: the queue refuses it, or its answer can't be.
      TimeoutError: there is no queue.
    """
    request = {"actor": self.name, "most": most}
    try:
      answer = await self._patiently("lease tasks", "/lease", request)
    except NotBegun:
      # The learner begins again. The queue has waited already.
      return []
    return _leases(answer)

  async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
    """Keeps leases; those that this actor has lost come back.

    Raises:
      ValueError: the queue refuses it, or its answer can't be.
      TimeoutError: there is no queue.
    """
    return await self._tell("renew leases", "/renew", leases)

  async def give_back(self, leases: Sequence[Lease]) -> None:
    """Has others roll out what this actor doesn't. Raises as `renew`."""
    await self._tell("take leases back", "/give_back", leases)

  async def deliver(self, lease: Lease, group: Group | None) -> str:
    """See `GroupQueue.deliver`; waits for a learner that begins again.

    Raises:
      ValueError: the queue refuses the group, or it can't be JSON.
      TimeoutError: there is no queue, or no learner begins.
    """
    header = {
      "actor": self.name,
      "lease": messages.lease_to_json(lease),
      "groups": int(group is not None),
    }
    groups = () if group is None else (group,)
    # Long contexts take a while.
    body = await asyncio.to_thread(_body, header, groups)
    what = f"take the group of task {lease.task_id}"
    patience = _Patience(self._url, self._patience)
    while True:
      try:
        answer = await self._patiently(what, "/deliver", packed=body)
        return str(answer.get("fate"))
      except NotBegun as error:
        pause = patience.pause(error, what)
      await asyncio.sleep(pause)

  async def _tell(
    self, what: str, path: str, leases: Sequence[Lease]
  ) -> list[Lease]:
    lost: list[Lease] = []
    for at in range(0, len(leases), messages.MAX_LEASES):
      some = leases[at : at + messages.MAX_LEASES]
      request = {"actor": self.name, "leases": messages.leases_to_json(some)}
      try:
        lost += _leases(await self._patiently(what, path, request))
      except NotBegun:
        # What is being rolled out may still be wanted once a learner begins.
        continue
    return lost

  async def _patiently(
    self,
    what: str,
    path: str,
    json: Mapping[str, Any] | None = None,
    packed: bytes | None = None,
  ) -> dict[str, Any]:
    patience = _Patience(self._url, self._patience)
    while True:
      try:
        return parse_object(await self._once(path, json, packed))
      except _Away as error:
        pause = patience.pause(error, what)
      await asyncio.sleep(pause)

  async def _once(
    self, path: str, json: Mapping[str, Any] | None, packed: bytes | None
  ) -> bytes:
    try:
      async with self._http.stream(
        "POST", path, **_arguments(json, packed)
      ) as answer:
        parts = _Parts(answer, messages.MAX_PLAIN)
        async for part in answer.aiter_raw():
          parts.add(part)
    except httpx.TransportError as error:
      raise _Away(f"{type(error).__name__}: {error}") from error
    return parts.body()


def _leases(answer: Mapping[str, Any]) -> list[Lease]:
  found = answer.get("leases")
  if not isinstance(found, list) or len(found) > messages.MAX_LEASES:
    raise Malformed("leases", "the queue's answer has no list of leases")
  return messages.read_leases(found)
