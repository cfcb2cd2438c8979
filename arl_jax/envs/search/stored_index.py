"""An index on disk, as `builder` made it, read through memory maps."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import tantivy

from arl_jax.envs.search.embedders import NamedEmbedder, named_embedder
from arl_jax.envs.search.index import GREP_SECONDS
from arl_jax.envs.search.patterns import Matches, Pattern
from arl_jax.envs.search.ranking import (
  DEPTH,
  MAX_QUERY_CHARS,
  Hit,
  Lexicon,
  fuse,
  nearest,
  row_products,
)
from arl_jax.envs.search.sections import Sections, check_size
from arl_jax.envs.search.shards import Shard
from arl_jax.envs.search.store import IndexFolder, Manifest
from arl_jax.envs.search.stored_corpus import StoredCorpus, Table

# Threads that help with a search, which memory's speed bounds; and numbers from
# which on it is worth it.
_HELPERS = min(os.cpu_count() or 1, 4) - 1
_SHARED = 2**20
# A builder may replace what a manifest named while it is being opened.
_TRIES = 5


class StoredIndex:
  """An `Index` that was built on disk. Threads may share it.

  It stays as it was opened: a builder that goes on meanwhile removes files,
  which the system keeps for as long as they are open.

  Attributes:
    corpus: documents and chunks, read as they are asked for.
    manifest: what the index is made of.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    embedder: NamedEmbedder | None = None,
    grep_seconds: float = GREP_SECONDS,
  ):
    """Opens an index.

    Args:
      path: folder that `python -m launch.prepare index` wrote.
      embedder: of queries; by default the one that the index was made with, if
        it is still where it was.
      grep_seconds: most of one grep.

    Raises:
      ValueError: there is no index, it is damaged, it is of another version,
        or `embedder` isn't the one that it was made with.
    """
    folder = IndexFolder(path)
    self._grep_seconds = grep_seconds
    self.manifest, self._shards, self.corpus, self._lexicon = _opened(folder)
    made_by = self.manifest.made_by
    if embedder is None:
      embedder = named_embedder(self.manifest.embedder)
    for name, given in (
      ("embedder", embedder.identity),
      ("dim", embedder.dim),
    ):
      if given != made_by[name]:
        raise ValueError(
          f"{path} was made with {name} {made_by[name]!r}, the embedder of"
          f" queries has {given!r}; give {self.manifest.embedder!r}"
        )
    self._embedder = embedder
    # Positions of rows, unless all of them count.
    rows = self.corpus.table.rows
    self._chosen = None if len(rows) == self.corpus.row_starts[-1] else rows
    self._helpers: ThreadPoolExecutor | None = None
    if _HELPERS and self.corpus.row_starts[-1] * embedder.dim >= _SHARED:
      self._helpers = ThreadPoolExecutor(_HELPERS, "search")

  def search(
    self, query: str, *, exclude: Collection[str] = (), limit: int = 50
  ) -> list[Hit]:
    """See `Index`: BM25 and inner products, fused.

    Of a long query the first 1,024 characters and 32 distinct terms count.
    """
    if limit < 1:
      return []
    excluded = set()
    for chunk_id in exclude:
      try:
        excluded.add(self.corpus.position(chunk_id))
      except KeyError:
        continue
    rankings = self.rankings(query, excluded, max(limit, DEPTH))
    return [
      Hit(self.corpus.chunk_id(i), score) for i, score in fuse(rankings, limit)
    ]

  def rankings(
    self, query: str, excluded: AbstractSet[int], depth: int
  ) -> tuple[list[int], list[int]]:
    """Positions of the best chunks by BM25, and by inner products.

    Args:
      query: its first 1,024 characters and 32 distinct terms count.
      excluded: positions that aren't ranked.
      depth: positions of each ranking at most.
    """
    query = query[:MAX_QUERY_CHARS]
    (vector,) = self._embedder([query])
    scan = _Scan(self._shards, self.corpus.row_starts, vector, self._helpers)
    lexical = self._lexicon.rank(query, excluded, depth)
    similarity = scan.result()
    dense = nearest(
      similarity if self._chosen is None else similarity[self._chosen],
      lambda positions: row_products(self._vectors(positions), vector),
      excluded,
      depth,
    )
    return lexical, dense

  def _vectors(self, positions: np.ndarray) -> np.ndarray:
    """[n, dim] of chunks."""
    found = np.empty((len(positions), self._embedder.dim), np.float32)
    rows = self.corpus.table.rows[positions]
    shards = np.searchsorted(self.corpus.row_starts, rows, "right") - 1
    for shard in np.unique(shards):
      here = shards == shard
      local = rows[here] - self.corpus.row_starts[shard]
      found[here] = self._shards[shard].vectors[local]
    return found

  def rank(self, query: str, chunk_ids: Iterable[str]) -> list[str]:
    """See `Index`."""
    positions = np.asarray(
      [self.corpus.position(c) for c in chunk_ids], np.int64
    )
    (vector,) = self._embedder([query[:MAX_QUERY_CHARS]])
    similarity = row_products(self._vectors(positions), vector)
    order = np.lexsort((positions, -similarity))
    return [self.corpus.chunk_id(int(i)) for i in positions[order]]

  def grep(self, pattern: str, *, limit: int = 5) -> Matches:
    """See `Index`."""
    compiled = Pattern(pattern)
    found = Matches()
    deadline = time.monotonic() + self._grep_seconds
    try:
      for shard, start in zip(
        self._shards, self.corpus.row_starts, strict=False
      ):
        for row in compiled.rows(shard.text, shard.starts, deadline):
          position = self.corpus.position_of_row(int(start) + row)
          if position is not None and len(found) < limit:
            found.append(self.corpus.chunk_id(position))
          if len(found) >= limit:
            return found
    except TimeoutError:
      found.note = f"stopped after {self._grep_seconds:g} s"
    return found


class _Scan:
  """Inner products of all vectors with one, by a helper and who waits for it.

  One pass by numpy over the rows is as fast as a BLAS's, whose threads wait for
  each other after each shard: far longer, where a core is busy.
  """

  def __init__(
    self,
    shards: Sequence[Shard],
    starts: np.ndarray,
    vector: np.ndarray,
    helpers: ThreadPoolExecutor | None,
  ):
    """Begins.

    Args:
      shards: whose vectors are taken.
      starts: [shards + 1] first row of each, and the end.
      vector: [dim] float32.
      helpers: threads that take part; none if None.
    """
    self._found = np.empty(starts[-1], np.float32)
    self._vector = vector
    self._waiting = deque(zip(shards, starts[:-1].tolist(), strict=True))
    self._helping: list[Future[None]] = []
    if helpers is not None:
      self._helping = [helpers.submit(self._work) for _ in range(_HELPERS)]

  def _work(self) -> None:
    while True:
      try:
        shard, start = self._waiting.popleft()
      except IndexError:
        return
      out = self._found[start : start + shard.info.chunks]
      np.vecdot(shard.vectors, self._vector, out=out)

  def result(self) -> np.ndarray:
    """[rows] float32."""
    self._work()
    for helping in self._helping:
      # One that hasn't begun has nothing left to do.
      if not helping.cancel():
        helping.result()
    return self._found


def _opened(
  folder: IndexFolder,
) -> tuple[Manifest, list[Shard], StoredCorpus, Lexicon]:
  for attempt in range(_TRIES):
    try:
      manifest = folder.manifest()
    except (FileNotFoundError, NotADirectoryError):
      raise ValueError(
        f"{folder.path} holds no index; make one with `python -m launch.prepare"
        " index`"
      ) from None
    try:
      return manifest, *_parts(folder, manifest)
    except (ValueError, OSError) as error:
      # Unless there is another manifest by now, the fault is the index's.
      with_new = _changed(folder, manifest.generation)
      if not with_new or attempt == _TRIES - 1:
        raise ValueError(
          f"{folder.path} can't be opened: {error}; the command that made it"
          " mends it"
        ) from error
  raise AssertionError("not reached")


def _changed(folder: IndexFolder, generation: int) -> bool:
  try:
    return folder.manifest().generation != generation
  except (ValueError, OSError):
    return False


def _parts(
  folder: IndexFolder, manifest: Manifest
) -> tuple[list[Shard], StoredCorpus, Lexicon]:
  dim = manifest.made_by["dim"]
  shards = [Shard(folder.path, info, dim) for info in manifest.shards]
  table = Table.read(
    Sections(folder.table(manifest.generation), manifest.table)
  )
  words = folder.words(manifest.generation)
  for name, size in manifest.words.items():
    check_size(words / name, size)
  corpus = StoredCorpus(shards, table, manifest.digest)
  lexicon = Lexicon(tantivy.Index.open(str(words)), len(table.rows))
  return shards, corpus, lexicon
