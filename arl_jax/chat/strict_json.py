"""JSON objects that a model or a client wrote: strict and bounded.

Python's own parser takes NaN, lets the last of two equal keys win and recurses
as deep as a text wants it to. None of that is an object that two programs
would read alike.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 32
MAX_CHARS = 1 << 20

# Strings whole, so that brackets in them don't count. Linear: an unclosed
# string matches up to the end of the text.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_object(text: str) -> tuple[dict[str, Any], dict[str, str]]:
  """Parses a text that is exactly one JSON object.

  Args:
    text: at most `MAX_CHARS` characters, nested at most `MAX_DEPTH` deep.

  Returns:
    The object, and for each of its keys the value as the text spells it.

  Raises:
    ValueError: it isn't one. Also for a key that is there twice at any depth,
      numbers that no float has, and halves of surrogate pairs.
  """
  if len(text) > MAX_CHARS:
    raise ValueError(f"{len(text)} characters, must be at most {MAX_CHARS}")
  _check_depth(text)
  at = _skip(text, 0)
  if text[at : at + 1] != "{":
    raise ValueError("not a JSON object")
  value: dict[str, Any] = {}
  spelled: dict[str, str] = {}
  at = _skip(text, at + 1)
  while text[at : at + 1] != "}":
    if value:
      at = _skip(text, _expect(text, at, ","))
    if text[at : at + 1] != '"':
      raise ValueError(f"not JSON: a key must stand at character {at}")
    key, at = _value(text, at)
    if key in value:
      raise ValueError(f"the key {key!r:.80} is there twice")
    start = _skip(text, _expect(text, _skip(text, at), ":"))
    value[key], at = _value(text, start)
    spelled[key] = text[start:at]
    at = _skip(text, at)
  if _skip(text, at + 1) != len(text):
    raise ValueError("text after the JSON object")
  check_text(value)
  return value, spelled


def check_text(value: Any) -> None:
  """Raises ValueError if a string in `value` has half of a surrogate pair."""
  pending = [value]
  while pending:
    top = pending.pop()
    if isinstance(top, str) and _SURROGATE.search(top):
      raise ValueError("half of a surrogate pair is no text")
    if isinstance(top, dict):
      pending += [*top.keys(), *top.values()]
    elif isinstance(top, (list, tuple)):
      pending += top


def measure(value: Any, limit: int) -> None:
  """Checks a parsed JSON value before anything recurses into it.

  Raises:
    ValueError: nested deeper than `MAX_DEPTH`, more than `limit` characters
      (16 for what isn't a string), a number that isn't finite, or a type that
      JSON doesn't have.
  """
  pending, size = [(value, 1)], 0
  while pending:
    top, depth = pending.pop()
    if depth > MAX_DEPTH + 1:
      raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(top, dict):
      if not all(isinstance(k, str) for k in top):
        raise ValueError("a key isn't a string")
      size += sum(map(len, top))
      pending += [(v, depth + 1) for v in top.values()]
    elif isinstance(top, list):
      pending += [(v, depth + 1) for v in top]
    elif isinstance(top, float) and not math.isfinite(top):
      raise ValueError(f"{top} isn't a JSON number")
    elif not (top is None or isinstance(top, (str, bool, int, float))):
      raise ValueError(f"a {type(top).__name__} isn't JSON")
    size += len(top) if isinstance(top, str) else 16
    if size > limit:
      raise ValueError(f"must be at most {limit} characters")


def _check_depth(text: str) -> None:
  depth = 0
  for match in _BRACKETS.finditer(text):
    if match[0] in "[{":
      depth += 1
      if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    elif match[0] in "]}":
      depth -= 1


def _skip(text: str, at: int) -> int:
  match = _SPACE.match(text, at)
  return match.end() if match else at


def _expect(text: str, at: int, sign: str) -> int:
  if text[at : at + 1] != sign:
    raise ValueError(f"not JSON: {sign!r} must stand at character {at}")
  return at + 1


def _value(text: str, at: int) -> tuple[Any, int]:
  try:
    return _DECODER.raw_decode(text, at)
  except json.JSONDecodeError as error:
    raise ValueError(
      f"not JSON: {error.msg.lower()} at character {error.pos}"
    ) from None
  except RecursionError:
    raise ValueError(f"nested deeper than {MAX_DEPTH}") from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) != len(pairs):
    seen: set[str] = set()
    for key, _ in pairs:
      if key in seen:
        raise ValueError(f"the key {key!r:.80} is there twice")
      seen.add(key)
  return value


def _number(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"the number {text:.40} is too large")
  return value


def _integer(text: str) -> int:
  if len(text) > 400:
    raise ValueError(f"the number {text:.40}... is too large")
  return int(text)


def _constant(name: str) -> Any:
  raise ValueError(f"{name} isn't JSON")


_DECODER = json.JSONDecoder(
  object_pairs_hook=_pairs,
  parse_float=_number,
  parse_int=_integer,
  parse_constant=_constant,
)
