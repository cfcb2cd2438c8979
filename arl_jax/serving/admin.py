"""Endpoints for those who run the server."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from arl_jax.records import to_json
from arl_jax.serving.body import Body, parse_object
from arl_jax.serving.http_errors import HttpError
from arl_jax.serving.metrics import Metrics
from arl_jax.serving.receiving import read_body
from arl_jax.serving.recorder import Recording
from arl_jax.serving.replica import Replica
from arl_jax.serving.service import Service
from arl_jax.serving.sessions import Sessions, UnknownSession, episode

_DEAD = ("failed", "stopped")


class Admin:
  """Health, metrics, weights, and what sessions recorded."""

  def __init__(
    self,
    service: Service,
    sessions: Sessions,
    metrics: Metrics,
    replica: Replica | None,
  ):
    self._service, self._sessions = service, sessions
    self._metrics, self._replica = metrics, replica

  async def health(self, request: Request) -> Response:
    """GET /health: 200 as long as a restart would change nothing."""
    state = self._service.load().state
    return JSONResponse({"state": state}, 503 if state in _DEAD else 200)

  async def ready(self, request: Request) -> Response:
    """GET /ready: 200 if requests are taken."""
    state = self._service.load().state
    return JSONResponse({"state": state}, 200 if state == "serving" else 503)

  async def metrics(self, request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    return PlainTextResponse(
      self._metrics.text(), media_type="text/plain; version=0.0.4"
    )

  async def load(self, request: Request) -> Response:
    """GET /admin/load."""
    return JSONResponse(self._load_json())

  async def pause(self, request: Request) -> Response:
    """POST /admin/pause: requests wait."""
    self._service.pause()
    return JSONResponse({"state": "paused"})

  async def drain(self, request: Request) -> Response:
    """POST /admin/drain: those that run go on, new ones are refused."""
    self._service.drain()
    return JSONResponse({"state": "draining"})

  async def resume(self, request: Request) -> Response:
    """POST /admin/resume: as before `pause` or `drain`."""
    self._service.resume()
    return JSONResponse({"state": "serving"})

  async def weights(self, request: Request) -> Response:
    """POST /admin/weights {"version": n}: serves it and follows no other.

    Without a version: takes the newest and follows again.
    """
    if self._replica is None:
      raise HttpError(409, "the server has no serving.weights to load from")
    fields = parse_object(await self._body(request))
    body = Body(fields)
    number = body.integer("version")
    body.finish()
    version = await self._replica.load(number)
    return JSONResponse(
      {
        "version": version.number,
        "lineage": version.lineage,
        "checksum": version.checksum,
      }
    )

  async def abort(self, request: Request) -> Response:
    """DELETE /v1/requests/{id}, of an answer: its client is told so."""
    name = request.path_params["id"]
    # One that is done has left a gap among the choices.
    most = self._service.config.max_choices
    choices = [f"{name}.{i}" for i in range(most)]
    aborted = [self._service.abort(choice) for choice in (name, *choices)]
    if not any(aborted):
      raise HttpError(404, f"no request {name[:80]!r} is running", field="id")
    return JSONResponse({"id": name, "aborted": True})

  async def session(self, request: Request) -> Response:
    """GET /v1/sessions/{session}: its episode so far."""
    name = request.path_params["session"]
    return await _record(name, self._sessions.get(name), {})

  async def finish(self, request: Request) -> Response:
    """POST /v1/sessions/{session}/finish: its episode, and forgets it."""
    name = request.path_params["session"]
    fields = parse_object(await self._body(request))
    # Before anything is lost.
    answer = await _record(name, self._sessions.get(name), fields)
    self._sessions.close(name)
    return answer

  async def delete(self, request: Request) -> Response:
    """DELETE /v1/sessions/{session}: forgets it, if it's there."""
    name = request.path_params["session"]
    try:
      self._sessions.close(name)
    except UnknownSession:
      # Plain sessions aren't recorded, but may hold a slot.
      self._service.close_session(name)
    return JSONResponse({"session": name, "deleted": True})

  async def _body(self, request: Request) -> bytes:
    return await read_body(request, self._service.config.max_body_bytes)

  def _load_json(self) -> dict[str, object]:
    version = self._replica.serving if self._replica else None
    return {
      **dataclasses.asdict(self._service.load()),
      "sessions": len(self._sessions),
      "lineage": version.lineage if version else None,
      "checksum": version.checksum if version else None,
    }


async def _record(
  name: str, recording: Recording, fields: dict[str, Any]
) -> Response:
  # A million tokens take long to write, and others wait for the loop.
  return await asyncio.to_thread(
    lambda: JSONResponse(to_json(episode(name, recording, fields)))
  )
