"""A corpus that lies in shards; what is asked for is read.

Two of its chunks never have one text, and two of its documents never one id:
of those that do, the first one counts. Which those are depends on the whole
corpus, so shards hold all of them, and a table says which count.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from arl_jax.envs.search.corpus import Chunk, Document
from arl_jax.envs.search.sections import Sections
from arl_jax.envs.search.shards import Shard, digest

_CACHED = 2**16


class Table:
  """Which chunks and documents of the shards count.

  Attributes:
    rows: [chunks] int64, in order; a row counts through all shards.
    documents: [documents] int64, likewise.
    sums: [documents] of 16 bytes, digests of ids, sorted.
    found: [documents] int64, place in `documents` of each of `sums`.
  """

  def __init__(
    self,
    rows: np.ndarray,
    documents: np.ndarray,
    sums: np.ndarray,
    found: np.ndarray,
  ):
    self.rows, self.documents = rows, documents
    self.sums, self.found = sums, found

  @classmethod
  def make(cls, shards: Sequence[Shard]) -> Table:
    """Finds them."""
    ids = _joined([s.document_sums for s in shards])
    documents = _first(ids)
    counts = np.zeros(len(ids), bool)
    counts[documents] = True
    before = np.cumsum([0, *(s.info.documents for s in shards)])
    owned = [
      counts[s.owners + start]
      for s, start in zip(shards, before[:-1], strict=True)
    ]
    rows = np.flatnonzero(np.concatenate(owned)) if owned else np.empty(0, int)
    texts = _joined([s.sums for s in shards])[rows]
    kept = ids[documents]
    order = np.argsort(kept, kind="stable")
    return cls(rows[_first(texts)], documents, kept[order], order)

  @classmethod
  def read(cls, found: Sections) -> Table:
    return cls(
      found.array("rows", np.int64),
      found.array("documents", np.int64),
      found.array("sums", "S16"),
      found.array("found", np.int64),
    )

  def sections(self) -> dict[str, list[np.ndarray]]:
    return {
      "rows": [self.rows.astype(np.int64)],
      "documents": [self.documents.astype(np.int64)],
      "sums": [self.sums],
      "found": [self.found.astype(np.int64)],
    }


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate(arrays) if arrays else np.empty(0, "S16")


def _first(sums: np.ndarray) -> np.ndarray:
  """Places at which a value stands for the first time, in order."""
  order = np.argsort(sums, kind="stable")
  ordered = sums[order]
  new = np.ones(len(sums), bool)
  new[1:] = ordered[1:] != ordered[:-1]
  return np.sort(order[new])


class StoredCorpus:
  """Behaves as `corpus.Corpus`; a document's text is that of its chunks."""

  def __init__(self, shards: Sequence[Shard], table: Table, digest: str = ""):
    """Args: shards: in order. table: of them. digest: if it is known."""
    self.table = table
    self._shards = shards
    self._digest = digest
    self.row_starts = np.cumsum([0, *(s.info.chunks for s in shards)])
    self._edges: list[int] = self.row_starts.tolist()
    self._document_starts = np.cumsum([0, *(s.info.documents for s in shards)])
    self.chunks: Sequence[Chunk] = _Listed(len(table.rows), self._chunk)
    self.documents: Sequence[Document] = _Listed(
      len(table.documents), self._document
    )
    self.positions: Mapping[str, int] = _Positions(self)
    self.chunk_id = functools.lru_cache(_CACHED)(self._chunk_id)
    self.position = functools.lru_cache(_CACHED)(self._position)

  @property
  def digest(self) -> str:
    """SHA-256 (hex) of all ids, titles and texts."""
    if not self._digest:
      hashed = hashlib.sha256()
      for document in self.documents:
        for field in (document.doc_id, document.title, document.text):
          _update(hashed, field)
      for chunk in self.chunks:
        for field in (chunk.chunk_id, chunk.doc_id, chunk.text):
          _update(hashed, field)
      self._digest = hashed.hexdigest()
    return self._digest

  def chunk(self, chunk_id: str) -> Chunk:
    """The chunk of that id. Raises KeyError if there is none."""
    return self.chunks[self.position(chunk_id)]

  def chunks_of(self, doc_id: str) -> tuple[Chunk, ...]:
    """Chunks of a document in order. Raises KeyError if there is none."""
    return self._chunks_of(self._place(doc_id))

  def texts(self) -> Iterator[str]:
    """Of all chunks in order."""
    for i in range(len(self.chunks)):
      shard, row = self._at(i)
      yield shard.chunk_text(row)

  def row(self, position: int) -> tuple[int, int]:
    """Number of the shard of a chunk, and its row there."""
    row = int(self.table.rows[position])
    shard = bisect.bisect_right(self._edges, row) - 1
    return shard, row - self._edges[shard]

  def position_of_row(self, row: int) -> int | None:
    """Position of a row through all shards; None if it doesn't count."""
    rows = self.table.rows
    if len(rows) == self.row_starts[-1]:
      return row
    i = int(np.searchsorted(rows, row))
    return i if i < len(rows) and rows[i] == row else None

  def _at(self, position: int) -> tuple[Shard, int]:
    shard, row = self.row(position)
    return self._shards[shard], row

  def _chunk(self, position: int) -> Chunk:
    shard, row = self._at(position)
    doc_id = shard.doc_id(int(shard.owners[row]))
    name = f"{doc_id}_{int(shard.numbers[row])}"
    return Chunk(name, doc_id, shard.chunk_text(row))

  def _chunk_id(self, position: int) -> str:
    shard, row = self._at(position)
    doc_id = shard.doc_id(int(shard.owners[row]))
    return f"{doc_id}_{int(shard.numbers[row])}"

  def _position(self, chunk_id: str) -> int:
    doc_id, _, number = chunk_id.rpartition("_")
    try:
      shard, document, start = self._shard_of(self._place(doc_id))
    except KeyError:
      raise KeyError(chunk_id) from None
    first, end = shard.rows_of(document)
    # "01" and " 1" aren't how any chunk is called.
    if len(number) < 10 and number.isdecimal() and str(int(number)) == number:
      numbers = shard.numbers[first:end]
      row = first + int(np.searchsorted(numbers, int(number)))
      if row < end and shard.numbers[row] == int(number):
        found = self.position_of_row(start + row)
        if found is not None:
          return found
    raise KeyError(chunk_id)

  def _document(self, place: int) -> Document:
    shard, document, _ = self._shard_of(place)
    text = "\n\n".join(chunk.text for chunk in self._chunks_of(place))
    return Document(shard.doc_id(document), shard.title(document), text)

  def _chunks_of(self, place: int) -> tuple[Chunk, ...]:
    shard, document, start = self._shard_of(place)
    first, end = np.searchsorted(
      self.table.rows, np.asarray(shard.rows_of(document)) + start
    )
    return tuple(self._chunk(i) for i in range(int(first), int(end)))

  def _shard_of(self, place: int) -> tuple[Shard, int, int]:
    """Shard of a document, its number there, and the shard's first row."""
    document = int(self.table.documents[place])
    i = int(np.searchsorted(self._document_starts, document, "right")) - 1
    return (
      self._shards[i],
      document - int(self._document_starts[i]),
      int(self.row_starts[i]),
    )

  def _place(self, doc_id: str) -> int:
    """Place of a document. Raises KeyError if there is none of that id."""
    try:
      # Without zeros at its end, as numpy gives such bytes.
      wanted = digest(doc_id).rstrip(b"\0")
    except UnicodeEncodeError:
      raise KeyError(doc_id) from None
    i = int(_search(self.table.sums, wanted))
    if i < len(self.table.sums) and self.table.sums[i] == wanted:
      return int(self.table.found[i])
    raise KeyError(doc_id)


def _search(sums: np.ndarray, wanted: Any) -> Any:
  return np.searchsorted(sums, np.asarray([wanted], sums.dtype))[0]


def _update(hashed: Any, field: str) -> None:
  data = field.encode("utf-8", "surrogatepass")
  hashed.update(len(data).to_bytes(8, "big") + data)


class _Listed(Sequence):
  """Items by number, made when they are asked for."""

  def __init__(self, length: int, make: Any):
    self._length, self._make = length, make

  def __len__(self) -> int:
    return self._length

  @overload
  def __getitem__(self, index: int) -> Any: ...

  @overload
  def __getitem__(self, index: slice) -> tuple[Any, ...]: ...

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return tuple(self._make(i) for i in range(*index.indices(self._length)))
    # `range` knows what an index may be.
    return self._make(range(self._length)[index])


class _Positions(Mapping):
  """Position of each chunk id."""

  def __init__(self, corpus: StoredCorpus):
    self._corpus = corpus

  def __getitem__(self, chunk_id: str) -> int:
    return self._corpus.position(chunk_id)

  def __iter__(self) -> Iterator[str]:
    return (self._corpus.chunk_id(i) for i in range(len(self)))

  def __len__(self) -> int:
    return len(self._corpus.chunks)
