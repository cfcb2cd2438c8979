"""A chat model behind an OpenAI-compatible endpoint, which nobody trusts.

An answer is bounded in bytes and in seconds, read strictly, and one JSON object
or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from arl_jax.chat.strict_json import parse_object
from arl_jax.data.json_lines import parse_json
from arl_jax.data.synthesis.draft import AuthorFailed, Refused
from arl_jax.serving.json_endpoint import JsonEndpoint, NoAnswer, TooLarge

_PATH = "/chat/completions"
_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_THOUGHT = "</think>"


class ChatEndpoint:
  """Asks for JSON objects; `async with` closes the connections."""

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
    try:
      return read_answer(await self._endpoint.post(body))
    except TooLarge as error:
      raise Refused("answer_too_large", str(error)) from error
    except NoAnswer as error:
      raise AuthorFailed(str(error)) from error


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
