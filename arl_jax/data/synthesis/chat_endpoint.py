"""A chat model behind an OpenAI-compatible endpoint, which nobody trusts.

An answer is bounded in bytes and in seconds, read strictly, and one JSON object
or nothing.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from arl_jax.chat.strict_json import parse_object
from arl_jax.data.json_lines import parse_json
from arl_jax.data.synthesis.draft import AuthorFailed, Refused

_CONNECT_SECONDS = 10.0
# Seconds between tries grow from the first to the last of these.
_WAITS = (0.2, 10.0)
_BUSY = (408, 429)
_PATH = "/chat/completions"
_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_THOUGHT = "</think>"


class ChatEndpoint:
  """Asks for JSON objects; `async with` closes the connections.

  Attributes:
    requests: that were sent.
    retries: of them, those that were sent again.
  """

  def __init__(
    self,
    url: str,
    *,
    model: str = "default",
    token: str = "",
    concurrency: int = 8,
    timeout: float = 120.0,
    tries: int = 4,
    max_tokens: int = 2048,
    max_bytes: int = 1 << 20,
    temperature: float = 1.0,
  ):
    """Makes a client.

    Args:
      url: of the server, such as "http://10.0.0.7:8000", with or without /v1.
      model: name that the requests carry.
      token: that the server wants.
      concurrency: requests at a time.
      timeout: seconds for an answer, from the first byte sent to the last one
        received.
      tries: of a request that finds no server, a busy one, or none in time.
      max_tokens: of an answer.
      max_bytes: of an answer's body.
      temperature: of sampling.

    Raises:
      ValueError: the url isn't one of HTTP, or a number is out of its range.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
      raise ValueError(f"url is {url!r}; it must be like http://10.0.0.7:8000")
    for name, value in (
      ("concurrency", concurrency),
      ("tries", tries),
      ("max_tokens", max_tokens),
      ("max_bytes", max_bytes),
    ):
      if value < 1:
        raise ValueError(f"{name} is {value}, not at least 1")
    if not timeout > 0:
      raise ValueError(f"timeout is {timeout}, not above 0")
    base = url.rstrip("/").removesuffix(_PATH)
    self._url = (base if base.endswith("/v1") else base + "/v1") + _PATH
    self._model, self._temperature = model, temperature
    self._timeout, self._tries = timeout, tries
    self._max_tokens, self._max_bytes = max_tokens, max_bytes
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
    )

  async def __aenter__(self) -> ChatEndpoint:
    return self

  async def __aexit__(self, *_: Any) -> None:
    await self._http.aclose()

  async def ask(
    self, messages: Sequence[Mapping[str, str]], *, seed: int
  ) -> dict[str, Any]:
    """The JSON object that a model answers with.

    Raises:
      Refused: "answer_too_large", "answer_cut" or "malformed_answer".
      AuthorFailed: no answer came, with all tries.
    """
    body = {
      "model": self._model,
      "messages": [dict(message) for message in messages],
      "max_tokens": self._max_tokens,
      "temperature": self._temperature,
      "seed": seed,
    }
    return read_answer(await self._post(body))

  async def _post(self, body: Mapping[str, Any]) -> bytes:
    wait = _WAITS[0]
    async with self._slots:
      for left in range(self._tries - 1, -1, -1):
        self.requests += 1
        try:
          return await self._once(body)
        except _TryAgain as error:
          if not left:
            raise AuthorFailed(str(error)) from error
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
        self._http.stream("POST", self._url, json=body) as response,
      ):
        async for piece in response.aiter_raw():
          held += piece
          if len(held) > self._max_bytes:
            raise Refused("answer_too_large", f"over {self._max_bytes} bytes")
    except TimeoutError:
      raise _TryAgain(f"{self._url}: nothing in {self._timeout} s") from None
    except httpx.TransportError as error:
      reason = str(error) or type(error).__name__
      raise _TryAgain(f"{self._url}: {reason}") from error
    status = response.status_code
    if status == 200:
      return bytes(held)
    reason = " ".join(held[:200].decode("utf-8", "replace").split())
    message = f"{self._url}: {status}, {reason or 'no reason given'}"
    if status >= 500 or status in _BUSY:
      raise _TryAgain(message)
    raise AuthorFailed(message)


@functools.cache
def _certificates() -> ssl.SSLContext:
  """Shared, as reading them takes long."""
  return httpx.create_ssl_context()


class _TryAgain(Exception):
  """A request that may succeed another time."""


def read_answer(body: bytes) -> dict[str, Any]:
  """The object in a chat completion's message.

  Around it there may be white space, thoughts that end with </think>, and one
  fence of three backticks.

  Raises:
    Refused: there is none, or the answer was cut.
  """
  try:
    (choice,) = parse_json(body, "answer")["choices"]
    text, finish = choice["message"]["content"], choice.get("finish_reason")
    if not isinstance(text, str):
      raise TypeError("content is no text")
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise Refused("malformed_answer", f"no chat completion: {error}") from error
  if finish == "length":
    raise Refused("answer_cut", text[-100:])
  text = text.rpartition(_THOUGHT)[2].strip()
  if fenced := _FENCED.fullmatch(text):
    text = fenced[1]
  try:
    found, _ = parse_object(text)
  except (ValueError, RecursionError) as error:
    raise Refused("malformed_answer", f"{error}: {text[:100]}") from error
  return found
