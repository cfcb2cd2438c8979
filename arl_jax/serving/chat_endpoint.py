"""A chat model behind an OpenAI-compatible endpoint, which nobody trusts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from arl_jax.chat.messages import Tool, tool_json
from arl_jax.chat.strict_json import parse_object
from arl_jax.serving.json_endpoint import JsonEndpoint

_PATH = "/chat/completions"
_THOUGHT = "</think>"


class ChatEndpoint:
  """Asks for chat completions; `async with` closes the connections."""

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
    if max_tokens < 1:
      raise ValueError(f"max_tokens is {max_tokens}, not at least 1")
    if not 0 <= temperature < math.inf:
      raise ValueError(
        f"temperature is {temperature}, not at least 0 and finite"
      )
    base = url.rstrip("/").removesuffix(_PATH)
    self._endpoint = JsonEndpoint(
      (base if base.endswith("/v1") else base + "/v1") + _PATH,
      token=token,
      concurrency=concurrency,
      timeout=timeout,
      tries=tries,
      max_bytes=max_bytes,
    )
    self._model, self._temperature = model, temperature
    self._max_tokens = max_tokens

  @property
  def requests(self) -> int:
    """That were sent."""
    return self._endpoint.requests

  @property
  def retries(self) -> int:
    """Of the requests, those that were sent again."""
    return self._endpoint.retries

  async def __aenter__(self) -> ChatEndpoint:
    return self

  async def __aexit__(self, *_: Any) -> None:
    await self._endpoint.close()

  async def complete(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    tools: Sequence[Tool] = (),
  ) -> bytes:
    """The body of a chat completion, for `read_message`.

    Args:
      messages: of the conversation, as OpenAI's API has them.
      seed: of sampling, where the endpoint knows one.
      tools: that the model may call.

    Raises:
      TooLarge: it has too many bytes.
      NoAnswer: the endpoint refuses, or there was none, with all tries.
    """
    body: dict[str, Any] = {
      "model": self._model,
      "messages": [dict(message) for message in messages],
      "max_tokens": self._max_tokens,
      "temperature": self._temperature,
      "seed": seed,
    }
    if tools:
      body["tools"] = [tool_json(tool) for tool in tools]
    return await self._endpoint.post(body)


def read_message(body: bytes) -> tuple[Mapping[str, Any], str]:
  """A completion's message, and why it ended ("" if that isn't said).

  Raises:
    ValueError: there is none.
  """
  try:
    answer, _ = parse_object(body.decode())
    (choice,) = answer["choices"]
    message, finish = choice["message"], choice.get("finish_reason")
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f"no chat completion: {error}") from error
  if not isinstance(message, dict):
    raise ValueError("no chat completion: message is no object")
  return message, finish if isinstance(finish, str) else ""


def without_thoughts(content: str) -> str:
  """What stands after thoughts that end with </think>."""
  return content.rpartition(_THOUGHT)[2].strip()
