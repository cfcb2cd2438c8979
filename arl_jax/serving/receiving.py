"""Bodies of requests, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from arl_jax.serving.http_errors import HttpError

T = TypeVar("T")

# A body that takes longer comes from nobody who wants an answer.
_BODY_SECONDS = 60.0


async def read_body(
  request: Request, most: int, wanted: str = "application/json"
) -> bytes:
  """The body of a request.

  Args:
    request: not read yet.
    most: bytes.
    wanted: content type.

  Raises:
    HttpError: it is too large, takes too long, or doesn't say that it's what is
      wanted. A page in a browser can send plain types to addresses of this
      machine.
  """
  kind = request.headers.get("content-type", "").partition(";")[0].strip()
  if kind.lower() != wanted:
    raise HttpError(415, f"content-type is {kind[:80]!r}, not {wanted!r}")
  too_large = HttpError(413, f"the body is larger than {most} bytes")
  declared = request.headers.get("content-length", "0")
  if declared.isdigit() and int(declared[:20]) > most:
    raise too_large
  parts: list[bytes] = []
  size = 0
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      async for part in request.stream():
        size += len(part)
        if size > most:
          raise too_large
        parts.append(part)
  except TimeoutError as error:
    raise HttpError(408, f"the body took over {_BODY_SECONDS} s") from error
  return b"".join(parts)


async def until_gone(
  request: Request,
  work: Awaitable[T],
  on_gone: Callable[[], Awaitable[Any]] | None = None,
) -> T:
  """Waits for work as long as the client does.

  Raises:
    ClientDisconnect: the client left; the work is cancelled.
    Whatever the work raises.
  """
  task = asyncio.ensure_future(work)
  watch = asyncio.ensure_future(gone(request.receive))
  try:
    await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
      return task.result()
    raise ClientDisconnect
  finally:
    watch.cancel()
    if not task.done():
      task.cancel()
      await asyncio.gather(task, return_exceptions=True)
      if on_gone is not None:
        await on_gone()


async def gone(receive: Callable[[], Awaitable[Any]]) -> None:
  """Returns when the client has left."""
  while (await receive())["type"] != "http.disconnect":
    pass
