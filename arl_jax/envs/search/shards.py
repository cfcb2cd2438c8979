"""Shards of an index on disk: some thousand chunks, never changed.

A shard is two files. `shard-<id>.bin` holds chunks and documents, in the order
of the corpus; `shard-<id>.json` says where its sections lie and which parts of
which source files they were read from. A part is a whole file, or some lines of
a JSONL file.
"""

from __future__ import annotations

import dataclasses
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import xxhash

from arl_jax.envs.search.corpus import Document
from arl_jax.envs.search.patterns import END
from arl_jax.envs.search.sections import (
  Sections,
  check_digest,
  read_sealed,
  write_sealed,
  write_sections,
)

PREFIX = "shard-"
_SUM = "S16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """What was read from a file, or from some of its lines.

  Attributes:
    file: its name below the source.
    size: of the file, in bytes, when it was read.
    mtime_ns: when the file was changed.
    begin: first byte.
    end: byte after the last one.
    line: number of the first line.
    next_line: number of the line after it.
    last: whether the file ends with it.
    digest: of its bytes.
    documents: that it holds.
    chunks: of them.
    left_out: what of it isn't in the index; see `LeftOut.to_json`.
  """

  file: str
  size: int
  mtime_ns: int
  begin: int
  end: int
  line: int
  next_line: int
  last: bool
  digest: str
  documents: int
  chunks: int
  left_out: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ShardInfo:
  """What a manifest says about a shard.

  Attributes:
    name: of its files, without ending.
    documents: number of them.
    chunks: number of them.
    layout: of the .bin file.
  """

  name: str
  documents: int
  chunks: int
  layout: Mapping[str, Any]

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> Self:
    return cls(
      value["name"], value["documents"], value["chunks"], value["layout"]
    )

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


class Shard:
  """Chunks and documents of a shard, read as they are asked for.

  Attributes:
    info: of the shard.
    text: of all chunks in UTF-8, each ended by `patterns.END`.
    starts: [chunks + 1] int64, where each begins in `text`.
    owners: [chunks] int32, the document of each, counted in the shard.
    numbers: [chunks] int32, the chunk's number in its document.
    sums: [chunks] of 16 bytes, digests of the texts.
    document_sums: [documents] of 16 bytes, digests of the ids.
    vectors: [chunks, dim] float32.
  """

  def __init__(self, folder: pathlib.Path, info: ShardInfo, dim: int):
    """Opens a shard. Raises ValueError if its file is missing or damaged."""
    n, d = info.chunks, info.documents
    found = Sections(folder / f"{info.name}.bin", info.layout)
    self.info = info
    self.text = found.raw("text")
    self.starts = found.array("starts", np.int64, n + 1)
    self.owners = found.array("owners", np.int32, n)
    self.numbers = found.array("numbers", np.int32, n)
    self.sums = found.array("sums", _SUM, n)
    self.document_sums = found.array("document_sums", _SUM, d)
    self.vectors = found.array("vectors", np.float32, n, dim)
    self._names = found.raw("names")
    self._name_starts = found.array("name_starts", np.int64, 2 * d + 1)

  def chunk_text(self, row: int) -> str:
    return bytes(self.chunk_bytes(row)).decode()

  def chunk_bytes(self, row: int) -> memoryview:
    return self.text[int(self.starts[row]) : int(self.starts[row + 1]) - 1]

  def doc_id(self, document: int) -> str:
    return self._name(2 * document)

  def title(self, document: int) -> str:
    return self._name(2 * document + 1)

  def _name(self, i: int) -> str:
    start, end = int(self._name_starts[i]), int(self._name_starts[i + 1])
    return bytes(self._names[start:end]).decode()

  def rows_of(self, document: int) -> tuple[int, int]:
    """Rows [first, end) of a document's chunks."""
    first, end = np.searchsorted(self.owners, [document, document + 1])
    return int(first), int(end)


class StoredShard:
  """A shard that lies in a folder, with the parts that it was made of."""

  def __init__(self, folder: pathlib.Path, name: str):
    """Reads its description.

    Raises:
      ValueError: it isn't whole.
    """
    body = read_sealed(folder / f"{name}.json")
    self.info = ShardInfo.from_json(body["shard"])
    self.made_by = body["made_by"]
    self.parts = [Part(**part) for part in body["parts"]]
    self._folder = folder
    self._path = folder / f"{name}.bin"
    Sections(self._path, self.info.layout)

  def check(self) -> None:
    """Raises ValueError if its bytes aren't those that were written."""
    check_digest(self._path, self.info.layout["digest"])

  def open(self, dim: int) -> Shard:
    return Shard(self._folder, self.info, dim)


def digest(text: str) -> bytes:
  """16 bytes that stand for a text."""
  return xxhash.xxh3_128_digest(text.encode())


class ShardDraft:
  """Gathers what becomes a shard.

  Attributes:
    chunks: number of them.
    size: bytes of their texts.
  """

  def __init__(self) -> None:
    self.chunks = self.size = 0
    self.parts: list[Part] = []
    self._texts: list[bytes] = []
    self._owners: list[int] = []
    self._numbers: list[int] = []
    self._names: list[bytes] = []
    self._document_sums: list[bytes] = []
    self._known: list[tuple[int, np.ndarray]] = []

  @property
  def documents(self) -> int:
    return len(self._document_sums)

  def add(self, document: Document, texts: Sequence[str]) -> None:
    """Adds a document with the texts of its chunks."""
    owner = self._add_document(document.doc_id, document.title)
    for number, text in enumerate(texts):
      self._add_chunk(owner, number, text.encode("utf-8", "replace"))

  def copy(self, part: Part, shard: Shard, first: int) -> None:
    """Adds a part of another shard, vectors included.

    Args:
      part: of that shard.
      shard: that has it.
      first: document of the shard with which the part begins.
    """
    rows: list[int] = []
    for document in range(first, first + part.documents):
      owner = self._add_document(shard.doc_id(document), shard.title(document))
      for row in range(*shard.rows_of(document)):
        rows.append(row)
        number = int(shard.numbers[row])
        self._add_chunk(owner, number, bytes(shard.chunk_bytes(row)))
    if rows:
      vectors = shard.vectors[rows[0] : rows[-1] + 1]
      self._known.append((self.chunks - len(rows), vectors))
    self.parts.append(part)

  def _add_document(self, doc_id: str, title: str) -> int:
    self._names += (doc_id.encode(), title.encode("utf-8", "replace"))
    self._document_sums.append(digest(doc_id))
    return len(self._document_sums) - 1

  def _add_chunk(self, owner: int, number: int, data: bytes) -> None:
    self._owners.append(owner)
    self._numbers.append(number)
    self._texts.append(data)
    self.chunks += 1
    self.size += len(data)

  def unknown(self) -> list[tuple[int, list[str]]]:
    """Runs of chunks without vectors: the first's number, and their texts."""
    runs, at = [], 0
    for start, vectors in [*self._known, (self.chunks, np.empty((0, 0)))]:
      if start > at:
        runs.append((at, [data.decode() for data in self._texts[at:start]]))
      at = start + len(vectors)
    return runs

  def write(
    self,
    folder: pathlib.Path,
    made_by: Mapping[str, Any],
    dim: int,
    made: Sequence[tuple[int, np.ndarray]],
  ) -> StoredShard:
    """Writes the shard; it is on the disk, whole, when this returns.

    Args:
      folder: of the index.
      made_by: what decides chunks and vectors.
      dim: of the vectors.
      made: vectors of all that `unknown` gave: where each run begins, and its
        [n, dim].
    """
    vectors = np.zeros((self.chunks, dim), np.float32)
    for start, rows in (*self._known, *made):
      vectors[start : start + len(rows)] = rows
    sums = [xxhash.xxh3_128_digest(data) for data in self._texts]
    name = PREFIX + uuid.uuid4().hex[:16]
    layout = write_sections(
      folder / f"{name}.bin",
      {
        "vectors": [vectors],
        "starts": [_edges([len(data) + 1 for data in self._texts])],
        "owners": [np.asarray(self._owners, np.int32)],
        "numbers": [np.asarray(self._numbers, np.int32)],
        "sums": [b"".join(sums)],
        "document_sums": [b"".join(self._document_sums)],
        "name_starts": [_edges([len(data) for data in self._names])],
        "names": [b"".join(self._names)],
        "text": (data + END for data in self._texts),
      },
    )
    info = ShardInfo(name, self.documents, self.chunks, layout)
    write_sealed(
      folder / f"{name}.json",
      {
        "made_by": dict(made_by),
        "shard": info.to_json(),
        "parts": [dataclasses.asdict(part) for part in self.parts],
      },
    )
    return StoredShard(folder, name)


def _edges(lengths: Sequence[int]) -> np.ndarray:
  return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
