"""What an actor and its environment workers tell each other over pipes.

A message is a JSON object behind its length, four bytes, most significant
first. Imports no jax.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

from arl_jax.types import Block, Episode, Observation

# Of a message; more is a mistake of whoever sends it.
MOST_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


def pack(message: Mapping[str, Any]) -> bytes:
  """A message with its length before it.

  Raises:
    ValueError: it is too long, or holds what JSON has no form for.
  """
  try:
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(f"a message isn't of JSON values: {error}") from error
  if len(body) > MOST_BYTES:
    raise ValueError(
      f"a message has {len(body)} bytes; at most {MOST_BYTES} are sent"
    )
  return _LENGTH.pack(len(body)) + body


def read_blocking(file: BinaryIO) -> dict[str, Any] | None:
  """The next message; None at the end. Raises ValueError for what is none."""
  head = file.read(_LENGTH.size)
  if len(head) < _LENGTH.size:
    return None
  length = _length(head)
  body = file.read(length)
  return _parse(body) if len(body) == length else None


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
  """The next message; None at the end. Raises ValueError for what is none."""
  try:
    length = _length(await reader.readexactly(_LENGTH.size))
    return _parse(await reader.readexactly(length))
  except (asyncio.IncompleteReadError, ConnectionError):
    return None


def _length(head: bytes) -> int:
  (length,) = _LENGTH.unpack(head)
  if length > MOST_BYTES:
    raise ValueError(f"a message of {length} bytes; at most {MOST_BYTES}")
  return length


def _parse(body: bytes) -> dict[str, Any]:
  try:
    message = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"a message is no JSON: {error}") from error
  if not isinstance(message, dict):
    raise ValueError(f"a message is a {type(message).__name__}, not an object")
  return message


def observation_json(observation: Observation) -> dict[str, Any]:
  return {
    "blocks": [[b.text, b.key] for b in observation.blocks],
    "remove": list(observation.remove),
    "error": observation.error,
    "data": dict(observation.data),
  }


def observation(data: Any) -> Observation:
  """Inverse of `observation_json`. Raises ValueError for what is none."""
  try:
    return Observation(
      blocks=tuple(
        Block(text=string(text), key=None if key is None else string(key))
        for text, key in data["blocks"]
      ),
      remove=tuple(string(key) for key in data["remove"]),
      error=None if data["error"] is None else string(data["error"]),
      data={string(k): v for k, v in data["data"].items()},
    )
  except (TypeError, KeyError, AttributeError) as error:
    raise ValueError(f"malformed observation: {error!r}") from error


def string(value: Any) -> str:
  if not isinstance(value, str):
    raise ValueError(f"{value!r:.80} is no string")
  return value


def for_reward(episode: Episode) -> Episode:
  """Without the recorded experts, which are large and no reward reads."""
  return dataclasses.replace(
    episode,
    segments=tuple(
      dataclasses.replace(s, experts=None) for s in episode.segments
    ),
  )
