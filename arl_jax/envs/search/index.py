"""Hybrid search over a corpus: BM25 and dense vectors, fused by rank.

Queries and patterns come from a model: both are cut or refused by length, no
query syntax is parsed, and patterns run in linear time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from arl_jax.envs.search import corpus as corpus_lib
from arl_jax.envs.search.embedders import Embedder, hashed_embedder
from arl_jax.envs.search.patterns import END, Matches, Pattern
from arl_jax.envs.search.ranking import (
  DEPTH,
  MAX_QUERY_CHARS,
  Hit,
  Lexicon,
  fuse,
  nearest,
  row_products,
  terms,
)

__all__ = [
  "Embedder",
  "Hit",
  "Index",
  "IndexCorpus",
  "SearchIndex",
  "hashed_embedder",
  "terms",
]

# Of one grep; patterns take linear time, but corpora can be large.
GREP_SECONDS = 5.0


class IndexCorpus(Protocol):
  """Documents and chunks, held in memory or read when they are asked for.

  Attributes:
    documents: in order.
    chunks: of all documents; those of one document are neighbours.
    positions: index in `chunks` of each chunk id.
    digest: SHA-256 (hex) of all ids, titles and texts.
  """

  @property
  def documents(self) -> Sequence[corpus_lib.Document]: ...

  @property
  def chunks(self) -> Sequence[corpus_lib.Chunk]: ...

  @property
  def positions(self) -> Mapping[str, int]: ...

  @property
  def digest(self) -> str: ...

  def chunk(self, chunk_id: str) -> corpus_lib.Chunk:
    """The chunk of that id. Raises KeyError if there is none."""
    ...

  def chunks_of(self, doc_id: str) -> Sequence[corpus_lib.Chunk]:
    """Chunks of a document in order. Raises KeyError if there is none."""
    ...


class Index(Protocol):
  """What a search environment needs; a database's client can be one too.

  Threads may share it.
  """

  @property
  def corpus(self) -> IndexCorpus: ...

  def search(
    self, query: str, *, exclude: Collection[str] = (), limit: int = 50
  ) -> list[Hit]:
    """Chunks that match a query, best first.

    Any text is a query. The score is Σ 1 / (20 + rank) over the rankings by
    words and by vectors; equal scores keep the corpus's order.

    Args:
      query: words.
      exclude: chunk ids that are not ranked at all.
      limit: of hits, at least 0.
    """
    ...

  def rank(self, query: str, chunk_ids: Iterable[str]) -> list[str]:
    """Sorts chunks by similarity to a query; the dense side alone.

    Raises:
      KeyError: an id isn't in the corpus.
    """
    ...

  def grep(self, pattern: str, *, limit: int = 5) -> Matches:
    """Ids of the first chunks that a regular expression matches.

    RE2 syntax (linear time, no look-around or back-references), ignoring case;
    a match lies within one chunk. After some seconds what was found so far is
    returned, with a note.

    Raises:
      ValueError: the pattern is empty, longer than 256 characters, not valid
        RE2 or too large once compiled.
    """
    ...


class SearchIndex:
  """An `Index` in memory. Read-only once built; threads may share it.

  Args:
    corpus: with at least one chunk.
    embed: texts to float [n, dim] with rows of length 1; `hashed_embedder()`
      if None.
    grep_seconds: most of one grep.

  Raises:
    ValueError: the corpus is empty, or `embed` gives another shape.
  """

  def __init__(
    self,
    corpus: corpus_lib.Corpus,
    *,
    embed: Embedder | None = None,
    grep_seconds: float = GREP_SECONDS,
  ):
    if not corpus.chunks:
      raise ValueError("corpus has no chunks; give it a document with text")
    self.corpus = corpus
    self._embed = hashed_embedder() if embed is None else embed
    self._grep_seconds = grep_seconds
    texts = [chunk.text for chunk in corpus.chunks]
    self._vectors = np.asarray(self._embed(texts), np.float32)
    if self._vectors.ndim != 2 or len(self._vectors) != len(texts):
      raise ValueError(
        f"embed gave shape {list(self._vectors.shape)} for {len(texts)} texts,"
        f" not [{len(texts)}, dim]"
      )
    data = [text.encode("utf-8", "replace") + END for text in texts]
    self._text = memoryview(b"".join(data))
    self._starts = np.cumsum([0, *map(len, data)])
    self._lexicon = Lexicon(Lexicon.write(texts), len(texts))

  def search(
    self, query: str, *, exclude: Collection[str] = (), limit: int = 50
  ) -> list[Hit]:
    """See `Index`: BM25 and inner products, fused.

    Of a long query the first 1,024 characters and 32 distinct terms count.
    """
    if limit < 1:
      return []
    query = query[:MAX_QUERY_CHARS]
    positions = self.corpus.positions
    excluded = {positions[c] for c in exclude if c in positions}
    depth = max(limit, DEPTH)
    lexical = self._lexicon.rank(query, excluded, depth)
    vector = self._vector(query)
    dense = nearest(
      # Not by a BLAS: its threads wait for each other, for so little.
      np.vecdot(self._vectors, vector),
      lambda rows: row_products(self._vectors[rows], vector),
      excluded,
      depth,
    )
    return [
      Hit(self.corpus.chunks[i].chunk_id, score)
      for i, score in fuse((lexical, dense), limit)
    ]

  def _vector(self, query: str) -> np.ndarray:
    """[dim] float32."""
    (vector,) = np.asarray(self._embed([query]), np.float32)
    return vector

  def rank(self, query: str, chunk_ids: Iterable[str]) -> list[str]:
    """See `Index`."""
    positions = np.asarray(
      [self.corpus.positions[c] for c in chunk_ids], np.int64
    )
    vector = self._vector(query[:MAX_QUERY_CHARS])
    similarity = row_products(self._vectors[positions], vector)
    order = np.lexsort((positions, -similarity))
    return [self.corpus.chunks[i].chunk_id for i in positions[order]]

  def grep(self, pattern: str, *, limit: int = 5) -> Matches:
    """See `Index`."""
    compiled = Pattern(pattern)
    found = Matches()
    deadline = time.monotonic() + self._grep_seconds
    try:
      if limit > 0:
        for row in compiled.rows(self._text, self._starts, deadline):
          found.append(self.corpus.chunks[row].chunk_id)
          if len(found) == limit:
            break
    except TimeoutError:
      found.note = f"stopped after {self._grep_seconds:g} s"
    return found
