"""The folder of an index on disk.

  <folder>/index.json            what belongs to the index; replaced at once
  <folder>/shard-<id>.bin,.json  chunks, documents, vectors; see `shards`
  <folder>/table-<n>.bin         which of them count; see `stored_corpus`
  <folder>/words-<n>/            BM25, by tantivy
  <folder>/building.lock         held by whoever builds

Nothing is changed once it is written. What index.json doesn't name was left by
a builder that was killed, or is still used by readers of an earlier version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from arl_jax.envs.search.sections import (
  ForeignError,
  read_sealed,
  write_sealed,
)
from arl_jax.envs.search.shards import PREFIX, ShardInfo, StoredShard

MANIFEST = "index.json"
_LOCK = "building.lock"
_TABLE, _WORDS = "table-", "words-"
_OURS = (PREFIX, _TABLE, _WORDS)
_PARTIAL = ".partial"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """What an index is made of.

  Attributes:
    generation: counts its versions.
    made_by: what decides chunks and vectors: tokens of a chunk, how they are
      counted, the embedder's identity and dim.
    embedder: the string that chose the embedder.
    shards: in order.
    table: layout of the table.
    words: bytes of each file of the BM25 index.
    digest: of the corpus.
    chunks: that count.
    documents: that count.
    left_out: what of the source isn't in the index; see `LeftOut.to_json`.
  """

  generation: int
  made_by: Mapping[str, Any]
  embedder: str
  shards: Sequence[ShardInfo]
  table: Mapping[str, Any]
  words: Mapping[str, int]
  digest: str
  chunks: int
  documents: int
  left_out: Mapping[str, Any]


class IndexFolder:
  """Names, and what may be done to them.

  Attributes:
    path: of the folder.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(path)

  def table(self, generation: int) -> pathlib.Path:
    return self.path / f"{_TABLE}{generation}.bin"

  def words(self, generation: int) -> pathlib.Path:
    return self.path / f"{_WORDS}{generation}"

  def partial_words(self, generation: int) -> pathlib.Path:
    return self.path / f"{_WORDS}{generation}{_PARTIAL}"

  def generations(self) -> list[int]:
    """Numbers of the tables that are there."""
    found = [
      path.name[len(_TABLE) :].partition(".")[0]
      for path in self.path.glob(f"{_TABLE}*.bin")
    ]
    found += [
      path.name[len(_WORDS) :].partition(".")[0]
      for path in self.path.glob(f"{_WORDS}*")
    ]
    return [int(number) for number in found if number.isdecimal()]

  def manifest(self) -> Manifest:
    """What the index is made of now.

    Raises:
      FileNotFoundError: there is no index.
      ForeignError: it is another program's or version's.
      ValueError: it is damaged.
    """
    body = read_sealed(self.path / MANIFEST)
    shards = [ShardInfo.from_json(value) for value in body.pop("shards")]
    return Manifest(shards=shards, **body)

  def write_manifest(self, manifest: Manifest) -> None:
    """Makes it the index; readers find the old one or this one."""
    body = dataclasses.asdict(manifest)
    body["shards"] = [shard.to_json() for shard in manifest.shards]
    write_sealed(self.path / MANIFEST, body)

  def shards(self) -> list[StoredShard]:
    """All that are whole, those of killed builders included, newest first."""
    found = []
    for path in self.path.glob(f"{PREFIX}*.json"):
      try:
        found.append((path.stat().st_mtime_ns, path.stem))
      except FileNotFoundError:
        continue
    shards = []
    for _, name in sorted(found, reverse=True):
      with contextlib.suppress(ValueError, OSError):
        shards.append(StoredShard(self.path, name))
    return shards

  @contextlib.contextmanager
  def building(self) -> Iterator[None]:
    """Holds the folder for a builder; it is made if there is none.

    Raises:
      ValueError: another builder holds it, or it holds something else.
    """
    self.path.mkdir(parents=True, exist_ok=True)
    self._check_ours()
    with (self.path / _LOCK).open("a+") as lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
          raise
        lock.seek(0)
        who = lock.read(40).strip()
        raise ValueError(
          f"{self.path} is being built by another process"
          f"{f' ({who})' if who else ''}; wait until it has ended"
        ) from None
      # The lock ends with the process, however that ends.
      lock.truncate(0)
      lock.write(f"process {os.getpid()}")
      lock.flush()
      yield
      lock.truncate(0)

  def _check_ours(self) -> None:
    names = {path.name for path in self.path.iterdir()}
    if _LOCK in names or MANIFEST in names or not names:
      return
    raise ForeignError(
      f"{self.path} holds {min(names)!r} and no index; name a folder that is"
      " empty or doesn't exist"
    )

  def sweep(self, kept: Manifest | None) -> int:
    """Removes what a manifest doesn't name.

    Args:
      kept: of the index; if None, what is whole stays, as it may be used.

    Returns:
      Bytes of what the index keeps.
    """
    names = set()
    if kept is not None:
      names = {self.table(kept.generation).name}
      names.add(self.words(kept.generation).name)
      for shard in kept.shards:
        names |= {f"{shard.name}.bin", f"{shard.name}.json"}
    size = 0
    for path in self.path.iterdir():
      partial = path.name.endswith(_PARTIAL)
      if not path.name.startswith((*_OURS, MANIFEST)):
        continue
      stays = path.name in names or path.name == MANIFEST
      if partial or (kept is not None and not stays):
        _remove(path)
      elif path.is_dir():
        size += sum(p.stat().st_size for p in path.iterdir())
      else:
        size += path.stat().st_size
    return size


def _remove(path: pathlib.Path) -> None:
  if path.is_dir():
    shutil.rmtree(path, ignore_errors=True)
  else:
    path.unlink(missing_ok=True)
