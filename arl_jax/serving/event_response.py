"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import StreamingResponse

from arl_jax.serving.http_errors import describe
from arl_jax.serving.receiving import gone


class EventResponse(StreamingResponse):
  """Server-sent events; an error amid them is the last one."""

  def __init__(
    self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]
  ):
    super().__init__(
      self._lines(first, rest),
      media_type="text/event-stream",
      headers={"cache-control": "no-cache"},
    )

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Also notices a client that leaves while nothing is sent."""
    sending = asyncio.ensure_future(self.stream_response(send))
    watch = asyncio.ensure_future(gone(receive))
    try:
      await asyncio.wait({sending, watch}, return_when=asyncio.FIRST_COMPLETED)
      if sending.done():
        sending.result()
    finally:
      watch.cancel()
      sending.cancel()
      await asyncio.gather(sending, watch, return_exceptions=True)

  async def _lines(
    self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]
  ) -> AsyncGenerator[bytes, None]:
    try:
      yield _line(first)
      async for event in rest:
        yield _line(event)
    except Exception as error:
      yield _line(describe(error)[1])
    finally:
      await rest.aclose()
    yield b"data: [DONE]\n\n"


def _line(event: dict[str, Any]) -> bytes:
  text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
  return b"data: " + text.encode("utf-8", "backslashreplace") + b"\n\n"
