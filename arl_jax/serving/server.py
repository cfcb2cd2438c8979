"""Runs HTTP and gRPC around one service until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from absl import logging

from arl_jax.chat.formats import ChatFormat
from arl_jax.serving import grpc_service
from arl_jax.serving.admin import Admin
from arl_jax.serving.config import ServingConfig, read_token
from arl_jax.serving.http_app import Handler, make_app
from arl_jax.serving.listening import HttpServer, listen
from arl_jax.serving.metrics import Metrics
from arl_jax.serving.openai_api import OpenAI
from arl_jax.serving.replica import Replica
from arl_jax.serving.service import Service
from arl_jax.serving.sessions import Sessions
from arl_jax.weights import Subscriber

# A step of the engine, at the end.
_STOP_SECONDS = 5.0
# Connections beyond those that may have a request: probes, waiting ones.
_SPARE_CONNECTIONS = 256


class Server:
  """HTTP and gRPC around one service.

  Attributes:
    http_port: that is listened on, known before anything is served.
    grpc_port: the same of gRPC, None without it.
    stuck: whether the engine's thread didn't end in time, such as amid a
      compilation; the process can then only be left, not ended in order.
  """

  def __init__(
    self,
    service: Service,
    *,
    model: str,
    chat_format: ChatFormat | None,
    subscriber: Subscriber | None = None,
    more: Sequence[tuple[str, str, Handler]] = (),
  ):
    """Makes a server and takes its HTTP port.

    Args:
      service: not started yet.
      model: as the API calls it.
      chat_format: of the model; None serves no chats.
      subscriber: whose versions are taken in.
      more: see `make_app`.

    Raises:
      ValueError: the token file can't be used.
      OSError: the port is taken, or the token can't be read.
    """
    self._service = service
    self._config: ServingConfig = service.config
    self._token = read_token(self._config.token_file)
    self._metrics = Metrics(service)
    self._sessions = Sessions(self._config, service.close_session)
    self._replica = None
    if subscriber is not None:
      self._replica = Replica(
        subscriber,
        service,
        self._metrics,
        poll_seconds=self._config.poll_seconds,
      )
    app = make_app(
      OpenAI(
        service,
        self._sessions,
        self._metrics,
        model=model,
        chat_format=chat_format,
      ),
      Admin(service, self._sessions, self._metrics, self._replica),
      self._metrics,
      token=self._token,
      more=more,
    )
    self._socket = listen(self._config.host, self._config.port, "serving.port")
    self.http_port: int = self._socket.getsockname()[1]
    self.grpc_port: int | None = None
    self.stuck = False
    self._http = HttpServer(
      app,
      connections=self._config.max_requests + _SPARE_CONNECTIONS,
      drain_seconds=self._config.drain_seconds,
    )

  async def run(
    self,
    should_stop: Callable[[], bool] = lambda: False,
    on_bound: Callable[[], None] = lambda: None,
  ) -> None:
    """Serves until asked to stop; then running requests get their time.

    Args:
      should_stop: asked a few times a second.
      on_bound: called when all ports are taken.

    Raises:
      OSError: the gRPC port is taken.
    """
    grpc = None
    if self._config.grpc_port >= 0:
      grpc, self.grpc_port = grpc_service.build(
        self._service, token=self._token
      )
      await grpc.start()
    self._service.start()
    on_bound()
    tasks = [asyncio.create_task(self._serve_http())]
    if self._replica is not None:
      tasks.append(asyncio.create_task(self._replica.follow()))
    try:
      while not should_stop() and not any(t.done() for t in tasks):
        self._sessions.expire()
        await asyncio.sleep(0.2)
      await self._drain(should_stop)
    finally:
      self._http.should_exit = True
      ended = await asyncio.to_thread(self._service.stop, _STOP_SECONDS)
      self.stuck = not ended
      if grpc is not None:
        await grpc.stop(grace=1)
      for task in tasks[1:]:
        task.cancel()
      await asyncio.gather(*tasks[1:], return_exceptions=True)
      await tasks[0]

  async def _drain(self, should_stop: Callable[[], bool]) -> None:
    self._service.drain()
    seconds = self._config.drain_seconds if should_stop() else 0
    if not await self._service.drained(seconds):
      logging.warning("requests still ran after %s s", seconds)

  async def _serve_http(self) -> None:
    with contextlib.closing(self._socket):
      await self._http.serve(sockets=[self._socket])
