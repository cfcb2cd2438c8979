"""The process that holds a run's group queue, over HTTP. Imports no jax."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.roster import Beat, Roster
from arl_jax.queueing import messages
from arl_jax.queueing.group_queue import Batch, GroupQueue, Lease, NotBegun
from arl_jax.serving.body import parse_object
from arl_jax.serving.config import is_loopback, read_token
from arl_jax.serving.http_errors import HttpError, response
from arl_jax.serving.listening import HttpServer, check_token, listen
from arl_jax.serving.receiving import read_body, until_gone
from arl_jax.types import Group

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

# That a learner or an actor may wait for something to do, before it asks again.
_TAKE_SECONDS = 10.0
_LEASE_SECONDS = 3.0
# Between two looks whether a lease has expired, while somebody waits.
_LOOK_SECONDS = 0.5
# Connections at a time; each actor has some.
_CONNECTIONS = 4096
# Messages with groups that are read at a time: each may need much memory.
_READERS = 2


class QueueService:
  """One group queue, and who lives, over HTTP.

  What happens to the queue happens in the loop's thread, between two awaits;
  texts of groups are read in others. It keeps nothing on disk: a process that
  ends is started anew, and the learner begins again.
  """

  def __init__(self, cluster: ClusterConfig):
    """Makes an empty queue.

    Raises:
      ValueError: the token file can't be used.
      OSError: the token can't be read.
    """
    self._queue = GroupQueue(lease_seconds=cluster.lost_seconds)
    self._roster = Roster()
    self._beat_seconds = cluster.beat_seconds
    self._token = read_token(cluster.token_file)
    # Groups as they came, for the learner, by their id as objects.
    self._frames: dict[int, tuple[Group, bytes]] = {}
    self._batch: tuple[Batch, bytes] | None = None
    self._changed = asyncio.Event()
    self._readers = asyncio.Semaphore(_READERS)
    self._stopping = False
    self.app = Starlette(
      routes=[
        Route(path, self._guarded(handler, needs_token), methods=[method])
        for method, path, handler, needs_token in (
          ("POST", "/begin", self._begin, True),
          ("POST", "/take", self._take, True),
          ("POST", "/waiting", self._waiting, True),
          ("POST", "/lease", self._lease, True),
          ("POST", "/renew", self._renew, True),
          ("POST", "/give_back", self._give_back, True),
          ("POST", "/deliver", self._deliver, True),
          ("POST", "/beat", self._beat, True),
          ("GET", "/status", self._status, True),
          ("GET", "/roles", self._roles, True),
          # Probes have no token.
          ("GET", "/health", self._health, False),
        )
      ],
      exception_handlers={HTTPException: _on_http_exception},
    )

  async def run(
    self, host: str, port: int, should_stop: Callable[[], bool]
  ) -> None:
    """Serves until asked to stop.

    Raises:
      OSError: the port is taken.
      RuntimeError: the server ended by itself.
    """
    server = HttpServer(self.app, connections=_CONNECTIONS, drain_seconds=2)
    found = listen(host, port, "cluster.queue")
    serving = asyncio.create_task(server.serve(sockets=[found]))
    next_beat = 0.0
    try:
      while not should_stop():
        if serving.done():
          await serving
          raise RuntimeError("the queue's HTTP server ended by itself")
        if time.monotonic() >= next_beat:
          next_beat = time.monotonic() + self._beat_seconds
          self._roster.beat(_own_beat())
        await asyncio.sleep(0.1)
    finally:
      self._stopping = True
      self._notify()
      server.should_exit = True
      with contextlib.closing(found):
        await serving

  def _guarded(self, handler: Handler, needs_token: bool) -> Handler:
    """A handler for those with the token, and whose errors are answers."""

    async def guarded(request: Request) -> Response:
      try:
        if needs_token:
          check_token(request, self._token)
        return await handler(request)
      except ClientDisconnect:
        # Nobody reads it.
        return Response(status_code=499)
      except NotBegun as error:
        return response(HttpError(409, str(error), code="not_begun"))
      except Exception as error:
        return response(error)

    return guarded

  # For the learner.

  async def _begin(self, request: Request) -> Response:
    body = await read_body(request, messages.MAX_GROUPS[0], messages.LINES)
    start, frames = await self._read(
      messages.read_start, body, messages.MAX_GROUPS[1]
    )
    self._queue.begin(start)
    self._batch = None
    for group, frame in zip(start.groups, frames, strict=True):
      self._frames[id(group)] = group, frame
    self._forget()
    self._notify()
    return JSONResponse({})

  async def _take(self, request: Request) -> Response:
    fields = messages.Fields(await _plain(request))
    lineage = fields.needed_text("lineage", 64)
    step = fields.needed_integer("step")
    version = fields.needed_integer("version")
    wait = fields.number("wait", 0.0, 0.0, 1e9)
    fields.finish()

    def take() -> Batch | None:
      self._check_lineage(lineage)
      return self._queue.take(step, version)

    # Room for new tasks, too, comes with the version that a take tells.
    batch = take()
    self._notify()
    if batch is None:
      wait = min(wait, _TAKE_SECONDS)
      batch = await until_gone(request, self._until(take, wait))
      self._notify()
    if batch is None:
      return Response(status_code=204)
    return _lines(self._pack(batch))

  async def _waiting(self, request: Request) -> Response:
    fields = messages.Fields(await _plain(request))
    lineage = fields.needed_text("lineage", 64)
    fields.finish()
    self._check_lineage(lineage)
    groups = self._queue.waiting()
    header = messages.pack_json({"groups": len(groups)})
    return _lines(b"".join([header, *map(self._frame, groups)]))

  def _pack(self, batch: Batch) -> bytes:
    """A batch as an answer; the last one is kept, for it may be lost."""
    if self._batch is None or self._batch[0] is not batch:
      frames = [self._frame(group) for group in batch.groups]
      header = messages.batch_to_json(batch)
      body = b"".join([messages.pack_json(header), *frames])
      self._batch = batch, body
      self._forget()
    return self._batch[1]

  def _check_lineage(self, lineage: str) -> None:
    """Raises unless the learner that asks is the one that began last."""
    found = self._queue.lineage
    if found != lineage:
      raise HttpError(
        409,
        f"the queue serves lineage {found!r}; the learner of {lineage!r} was"
        " superseded",
        code="superseded",
      )

  # For actors.

  async def _lease(self, request: Request) -> Response:
    fields = messages.Fields(await _plain(request))
    actor = fields.needed_text("actor", messages.MAX_ACTOR)
    most = fields.needed_integer("most", 1, messages.MAX_LEASES)
    fields.finish()

    def lease() -> list[Lease] | None:
      return self._queue.lease(actor, most) or None

    found = await until_gone(request, self._until(lease, _LEASE_SECONDS))
    return JSONResponse({"leases": messages.leases_to_json(found or [])})

  async def _renew(self, request: Request) -> Response:
    actor, leases = await _leases(request)
    lost = self._queue.renew(actor, leases)
    return JSONResponse({"leases": messages.leases_to_json(lost)})

  async def _give_back(self, request: Request) -> Response:
    actor, leases = await _leases(request)
    self._queue.give_back(actor, leases)
    self._notify()
    return JSONResponse({"leases": []})

  async def _deliver(self, request: Request) -> Response:
    body = await read_body(request, messages.MAX_GROUP[0], messages.LINES)
    actor, lease, group, frame = await self._read(
      messages.read_delivery, body, messages.MAX_GROUP[1]
    )
    fate = self._queue.deliver(actor, lease, group)
    if fate == "ready" and group is not None:
      self._frames[id(group)] = group, frame
    self._notify()
    return JSONResponse({"fate": fate})

  # For everybody.

  async def _beat(self, request: Request) -> Response:
    self._roster.beat(messages.read_beat(await _plain(request)))
    return JSONResponse({})

  async def _status(self, request: Request) -> Response:
    del request
    return JSONResponse(self._queue.status())

  async def _roles(self, request: Request) -> Response:
    del request
    return JSONResponse({"roles": self._roster.roles()})

  async def _health(self, request: Request) -> Response:
    del request
    return JSONResponse({"status": "ok"})

  # Inside.

  async def _until(
    self, ask: Callable[[], T | None], seconds: float
  ) -> T | None:
    """What `ask` gives once it gives something; None after that time.

    Raises:
      NotBegun: still, after that time.
    """
    limit = time.monotonic() + seconds
    while True:
      changed, failure = self._changed, None
      try:
        found = ask()
        if found is not None:
          return found
      except NotBegun as error:
        failure = error
      left = limit - time.monotonic()
      if left <= 0 or self._stopping:
        if failure is not None:
          raise failure
        return None
      try:
        async with asyncio.timeout(min(left, _LOOK_SECONDS)):
          await changed.wait()
      except TimeoutError:
        # Leases expire without a message.
        continue

  def _notify(self) -> None:
    """Has everybody who waits look again."""
    self._changed.set()
    self._changed = asyncio.Event()

  async def _read(
    self, read: Callable[[Iterator[bytes]], T], body: bytes, most: int
  ) -> T:
    async with self._readers:
      return await asyncio.to_thread(lambda: read(messages.unpack(body, most)))

  def _frame(self, group: Group) -> bytes:
    return self._frames[id(group)][1]

  def _forget(self) -> None:
    """Lets go of groups that are neither ready nor in the last batch."""
    kept = [
      *self._queue.waiting(),
      *(self._batch[0].groups if self._batch else ()),
    ]
    self._frames = {id(group): self._frames[id(group)] for group in kept}


class HasCluster(Protocol):
  """What the queue reads of a run's configuration."""

  cluster: ClusterConfig


def run(
  config: HasCluster, index: int, should_stop: Callable[[], bool]
) -> None:
  """Serves a run's queue until asked to stop.

  Args:
    config: whose cluster says where.
    index: 0; a run has one queue.
    should_stop: asked a few times a second.

  Raises:
    ValueError: the address can't be listened on, or the token file can't be
      used.
    OSError: the port is taken, or the token can't be read.
  """
  if index != 0:
    raise ValueError(f"index is {index}; a run has one queue, of index 0")
  host, port = address(config.cluster)

  async def serve() -> None:
    await QueueService(config.cluster).run(host, port, should_stop)

  asyncio.run(serve())


def address(cluster: ClusterConfig) -> tuple[str, int]:
  """Host and port to listen on.

  Raises:
    ValueError: cluster.queue names no port.
  """
  try:
    parts = urllib.parse.urlsplit(cluster.queue)
    host, port = parts.hostname, parts.port
  except ValueError:
    host = port = None
  if not host or not port:
    raise ValueError(
      f"cluster.queue is {cluster.queue!r}; to be listened on it must be like"
      " http://10.0.0.7:7000"
    )
  if is_loopback(host):
    return "127.0.0.1" if host == "localhost" else host, port
  return cluster.host, port


async def _plain(request: Request) -> dict[str, Any]:
  return parse_object(await read_body(request, messages.MAX_PLAIN))


async def _leases(request: Request) -> tuple[str, list[Lease]]:
  fields = messages.Fields(await _plain(request))
  actor = fields.needed_text("actor", messages.MAX_ACTOR)
  leases = fields.needed_list("leases", messages.MAX_LEASES)
  fields.finish()
  return actor, messages.read_leases(leases)


def _lines(body: bytes) -> Response:
  return Response(body, media_type=messages.LINES)


def _own_beat() -> Beat:
  return Beat(
    role="queue",
    index=0,
    pid=os.getpid(),
    idle_seconds=0.0,
    counters={},
  )


def _on_http_exception(request: Request, error: Any) -> Response:
  """Of the router: no such address, or no such method there."""
  message = f"{request.method} {request.url.path[:200]}: {error.detail}"
  return response(HttpError(error.status_code, message))
