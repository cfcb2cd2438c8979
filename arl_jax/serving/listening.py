"""What every HTTP server of the project does alike. Imports no jax."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request

from arl_jax.serving.http_errors import HttpError


class HttpServer(uvicorn.Server):
  """Serves an application; leaves signals and logging to the program."""

  def __init__(self, app: Starlette, *, connections: int, drain_seconds: float):
    """Serves nothing yet.

    Args:
      app: to serve.
      connections: at a time; others are told to come again.
      drain_seconds: that running requests get to end when the server stops.
    """
    super().__init__(
      uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=connections,
        timeout_graceful_shutdown=max(1, round(drain_seconds)),
        lifespan="off",
      )
    )

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    yield


def listen(host: str, port: int, field: str) -> socket.socket:
  """A socket that listens.

  Raises:
    OSError: names the field whose port is taken.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  found = socket.socket(family)
  found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    found.bind((host, port))
    # Or two servers could have one port until the first client comes.
    found.listen()
  except OSError as error:
    found.close()
    raise OSError(
      error.errno, f"{field} {port} of {host} can't be had: {error}"
    ) from error
  return found


def check_token(request: Request, token: str) -> None:
  """Raises HttpError unless a request brings the token, if there is one."""
  if not token:
    return
  given = request.headers.get("authorization", "")
  scheme, _, found = given.partition(" ")
  right = hmac.compare_digest(found.strip().encode(), token.encode())
  if scheme.lower() != "bearer" or not right:
    raise HttpError(
      401, "the header 'authorization' must be 'Bearer ' and the token"
    )
