"""Errors as HTTP tells them: a status, and JSON that names the field."""

from __future__ import annotations

import asyncio
from typing import Any

from absl import logging
from starlette.responses import JSONResponse

from arl_jax.rollout.request import Overloaded, RequestFailed, RequestTimeout
from arl_jax.serving.body import Malformed
from arl_jax.serving.sessions import UnknownSession
from arl_jax.serving.stream import Aborted, Unavailable

# Seconds until a client should try again.
_LATER = {"retry-after": "1"}
# What the API calls the fields of a request inside.
_API_NAMES = {
  "ids": "prompt",
  "stop_ids": "stop_token_ids",
  "stop_strings": "stop",
  "forbidden": "forbidden_token_ids",
}
_NAMES = (
  *("messages", "tools", "prompt", "max_tokens", "temperature", "top_k"),
  *("top_p", "min_p", "seed", "logit_bias", "timeout", "version", "session"),
)
_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
  (UnknownSession, 404, "not_found_error"),
  (ValueError, 400, "invalid_request_error"),
  (Overloaded, 429, "overloaded_error"),
  (Unavailable, 503, "unavailable_error"),
  (RequestTimeout, 504, "timeout_error"),
  (asyncio.TimeoutError, 408, "timeout_error"),
  (Aborted, 410, "aborted_error"),
  (RequestFailed, 500, "server_error"),
)


class HttpError(Exception):
  """An error with a status of its own."""

  def __init__(
    self, status: int, message: str, *, field: str = "", code: str | None = None
  ):
    super().__init__(message)
    self.status, self.field, self.code = status, field, code


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
  """Status and body of an error; what nobody expected tells nothing inside."""
  if isinstance(error, HttpError):
    kind = "invalid_request_error"
    return error.status, _body(error, kind, error.field, error.code)
  for known, status, kind in _STATUS:
    if isinstance(error, known):
      field = _field(error) if status == 400 else ""
      return status, _body(error, kind, field)
  logging.error("a request failed", exc_info=error)
  hidden = RuntimeError("the server failed at this request; its log says why")
  return 500, _body(hidden, "server_error", "")


def response(error: Exception) -> JSONResponse:
  status, body = describe(error)
  later = _LATER if status in (429, 503) else None
  return JSONResponse(body, status, headers=later)


def _body(
  error: Exception, kind: str, field: str, code: str | None = None
) -> dict[str, Any]:
  message = " ".join(str(error).split())[:1000]
  if field and not message.startswith(field):
    message = f"{field}: {message}"
  return {
    "error": {
      "message": message,
      "type": kind,
      "param": field or None,
      "code": code,
    }
  }


def _field(error: Exception) -> str:
  if isinstance(error, Malformed):
    return error.field
  # Messages of others begin with the field, or with its path.
  first = str(error).split(" ", 1)[0].rstrip(":")
  name = first.split(".")[0].split("[")[0]
  return first if name in _NAMES else _API_NAMES.get(name, "")
