"""JSONL files of any size as examples by number, and JSON read strictly."""

from __future__ import annotations

import array
import bisect
import hashlib
import json
import math
import operator
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn

from etils import epath

_CHUNK = 1 << 20  # bytes
# Deeper values could exhaust the stack of whoever walks or shows them.
_MAX_DEPTH = 64
_SPACE = b" \t\r"
_WILD = frozenset("*?[")


class JsonLines:
  """Objects of one or more files, a line each; only where they lie is held.

  A single pass over the files reads every line, so that a fault in the last
  one shows at the start and not after a day: 10 to 30 s a GB. Blank lines are
  skipped. A file is opened anew for each read: readers in several threads
  don't wait for each other, and nothing is left open.

  Attributes:
    digest: of the lines, in order; neither blank lines nor the names and number
      of the files matter.
  """

  def __init__(
    self,
    path: epath.PathLike,
    parse: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    max_line: int,
  ):
    """Reads all lines once.

    Args:
      path: a file, a pattern with * ? or [], or a folder, whose *.jsonl are
        taken; in order of their names.
      parse: makes an example of an object, or raises ValueError.
      max_line: bytes.

    Raises:
      ValueError: there is no such file or no example, or a line is at fault;
        names the file and the line.
    """
    self._parse = parse
    self._files = find_files(path)
    # Of each example: where its line starts, its length, a checksum, and which
    # line it is; and the number of examples before each file.
    self._starts, self._numbers = array.array("Q"), array.array("Q")
    self._lengths, self._sums = array.array("I"), array.array("I")
    self._firsts: list[int] = []
    hashed = hashlib.sha256()
    for file in self._files:
      self._firsts.append(len(self._starts))
      name = str(file)
      with file.open("rb") as opened:
        for number, start, line in _lines(opened, name, max_line):
          self._read(line, f"{name}:{number}")
          self._starts.append(start)
          self._lengths.append(len(line))
          self._sums.append(zlib.crc32(line))
          self._numbers.append(number)
          hashed.update(line + b"\n")
    if not self._starts:
      raise ValueError(f"{path} holds no example; every line is blank")
    self.digest = hashed.hexdigest()

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, index: int) -> dict[str, Any]:
    """One example, with `where` (its file and line) added.

    Raises:
      ValueError: the file has changed since it was opened.
    """
    i = operator.index(index)
    if not 0 <= i < len(self):
      raise IndexError(f"example {i}, must be 0 to {len(self) - 1}")
    file = self._files[bisect.bisect_right(self._firsts, i) - 1]
    where = f"{file}:{self._numbers[i]}"
    with file.open("rb") as opened:
      opened.seek(self._starts[i])
      line = opened.read(self._lengths[i])
    if zlib.crc32(line) != self._sums[i]:
      raise ValueError(f"{where} has changed since the file was opened")
    return self._read(line, where)

  def _read(self, line: bytes, where: str) -> dict[str, Any]:
    value = parse_json(line, where)
    if not isinstance(value, dict):
      raise ValueError(f"{where}: {value!r:.80}, must be an object")
    try:
      return {**self._parse(value), "where": where}
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from error


def find_files(path: epath.PathLike) -> list[epath.Path]:
  """The files that a path, a pattern or a folder of *.jsonl means, sorted.

  Raises:
    ValueError: there is none.
  """
  root = epath.Path(path)
  if root.is_dir():
    root, pattern = root, "*.jsonl"
  elif root.exists():
    return [root]
  else:
    parts = root.parts
    wild = (i for i, part in enumerate(parts) if _WILD.intersection(part))
    first = next(wild, None)
    if first is None:
      raise ValueError(f"{path} doesn't exist")
    root, pattern = epath.Path(*parts[:first]), "/".join(parts[first:])
  found = sorted((f for f in root.glob(pattern) if f.is_file()), key=str)
  if not found:
    raise ValueError(f"{path} holds no file that matches {pattern}")
  return found


def parse_json(text: bytes, where: str) -> Any:
  """JSON that reads the same everywhere.

  Raises:
    ValueError: it isn't UTF-8 or JSON, or has NaN, Infinity, a number that
      reads as one, half of a surrogate pair, a key twice, or too many levels.
  """
  try:
    value = _DECODER.decode(text.decode())
    _check_depth(value, text)
    if b"\\u" in text:
      json.dumps(value, ensure_ascii=False).encode()
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{where}: byte {error.start} isn't UTF-8; the file must be"
    ) from None
  except UnicodeEncodeError:
    raise ValueError(
      f"{where}: a \\u escape is half of a surrogate pair, must be a whole one"
    ) from None
  except json.JSONDecodeError as error:
    raise ValueError(
      f"{where}: not JSON: {error.msg} at character {error.pos}"
    ) from None
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{where}: not strict JSON: {error}") from None
  return value


def _check_depth(value: Any, text: bytes) -> None:
  if text.count(b"[") + text.count(b"{") <= _MAX_DEPTH:
    return
  level = [value]
  for _ in range(_MAX_DEPTH):
    inner = (top.values() if isinstance(top, dict) else top for top in level)
    level = [v for top in inner for v in top if isinstance(v, (dict, list))]
    if not level:
      return
  raise ValueError(f"more than {_MAX_DEPTH} levels of [ and {{")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) < len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"the key {twice!r:.80} is there twice, must be once")
  return value


def _refuse_constant(name: str) -> NoReturn:
  raise ValueError(f"{name}, must be a finite number")


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{text:.80}, must be a finite number")
  return value


# Made once: for a short line, making one takes longer than reading it.
_DECODER = json.JSONDecoder(
  object_pairs_hook=_unique,
  parse_constant=_refuse_constant,
  parse_float=_finite,
)


def _lines(
  file: IO[bytes], name: str, limit: int
) -> Iterator[tuple[int, int, bytes]]:
  """Number (from 1), offset and bytes of each line that isn't blank."""
  held = bytearray()
  number, start = 1, 0
  while chunk := file.read(_CHUNK):
    *ended, rest = chunk.split(b"\n")
    for piece in ended:
      line = bytes(held) + piece
      _check_length(line, name, number, limit)
      if line.strip(_SPACE):
        yield number, start, line
      number, start = number + 1, start + len(line) + 1
      held.clear()
    held += rest
    _check_length(held, name, number, limit)
  if held.strip(_SPACE):
    yield number, start, bytes(held)


def _check_length(
  line: bytes | bytearray, name: str, number: int, limit: int
) -> None:
  if len(line) > limit:
    raise ValueError(
      f"{name}:{number}: a line of more than {limit} bytes, must be shorter"
    )
