"""Strict reading of a request's JSON body."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Collection
from typing import Any

from arl_jax.chat.strict_json import check_text

# Of a field's name in a message; clients may make up any.
_SHOWN = 80
# That end a request, or are forbidden or biased in it.
MAX_IDS = 1 << 16
# Nobody's request is nested deeper.
_MAX_DEPTH = 64


class Malformed(ValueError):
  """A field that can't be.

  Attributes:
    field: its name, "" for the body as a whole.
  """

  def __init__(self, field: str, problem: str):
    if len(field) > _SHOWN:
      field = f"{field[: _SHOWN - 3]}..."
    super().__init__(f"{field}: {problem}" if field else problem)
    self.field = field


def parse_object(text: bytes) -> dict[str, Any]:
  """A JSON object.

  Raises:
    Malformed: it is none, repeats a name, holds NaN or half of a surrogate
      pair, or is nested too deep.
  """
  try:
    value = json.loads(
      text.decode("utf-8"),
      object_pairs_hook=_distinct,
      parse_constant=_refuse_constant,
      parse_float=_finite,
    )
    # Only an escape can be half a pair. No answer could say it.
    if b"\\u" in text:
      check_text(value)
  except UnicodeDecodeError as error:
    raise Malformed("", f"the body isn't UTF-8: {error.reason}") from error
  except Malformed:
    raise
  # Also of integers with thousands of digits.
  except (ValueError, RecursionError) as error:
    raise Malformed("", f"the body isn't JSON: {error}") from error
  if not isinstance(value, dict):
    raise Malformed("", f"the body is {kind(value)}, not an object")
  _check_depth(value)
  return value


class Body:
  """Takes fields one by one, so that what is left over can be refused."""

  def __init__(self, fields: dict[str, Any]):
    self._left = dict(fields)

  def take(
    self,
    name: str,
    right: Callable[[Any], bool],
    wanted: str,
    default: Any = None,
  ) -> Any:
    """A field; null and a missing one are `default`.

    Raises:
      Malformed: it isn't `right`; says what is `wanted`.
    """
    value = self._left.pop(name, None)
    if value is None:
      return default
    if not right(value):
      raise Malformed(name, f"{shown(value)} isn't {wanted}")
    return value

  def integer(
    self, name: str, default: Any = None, low: int = 0, high: int = 2**31 - 1
  ) -> Any:
    return self.take(
      name,
      lambda x: type(x) is int and low <= x <= high,
      f"an integer in {low}..{high}",
      default,
    )

  def number(self, name: str, default: Any, low: float, high: float) -> Any:
    return self.take(
      name,
      lambda x: type(x) in (int, float) and low <= x <= high,
      f"a number in {low}..{high}",
      default,
    )

  def flag(self, name: str, default: bool = False) -> bool:
    return self.take(name, lambda x: type(x) is bool, "true or false", default)

  def text(self, name: str, default: Any = None, longest: int = 256) -> Any:
    return self.take(
      name,
      lambda x: type(x) is str and len(x) <= longest,
      f"a text of at most {longest} characters",
      default,
    )

  def token_ids(self, name: str, default: Any) -> Any:
    found = self.take(
      name,
      lambda x: is_token_ids(x) and len(x) <= MAX_IDS,
      f"a list of at most {MAX_IDS} token ids",
    )
    return default if found is None else tuple(found)

  def only(self, name: str, values: Collection[Any], why: str) -> None:
    """Refuses whatever asks for something that isn't there."""
    found = self._left.pop(name, None)
    if found is not None and not any(
      found == v and type(found) is type(v) for v in values
    ):
      raise Malformed(name, f"{shown(found)} isn't supported: {why}")

  def skip(self, *names: str) -> None:
    """Takes fields that change nothing."""
    for name in names:
      self._left.pop(name, None)

  def finish(self) -> None:
    """Raises Malformed if anything is left."""
    if self._left:
      raise Malformed(min(self._left), "no such field")


def is_token_ids(x: Any) -> bool:
  return type(x) is list and all(type(i) is int for i in x)


def shown(value: Any) -> str:
  """A value in a message, in bounds."""
  text = json.dumps(value) if isinstance(value, str) else str(value)
  return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def kind(value: Any) -> str:
  names = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "a truth value",
    type(None): "null",
  }
  return names.get(type(value), "a number")


def _check_depth(value: Any) -> None:
  """The parser bounds depth by the whole stack; others need some of it."""
  level = [value]
  for _ in range(_MAX_DEPTH):
    inner: list[Any] = []
    for outer in level:
      children = outer.values() if isinstance(outer, dict) else outer
      inner += [c for c in children if isinstance(c, dict | list)]
    if not inner:
      return
    level = inner
  raise Malformed("", f"the body is nested deeper than {_MAX_DEPTH}")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    counts = collections.Counter(name for name, _ in pairs)
    twice = next(n for n, count in counts.items() if count > 1)
    twice = twice.encode("utf-8", "backslashreplace").decode()
    raise Malformed(twice, "the name stands twice in one object")
  return found


def _refuse_constant(name: str) -> float:
  raise Malformed("", f"the body isn't JSON: {name}")


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise Malformed("", f"the body holds {text[:20]}, beyond any number")
  return value
