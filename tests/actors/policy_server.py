"""A rollout server without a model, as actors see it."""

import asyncio
import contextlib
import json
import urllib.parse

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.routing import Route

from arl_jax.serving.listening import HttpServer, listen
from arl_jax.serving.receiving import until_gone


class PolicyServer:
  """Replies by `reply(ids, seed)`; remembers what it was asked.

  Attributes:
    lineage, version: of the "weights"; others are unavailable.
    gate: while it is unset, replies are held back.
    asked: bodies of requests that were answered.
    open: sessions that weren't closed.
    most: requests at a time.
  """

  def __init__(self, reply, *, lineage="a", version=0):
    self.reply, self.lineage, self.version = reply, lineage, version
    self.gate = asyncio.Event()
    self.gate.set()
    self.asked: list[dict] = []
    self.open: set[str] = set()
    self.running = self.most = 0
    self.url = ""

  @contextlib.asynccontextmanager
  async def serving(self, port: int = 0):
    app = Starlette(
      routes=[
        Route("/v1/completions", self._complete, methods=["POST"]),
        Route("/v1/sessions/{name:path}", self._close, methods=["DELETE"]),
      ]
    )
    found = listen("127.0.0.1", port, "port")
    self.port = found.getsockname()[1]
    self.url = f"http://127.0.0.1:{self.port}"
    server = HttpServer(app, connections=10_000, drain_seconds=1)
    task = asyncio.create_task(server.serve(sockets=[found]))
    try:
      yield self
    finally:
      server.should_exit = server.force_exit = True
      _abort(server)
      with contextlib.closing(found):
        await task
      # Those that came before it was noticed would be waited for for ever.
      _abort(server)

  async def _complete(self, request):
    body = json.loads(await request.body())
    self.running += 1
    self.most = max(self.most, self.running)
    try:
      return await until_gone(request, self._answer(body))
    except ClientDisconnect:
      return JSONResponse({})
    finally:
      self.running -= 1

  async def _answer(self, body):
    if body["lineage"] != self.lineage or body["min_version"] > self.version:
      error = {"message": "other weights"}
      return JSONResponse({"error": error}, status_code=503)
    self.open.add(body["session"])
    await self.gate.wait()
    self.asked.append(body)
    ids = self.reply(body["prompt"], body["seed"])
    n = len(ids)
    tokens = {
      "ids": ids,
      "logprobs": [-0.5] * n,
      "sampled_logprobs": [-0.5] * n,
      "versions": [self.version] * n,
      "cache_versions": [self.version] * n,
      "experts": None,
      "finish": "stop_id",
    }
    return JSONResponse({"choices": [{"tokens": tokens}]})

  async def _close(self, request):
    self.open.discard(urllib.parse.unquote(request.path_params["name"]))
    return JSONResponse({})


def _abort(server):
  """As if the server's process was killed."""
  for connection in list(server.server_state.connections):
    connection.transport.abort()
