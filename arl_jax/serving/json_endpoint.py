"""Somebody's HTTP endpoint that takes and gives JSON; nobody trusts it."""

from __future__ import annotations

import asyncio
import functools
import random
import ssl
import urllib.parse
from collections.abc import Mapping
from typing import Any

import httpx

_CONNECT_SECONDS = 10.0
# Seconds between tries grow from the first to the last of these.
_WAITS = (0.2, 10.0)
_BUSY = (408, 429)


class NoAnswer(OSError):
  """The endpoint refuses, or gave no answer with all tries."""


class TooLarge(ValueError):
  """An answer has more bytes than it may."""


class JsonEndpoint:
  """Posts to one address; answers are bounded in bytes and in seconds.

  Attributes:
    url: that is posted to.
    requests: that were sent.
    retries: of them, those that were sent again.
  """

  def __init__(
    self,
    url: str,
    *,
    token: str = "",
    concurrency: int = 8,
    timeout: float = 120.0,
    tries: int = 4,
    max_bytes: int = 1 << 20,
    transport: httpx.AsyncBaseTransport | None = None,
  ):
    """Connects to nothing yet.

    Args:
      url: that is posted to.
      token: that the server wants; empty sends none.
      concurrency: requests at a time.
      timeout: seconds for an answer, from the first byte sent to the last one
        received.
      tries: of a request that finds no server, a busy one, or none in time.
      max_bytes: of an answer's body.
      transport: of HTTP; the network's by default.

    Raises:
      ValueError: the url isn't one of HTTP, or a number is out of its range.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
      raise ValueError(f"url is {url!r}; it must be like http://10.0.0.7:8000")
    for name, value in (
      ("concurrency", concurrency),
      ("tries", tries),
      ("max_bytes", max_bytes),
    ):
      if value < 1:
        raise ValueError(f"{name} is {value}, not at least 1")
    if not timeout > 0:
      raise ValueError(f"timeout is {timeout}, not above 0")
    self.url = url
    self._timeout, self._tries, self._max_bytes = timeout, tries, max_bytes
    self._slots = asyncio.Semaphore(concurrency)
    self.requests = self.retries = 0
    # What arrives is counted as it comes, so that it may not be compressed.
    headers = {"accept-encoding": "identity"}
    if token:
      headers["authorization"] = f"Bearer {token}"
    self._http = httpx.AsyncClient(
      headers=headers,
      timeout=httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS)),
      limits=httpx.Limits(max_connections=concurrency),
      follow_redirects=False,
      verify=_certificates(),
      transport=transport,
    )

  async def close(self) -> None:
    """Ends the connections."""
    await self._http.aclose()

  async def post(self, body: Mapping[str, Any]) -> bytes:
    """The body of an answer.

    Raises:
      TooLarge: it has too many bytes.
      NoAnswer: the endpoint refuses, or there was none, with all tries.
    """
    wait = _WAITS[0]
    async with self._slots:
      for left in range(self._tries - 1, -1, -1):
        self.requests += 1
        try:
          return await self._once(body)
        except _TryAgain as error:
          if not left:
            raise NoAnswer(str(error)) from error
        self.retries += 1
        # Apart from each other, or all come back at once.
        await asyncio.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, _WAITS[1])
    raise AssertionError("unreachable: the last try returns or raises")

  async def _once(self, body: Mapping[str, Any]) -> bytes:
    held = bytearray()
    try:
      # The client's own time-outs begin anew with every byte.
      async with (
        asyncio.timeout(self._timeout),
        self._http.stream("POST", self.url, json=body) as response,
      ):
        async for piece in response.aiter_raw():
          held += piece
          if len(held) > self._max_bytes:
            raise TooLarge(f"over {self._max_bytes} bytes")
    except TimeoutError:
      raise _TryAgain(f"{self.url}: nothing in {self._timeout} s") from None
    except httpx.TransportError as error:
      reason = str(error) or type(error).__name__
      raise _TryAgain(f"{self.url}: {reason}") from error
    status = response.status_code
    if status == 200:
      return bytes(held)
    reason = " ".join(held[:200].decode("utf-8", "replace").split())
    message = f"{self.url}: {status}, {reason or 'no reason given'}"
    if status >= 500 or status in _BUSY:
      raise _TryAgain(message)
    raise NoAnswer(message)


@functools.cache
def _certificates() -> ssl.SSLContext:
  """Shared, as reading them takes long."""
  return httpx.create_ssl_context()


class _TryAgain(Exception):
  """A request that may succeed another time."""
