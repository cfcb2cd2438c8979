"""Lines of a metrics.jsonl that another process writes, as they come."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, NamedTuple

# Read at a time, so that a long file doesn't hold up the first frame's memory.
_BLOCK_BYTES = 8 << 20


class News(NamedTuple):
  """What came since the last time.

  Attributes:
    lines: whole ones.
    anew: whether the file isn't any more the one read before (a run resumed or
      began again), so that only `lines` counts.
  """

  lines: list[dict[str, Any]]
  anew: bool


class MetricsTail:
  """Reads each line once.

  A line that isn't whole yet waits for its end; one that is no JSON object is
  passed over and counted.

  Attributes:
    refused: lines that were passed over.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Reads nothing yet; the file may come later."""
    self._path = pathlib.Path(path)
    self._offset = 0
    # The last line read: if it isn't there any more, the file is another one.
    self._last = b""
    self.refused = 0

  def read(self) -> News:
    """What is new.

    Raises:
      OSError: the file is there but can't be read.
    """
    try:
      file = open(self._path, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
      gone = self._offset > 0
      self._offset, self._last = 0, b""
      return News([], gone)
    with file:
      anew = not self._same(file)
      if anew:
        self._offset, self._last = 0, b""
      lines: list[dict[str, Any]] = []
      rest = b""
      file.seek(self._offset)
      while block := file.read(_BLOCK_BYTES):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
          self._offset += len(line) + 1
          self._last = line + b"\n"
          self._add(line, lines)
    return News(lines, anew)

  def _same(self, file: Any) -> bool:
    file.seek(self._offset - len(self._last))
    return file.read(len(self._last)) == self._last

  def _add(self, line: bytes, lines: list[dict[str, Any]]) -> None:
    try:
      record = json.loads(line)
    except (ValueError, RecursionError):
      record = None
    if isinstance(record, dict):
      lines.append(record)
    else:
      self.refused += 1
