"""gRPC: JetStream's Orchestrator, and what rollouts need beyond it.

Methods take and give bytes, so that malformed ones are answered like any other
bad request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from absl import logging

from arl_jax.rollout.request import Overloaded, RequestFailed, RequestTimeout
from arl_jax.serving.grpc_requests import (
  Asked,
  asked_of_decode,
  asked_of_generate,
  decode_response,
  generate_response,
  parsed,
)
from arl_jax.serving.proto import jetstream_pb2, rollout_pb2
from arl_jax.serving.service import Service
from arl_jax.serving.stream import Aborted, Stream, Unavailable
from arl_jax.types import Sample

ORCHESTRATOR = "jetstream_proto.Orchestrator"
ROLLOUT = "arl_jax.Rollout"

# It travels in a header, which may not be long.
_MAX_DETAILS = 500
# Requests that may wait beside those that sample: health, load, abort.
_SHORT_CALLS = 64
# Clients wait until a server is live before they ask it anything.
_DEAD = ("starting", "failed", "stopped")
# Until a client that went without a word is noticed.
_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 30_000, 20_000


class Unauthenticated(Exception):
  """The caller doesn't have the token."""


_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
  (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
  (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
  (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
  (Unavailable, grpc.StatusCode.UNAVAILABLE),
  (RequestTimeout, grpc.StatusCode.DEADLINE_EXCEEDED),
  (Aborted, grpc.StatusCode.ABORTED),
  (RequestFailed, grpc.StatusCode.INTERNAL),
)


def build(
  service: Service,
  *,
  token: str = "",
  host: str | None = None,
  port: int | None = None,
) -> tuple[grpc.aio.Server, int]:
  """Makes a server, on a running event loop; `start` has it serve.

  Its `stop(seconds)` takes no more calls, and ends those that aren't done after
  so many seconds.

  Args:
    service: what it serves.
    token: that every call but HealthCheck must bring; empty asks for none.
    host: address; the configured one by default.
    port: 0 takes a free one; the configured one by default.

  Returns:
    The server, and the port that it has.

  Raises:
    OSError: the address can't be had.
  """
  config = service.config
  server = grpc.aio.server(
    maximum_concurrent_rpcs=config.max_requests + _SHORT_CALLS,
    options=(
      ("grpc.max_receive_message_length", config.max_body_bytes),
      # Two servers would take turns at one port without knowing.
      ("grpc.so_reuseport", 0),
      ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
      ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ),
  )
  methods = _Methods(service, token)
  server.add_generic_rpc_handlers(
    (
      grpc.method_handlers_generic_handler(
        ORCHESTRATOR,
        {
          "Decode": grpc.unary_stream_rpc_method_handler(methods.decode),
          "HealthCheck": grpc.unary_unary_rpc_method_handler(methods.health),
        },
      ),
      grpc.method_handlers_generic_handler(
        ROLLOUT,
        {
          "Generate": grpc.unary_stream_rpc_method_handler(methods.generate),
          "Abort": grpc.unary_unary_rpc_method_handler(methods.abort),
          "Load": grpc.unary_unary_rpc_method_handler(methods.load),
        },
      ),
    )
  )
  host = config.host if host is None else host
  port = config.grpc_port if port is None else port
  address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
  try:
    return server, server.add_insecure_port(address)
  except RuntimeError as error:
    raise OSError(f"gRPC can't listen on {address}: {error}") from error


class _Methods:
  """One coroutine a method. Streams are written, not yielded.

  A generator that isn't exhausted would be closed whenever it is collected; a
  coroutine ends, and with it the request, when its client goes.
  """

  def __init__(self, service: Service, token: str):
    self._service, self._token = service, token.encode()

  # JetStream's.

  async def decode(self, body: bytes, context: Any) -> None:
    async with self._answering(context):
      request = parsed(jetstream_pb2.DecodeRequest, body)
      asked = await asked_of_decode(request, self._service)
      texts, number = asked.texts(self._service), len(asked.sampling)

      async def send(index: int, part: Sample) -> None:
        response = decode_response(number, index, part, texts)
        await context.write(response.SerializeToString())

      async with self._opened(asked) as streams:
        await _relay(streams, send)

  async def health(self, body: bytes, context: Any) -> bytes:
    """Whether it serves; whoever watches over it need not know the token."""
    async with self._answering(context, public=True):
      parsed(jetstream_pb2.HealthCheckRequest, body)
      live = self._service.load().state not in _DEAD
      response = jetstream_pb2.HealthCheckResponse(is_live=live)
      return response.SerializeToString()

  # Ours.

  async def generate(self, body: bytes, context: Any) -> None:
    async with self._answering(context):
      request = parsed(rollout_pb2.GenerateRequest, body)
      asked = await asked_of_generate(request, self._service)
      texts = asked.texts(self._service)

      async def send(index: int, part: Sample) -> None:
        response = generate_response(index, part, texts, experts=asked.experts)
        await context.write(response.SerializeToString())

      async with self._opened(asked) as streams:
        started = rollout_pb2.Started(
          request_ids=[s.request_id for s in streams], prompt_ids=asked.ids
        )
        first = rollout_pb2.GenerateResponse(started=started)
        await context.write(first.SerializeToString())
        await _relay(streams, send)

  async def abort(self, body: bytes, context: Any) -> bytes:
    async with self._answering(context):
      request = parsed(rollout_pb2.AbortRequest, body)
      aborted = [i for i in request.request_ids if self._service.abort(i)]
      return rollout_pb2.AbortResponse(aborted=aborted).SerializeToString()

  async def load(self, body: bytes, context: Any) -> bytes:
    async with self._answering(context):
      parsed(rollout_pb2.LoadRequest, body)
      load, response = self._service.load(), rollout_pb2.LoadResponse()
      for field in response.DESCRIPTOR.fields:
        setattr(response, field.name, getattr(load, field.name))
      return response.SerializeToString()

  # What they share.

  @contextlib.asynccontextmanager
  async def _answering(
    self, context: Any, *, public: bool = False
  ) -> AsyncIterator[None]:
    """Lets callers with the token in; errors become a code and one line."""
    try:
      if not public:
        self._authenticate(context)
      yield
    except Exception as error:
      code, details = _answer(error)
      if not context.done():
        await context.abort(code, details)

  def _authenticate(self, context: Any) -> None:
    if not self._token:
      return
    metadata = dict(context.invocation_metadata() or ())
    kind, _, token = str(metadata.get("authorization", "")).partition(" ")
    # Takes the same time wherever they differ.
    same = hmac.compare_digest(token.strip().encode(), self._token)
    if kind.lower() != "bearer" or not same:
      raise Unauthenticated(
        "metadata authorization must be 'Bearer ' and this server's token"
      )

  @contextlib.asynccontextmanager
  async def _opened(self, asked: Asked) -> AsyncIterator[list[Stream]]:
    async with contextlib.AsyncExitStack() as stack:
      yield await asked.open(self._service, stack)


async def _relay(
  streams: list[Stream], send: Callable[[int, Sample], Awaitable[None]]
) -> None:
  """Sends what streams say, in order of arrival, until all have ended.

  Raises:
    Exception: the first that a stream raised; the others are given up.
  """
  turn = asyncio.Lock()

  async def relay(index: int, stream: Stream) -> None:
    async for part in stream:
      async with turn:
        await send(index, part)

  try:
    async with asyncio.TaskGroup() as group:
      for index, stream in enumerate(streams):
        group.create_task(relay(index, stream))
  except* Exception as raised:
    error: BaseException = raised
    while isinstance(error, BaseExceptionGroup):
      error = error.exceptions[0]
    first = error
  else:
    return
  raise first


def _answer(error: Exception) -> tuple[grpc.StatusCode, str]:
  for kind, code in _CODES:
    if isinstance(error, kind):
      return code, " ".join(str(error).split())[:_MAX_DETAILS]
  logging.error("a gRPC call failed", exc_info=error)
  return grpc.StatusCode.INTERNAL, "the server failed at this request"
