"""Regular expressions over many texts, in linear time and within bounds."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import re2

_MAX_PATTERN_CHARS = 256
_PATTERN_BYTES = 2**20
# Searched at once; between two of them the clock is looked at.
_PIECE_BYTES = 2**20
# Ends each text. No pattern matches it, as it isn't UTF-8.
END = b"\xff"

_ESCAPE = re.compile(r"\\.", re.DOTALL)


class Matches(list[str]):
  """Ids of chunks that match.

  Attributes:
    note: why it may not be all of them; empty if it is.
  """

  note: str = ""


class Pattern:
  """A compiled pattern of RE2's syntax, which ignores case."""

  def __init__(self, pattern: str):
    """Compiles it.

    Raises:
      ValueError: it is empty, longer than 256 characters, not valid RE2 or too
        large once compiled.
    """
    if not pattern or len(pattern) > _MAX_PATTERN_CHARS:
      raise ValueError(
        f"pattern has {len(pattern)} characters, not 1 to {_MAX_PATTERN_CHARS}"
      )
    self._regex = _compile(pattern)
    # Anchors mean ends of a text, and \C is any byte: not to be had by looking
    # at many texts as one.
    plain = _ESCAPE.sub("", pattern)
    self._each = (
      "^" in plain.replace("[^", "")
      or "$" in plain
      or re.search(r"\\[AzCQ]", pattern) is not None
    )

  def rows(
    self, text: memoryview, starts: np.ndarray, deadline: float
  ) -> Iterator[int]:
    """Numbers of the texts that match, in order.

    Args:
      text: of all: UTF-8, each ended by `END`.
      starts: [n + 1] where each begins, and the end of all.
      deadline: of `time.monotonic`.

    Raises:
      TimeoutError: the deadline has passed.
    """
    return (self._in_each if self._each else self._in_pieces)(
      text, starts, deadline
    )

  def _in_each(
    self, text: memoryview, starts: np.ndarray, deadline: float
  ) -> Iterator[int]:
    edges = starts.tolist()
    unseen = 0
    for row in range(len(edges) - 1):
      unseen += edges[row + 1] - edges[row]
      if unseen > _PIECE_BYTES:
        _check(deadline)
        unseen = 0
      if self._matches(text[edges[row] : edges[row + 1] - 1]):
        yield row

  def _in_pieces(
    self, text: memoryview, starts: np.ndarray, deadline: float
  ) -> Iterator[int]:
    row, rows = 0, len(starts) - 1
    while row < rows:
      _check(deadline)
      bound = int(starts[row]) + _PIECE_BYTES
      end = max(row + 1, int(np.searchsorted(starts, bound, "right")) - 1)
      limit = int(starts[end])
      while row < end:
        match = self._regex.search(text, int(starts[row]), limit)
        if match is None:
          break
        found = int(np.searchsorted(starts, match.start(), "right")) - 1
        if found >= end:
          break
        # What a piece seems to hold is held by one of its texts.
        if self._matches(text[int(starts[found]) : int(starts[found + 1]) - 1]):
          yield found
        row = found + 1
      row = end

  def _matches(self, text: memoryview) -> bool:
    return self._regex.search(text) is not None


def _check(deadline: float) -> None:
  if time.monotonic() > deadline:
    raise TimeoutError("the pattern's time is over")


def _compile(pattern: str) -> Any:
  options = re2.Options()
  options.max_mem = _PATTERN_BYTES
  options.never_capture = True
  options.case_sensitive = False
  # RE2 would write each of a model's mistakes to stderr.
  options.log_errors = False
  try:
    return re2.compile(pattern.encode("utf-8"), options)
  except UnicodeEncodeError:
    raise ValueError("pattern holds a lone surrogate; use valid text") from None
  except re2.error as error:
    reason = error.args[0] if error.args else ""
    if isinstance(reason, bytes):
      reason = reason.decode("utf-8", "replace")
    reason = " ".join(str(reason).split())[:80]
    raise ValueError(f"pattern isn't RE2 syntax: {reason}") from None
