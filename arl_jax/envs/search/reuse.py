"""What shards hold of files that haven't changed since they were made.

A file is taken for unchanged if its size and time of change are, or else if its
bytes have the same digest.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import xxhash

from arl_jax.envs.search.documents import SourceFile
from arl_jax.envs.search.shards import Part, StoredShard

_READ_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Kept:
  """Part `index` of a shard that is there."""

  shard: StoredShard
  index: int


@dataclasses.dataclass(frozen=True)
class Unread:
  """A file that must be read, from a byte and a line on."""

  file: SourceFile
  begin: int = 0
  line: int = 1


class Pool:
  """Parts of files that haven't changed since shards were made of them."""

  def __init__(
    self, shards: Sequence[StoredShard], files: Sequence[SourceFile]
  ):
    by_name = {file.name: file for file in files}
    self._found: dict[tuple[str, int], list[Kept]] = {}
    self._same: dict[tuple[str, int, int, str], bool] = {}
    kept: list[tuple[int, list[Kept]]] = []
    for shard in shards:
      good = [
        Kept(shard, i)
        for i, part in enumerate(shard.parts)
        if part.file in by_name and self._holds(part, by_name[part.file])
      ]
      kept.append((len(shard.parts) - len(good), good))
    # Shards of which all is used come first: they needn't be copied.
    for _, good in sorted(kept, key=lambda item: item[0]):
      for unit in good:
        part = unit.shard.parts[unit.index]
        self._found.setdefault((part.file, part.begin), []).append(unit)

  def _holds(self, part: Part, file: SourceFile) -> bool:
    """Whether a file still has the bytes of a part."""
    if part.size == file.size and part.mtime_ns == file.mtime_ns:
      return True
    if part.size < 0:
      return not os.access(file.path, os.R_OK)
    if part.end > file.size:
      return False
    if part.last and part.end != file.size:
      return False
    key = (part.file, part.begin, part.end, part.digest)
    if key not in self._same:
      self._same[key] = _digest(file, part.begin, part.end) == part.digest
    return self._same[key]

  def units(self, files: Sequence[SourceFile]) -> list[Kept | Unread]:
    """What makes up all files, in order."""
    found: list[Kept | Unread] = []
    for file in files:
      begin, line, last = 0, 1, False
      while not last:
        options = self._found.get((file.name, begin), [])
        option = next((o for o in options if _part(o).line == line), None)
        if option is None:
          found.append(Unread(file, begin, line))
          break
        found.append(option)
        part = _part(option)
        begin, line, last = part.end, part.next_line, part.last
    return found


def _part(unit: Kept) -> Part:
  return unit.shard.parts[unit.index]


def _digest(file: SourceFile, begin: int, end: int) -> str:
  hashed = xxhash.xxh3_128()
  try:
    with open(file.path, "rb") as opened:
      opened.seek(begin)
      while begin < end:
        data = opened.read(min(_READ_BYTES, end - begin))
        if not data:
          break
        hashed.update(data)
        begin += len(data)
  except OSError:
    return ""
  return hashed.hexdigest()
