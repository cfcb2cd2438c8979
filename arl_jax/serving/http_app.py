"""The HTTP application: which address is served by what, and to whom."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from arl_jax.serving.admin import Admin
from arl_jax.serving.http_errors import HttpError, describe, response
from arl_jax.serving.listening import check_token
from arl_jax.serving.metrics import Metrics
from arl_jax.serving.openai_api import OpenAI
from arl_jax.serving.openai_requests import check_session

Handler = Callable[[Request], Awaitable[Response]]

# Probes have no token.
_OPEN = ("/health", "/ready")


def make_app(
  openai: OpenAI,
  admin: Admin,
  metrics: Metrics,
  *,
  token: str,
  more: Sequence[tuple[str, str, Handler]] = (),
) -> Starlette:
  """Makes the application.

  Args:
    openai: handlers of OpenAI's API.
    admin: the other handlers.
    metrics: where answers are counted.
    token: that every request must bring; empty asks for none.
    more: methods, addresses and handlers of what else is served.
  """
  routes = [
    Route(path, _guarded(path, handler, metrics, token), methods=[method])
    for method, path, handler in (*_table(openai, admin), *more)
  ]
  return Starlette(
    routes=routes,
    exception_handlers={
      HTTPException: _on_http_exception,
      Exception: _on_exception,
    },
  )


def _table(openai: OpenAI, admin: Admin) -> list[tuple[str, str, Handler]]:
  chat, plain = "/chat/completions", "/completions"
  # A client that can't send a session by itself has it in its base address.
  session = "/sessions/{session:path}/v1"
  return [
    ("POST", f"/v1{chat}", openai.chat),
    ("POST", f"/v1{plain}", openai.completions),
    ("POST", f"{session}{chat}", openai.chat),
    ("POST", f"{session}{plain}", openai.completions),
    ("GET", "/v1/models", openai.models),
    ("GET", "/v1/models/{name:path}", openai.model),
    ("GET", f"{session}/models", openai.models),
    ("GET", "/v1/sessions/{session:path}", admin.session),
    ("POST", "/v1/sessions/{session:path}/finish", admin.finish),
    ("DELETE", "/v1/sessions/{session:path}", admin.delete),
    ("DELETE", "/v1/requests/{id}", admin.abort),
    ("GET", "/health", admin.health),
    ("GET", "/ready", admin.ready),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/admin/load", admin.load),
    ("POST", "/admin/pause", admin.pause),
    ("POST", "/admin/drain", admin.drain),
    ("POST", "/admin/resume", admin.resume),
    ("POST", "/admin/weights", admin.weights),
  ]


def _guarded(
  path: str, handler: Handler, metrics: Metrics, token: str
) -> Handler:
  """A handler that only those with the token reach, and that never raises."""

  @functools.wraps(handler)
  async def guarded(request: Request) -> Response:
    try:
      if path not in _OPEN:
        check_token(request, token)
      if "session" in request.path_params:
        check_session(request.path_params["session"])
      answer = await handler(request)
    except ClientDisconnect:
      # Nobody reads it; the number is for the log.
      metrics.answers.labels(path, "gone").inc()
      return Response(status_code=499)
    except Exception as error:
      answer = response(error)
    metrics.answers.labels(path, str(answer.status_code)).inc()
    return answer

  return guarded


def _on_http_exception(request: Request, error: Any) -> Response:
  """Of the router: no such address, or no such method there."""
  message = f"{request.method} {request.url.path[:200]}: {error.detail}"
  return response(HttpError(error.status_code, message))


def _on_exception(request: Request, error: Exception) -> Response:
  del request
  describe(error)
  return response(error)
