"""Ranking chunks: BM25, nearest vectors, and both fused by rank.

A ranking depends on the chunks and on their order alone, not on how an index
lays them out: scores that decide are computed row by row, and equal ones keep
the order of the corpus.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import tantivy

MAX_QUERY_CHARS = 1024
_MAX_QUERY_TERMS = 32
# Of a term; tantivy refuses terms near 64 KiB, and none this long is a word.
_MAX_TERM_CHARS = 64
# Cormack et al. 2009 use 60; the published search agent 20.
_RRF_K = 20
# Each side ranks at least this many before they are fused.
DEPTH = 50
# Beyond it tantivy writes a second segment. Taken only as it is needed: about
# a million chunks fit.
_HEAP_BYTES = 2**30
# Of products of vectors of length 1: what rounding may do in float32, by far;
# and what counts as no similarity.
_ROUNDING, _NOTHING = 1e-5, 2e-5
_BLOCK_ROWS = 4096

_WORD = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True)
class Hit:
  """A chunk found, with its fused score (higher is better)."""

  chunk_id: str
  score: float


def terms(text: str) -> list[str]:
  """Lower-case words of a text; an identifier gives itself and its parts."""
  words = _WORD.findall(text.lower())
  # Most texts have nothing to cut or to take apart.
  if "_" not in text and max(map(len, words), default=0) <= _MAX_TERM_CHARS:
    return words
  found = []
  for word in words:
    word = word[:_MAX_TERM_CHARS]
    found.append(word)
    if "_" in word:
      found.extend(part for part in word.split("_") if part and part != word)
  return found


class Lexicon:
  """The BM25 side of an index. Threads may share it."""

  def __init__(self, index: tantivy.Index, size: int):
    """Opens what `write` wrote.

    Args:
      index: in memory or in a folder.
      size: chunks in it.

    Raises:
      ValueError: it holds another number of chunks.
    """
    self._schema = _schema()
    self._size = size
    # What is read doesn't change any more, so nobody need watch it.
    index.config_reader(reload_policy="manual", num_warmers=0)
    index.reload()
    self._searcher = index.searcher()
    if self._searcher.num_docs != size:
      raise ValueError(
        f"the BM25 index holds {self._searcher.num_docs} chunks, not {size}"
      )

  @staticmethod
  def write(
    texts: Iterable[str], folder: pathlib.Path | None = None
  ) -> tantivy.Index:
    """Indexes texts, whose positions count from 0.

    Args:
      texts: of the chunks.
      folder: that exists and is empty; in memory if None.

    Raises:
      ValueError: the disk is full, or the folder can't be written.
    """
    schema = _schema()
    index = tantivy.Index(schema, None if folder is None else str(folder))
    # One thread writes one segment, in which equal scores keep their order.
    writer = index.writer(heap_size=_HEAP_BYTES, num_threads=1)
    for i, text in enumerate(texts):
      document = tantivy.Document()
      document.add_text("text", " ".join(terms(text)))
      document.add_unsigned("position", i)
      writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()
    return index

  def rank(
    self, query: str, excluded: AbstractSet[int], depth: int
  ) -> list[int]:
    """Positions of the best chunks by BM25 of any of the query's terms."""
    wanted = list(dict.fromkeys(terms(query)))[:_MAX_QUERY_TERMS]
    if not wanted or depth < 1:
      return []
    parsed = tantivy.Query.boolean_query(
      [
        (
          tantivy.Occur.Should,
          tantivy.Query.term_query(self._schema, "text", term, "freq"),
        )
        for term in wanted
      ]
    )
    count = min(depth + len(excluded) + 1, self._size)
    while True:
      hits = self._searcher.search(parsed, count, count=False).hits
      last = min(depth + len(excluded), len(hits)) - 1
      # Which of the chunks that share the last score come first mustn't
      # depend on tantivy's segments, so all of them must be here.
      if len(hits) < count or count == self._size:
        break
      if hits[-1][0] < hits[last][0]:
        break
      count = min(4 * count, self._size)
    where = self._searcher.fast_field_values("position", [a for _, a in hits])
    ranked = sorted(
      (-score, int(i or 0)) for (score, _), i in zip(hits, where, strict=True)
    )
    return [i for _, i in ranked if i not in excluded][:depth]


def _schema() -> tantivy.Schema:
  return (
    tantivy.SchemaBuilder()
    .add_text_field("text", tokenizer_name="whitespace", index_option="freq")
    .add_unsigned_field("position", fast=True)
    .build()
  )


def nearest(
  similarity: np.ndarray,
  exact: Callable[[np.ndarray], np.ndarray],
  excluded: AbstractSet[int],
  depth: int,
) -> list[int]:
  """Positions of the vectors most similar to a query's, where that is more
  than nothing.

  Args:
    similarity: [n] float32, of all; is overwritten at `excluded`.
    exact: of positions [m], their similarity in float64, which decides.
    excluded: positions that aren't ranked.
    depth: positions at most.
  """
  if depth < 1 or not len(similarity):
    return []
  similarity[list(excluded)] = -np.inf
  floor = _NOTHING - _ROUNDING
  scale = max(1.0, float(similarity.max(initial=0.0)))
  if depth < len(similarity):
    last = len(similarity) - depth
    floor = max(floor, float(np.partition(similarity, last)[last] / scale))
  candidates = np.flatnonzero(similarity >= (floor - _ROUNDING) * scale)
  values = exact(candidates)
  there = values >= _NOTHING * scale
  candidates, values = candidates[there], values[there]
  order = np.lexsort((candidates, -values))[:depth]
  return candidates[order].tolist()


def row_products(rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
  """Inner products in float64, each the same whatever rows are beside it.

  Args:
    rows: [n, dim].
    vector: [dim].

  Returns:
    [n] float64.
  """
  wide = vector.astype(np.float64)
  found = np.empty(len(rows))
  for start in range(0, len(rows), _BLOCK_ROWS):
    block = rows[start : start + _BLOCK_ROWS].astype(np.float64)
    found[start : start + _BLOCK_ROWS] = (block * wide).sum(axis=1)
  return found


def fuse(
  rankings: Iterable[Sequence[int]], limit: int
) -> list[tuple[int, float]]:
  """Reciprocal rank fusion: Σ 1 / (20 + rank) of each position, best first.

  Equal scores keep the order of the corpus.
  """
  scores: dict[int, float] = {}
  for ranking in rankings:
    for rank, i in enumerate(ranking, 1):
      scores[i] = scores.get(i, 0.0) + 1.0 / (_RRF_K + rank)
  return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:limit]
