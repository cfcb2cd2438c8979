"""Answers of a chat model that writes tasks: one JSON object, or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from arl_jax.chat.strict_json import parse_object
from arl_jax.data.synthesis.draft import AuthorFailed, Refused
from arl_jax.serving.chat_endpoint import (
  ChatEndpoint,
  read_message,
  without_thoughts,
)
from arl_jax.serving.json_endpoint import NoAnswer, TooLarge

_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


async def ask(
  chat: ChatEndpoint, messages: Sequence[Mapping[str, str]], *, seed: int
) -> dict[str, Any]:
  """The JSON object that a model answers with.

  Raises:
    Refused: "answer_too_large", "answer_cut" or "malformed_answer".
    AuthorFailed: no answer came, with all tries.
  """
  try:
    return read_answer(await chat.complete(messages, seed=seed))
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
    message, finish = read_message(body)
  except ValueError as error:
    raise Refused("malformed_answer", str(error)) from error
  text = message.get("content")
  if not isinstance(text, str):
    raise Refused("malformed_answer", "no chat completion: content is no text")
  if finish == "length":
    raise Refused("answer_cut", text[-100:])
  text = without_thoughts(text)
  if fenced := _FENCED.fullmatch(text):
    text = fenced[1]
  try:
    found, _ = parse_object(text)
  except (ValueError, RecursionError) as error:
    raise Refused("malformed_answer", f"{error}: {text[:100]}") from error
  return found
