"""Hybrid search over a corpus: BM25 and dense vectors, fused by rank.

Queries and patterns come from a model: both are cut or refused by length, no
query syntax is parsed, and patterns run in linear time.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import re2
import tantivy

from arl_jax.envs.search import corpus as corpus_lib

Embedder = Callable[[Sequence[str]], np.ndarray]

_MAX_QUERY_CHARS = 1024
_MAX_QUERY_TERMS = 32
_MAX_PATTERN_CHARS = 256
_PATTERN_BYTES = 2**20
# Of a term; tantivy refuses terms near 64 KiB, and none this long is a word.
_MAX_TERM_CHARS = 64
# Cormack et al. 2009 use 60; the published search agent 20.
_RRF_K = 20
# Each side ranks at least this many before they are fused.
_DEPTH = 50

_WORD = re.compile(r"\w+")
_STOP_WORDS = frozenset(
  _WORD.findall(
    "a an and are as at be been but by can for from has have if in is it its"
    " may no not of on or other see such than that the their then there these"
    " they this to used using was when which will with you"
  )
)


@dataclasses.dataclass(frozen=True)
class Hit:
  """A chunk found, with its fused score (higher is better)."""

  chunk_id: str
  score: float


def terms(text: str) -> list[str]:
  """Lower-case words of a text; an identifier gives itself and its parts."""
  found = []
  for match in _WORD.finditer(text.lower()):
    word = match.group()[:_MAX_TERM_CHARS]
    found.append(word)
    if "_" in word:
      found.extend(part for part in word.split("_") if part != word)
  return [term for term in found if term]


def hashed_embedder(dim: int = 256) -> Embedder:
  """An embedder without weights: signed hashing of words and their trigrams.

  Stable between processes. Words count 1 + log(occurrences); a short list of
  function words counts nothing. Texts without words give a zero row. Weinberger
  et al. 2009, "Feature hashing for large scale multitask learning".

  Args:
    dim: of the vectors, at least 1.

  Returns:
    A function of n texts to float32 [n, dim], rows of length 1 or 0.
  """
  if dim < 1:
    raise ValueError(f"dim is {dim}, not at least 1")

  @functools.lru_cache(maxsize=2**15)
  def features(word: str) -> tuple[np.ndarray, np.ndarray]:
    padded = f"<{word}>"
    grams = [padded[i : i + 3] for i in range(len(padded) - 2)]
    hashes = [zlib.crc32(g.encode("utf-8", "replace")) for g in grams]
    weights = [0.5 / len(grams) ** 0.5] * len(grams)
    # A NUL keeps a word apart from a trigram that reads the same.
    hashes.append(zlib.crc32(b"\0" + word.encode("utf-8", "replace")))
    weights.append(1.0)
    values = np.asarray(hashes, np.int64)
    # The top bit is independent of the remainder for any dim.
    signs = np.where(values >> 31, -1.0, 1.0)
    return (values & 0x7FFFFFFF) % dim, signs * np.asarray(weights)

  def embed(texts: Sequence[str]) -> np.ndarray:
    rows = np.zeros((len(texts), dim), np.float32)
    for row, text in zip(rows, texts, strict=True):
      counts = Counter(t for t in terms(text) if t not in _STOP_WORDS)
      if not counts:
        continue
      found = [features(word) for word in counts]
      scale = [
        w * (1.0 + np.log(n))
        for (_, w), n in zip(found, counts.values(), strict=True)
      ]
      where = np.concatenate([i for i, _ in found])
      row[:] = np.bincount(where, np.concatenate(scale), dim)
      row /= max(float(np.linalg.norm(row)), 1e-12)
    return rows

  return embed


class SearchIndex:
  """Finds chunks of a corpus. Read-only once built; threads may share it.

  Args:
    corpus: with at least one chunk.
    embed: texts to float [n, dim] with rows of length 1; `hashed_embedder()`
      if None.

  Raises:
    ValueError: the corpus is empty, or `embed` gives another shape.
  """

  def __init__(
    self, corpus: corpus_lib.Corpus, *, embed: Embedder | None = None
  ):
    if not corpus.chunks:
      raise ValueError("corpus has no chunks; give it a document with text")
    self.corpus = corpus
    self._embed = hashed_embedder() if embed is None else embed
    texts = [chunk.text for chunk in corpus.chunks]
    self._vectors = np.asarray(self._embed(texts), np.float32)
    if self._vectors.ndim != 2 or len(self._vectors) != len(texts):
      raise ValueError(
        f"embed gave shape {list(self._vectors.shape)} for {len(texts)} texts,"
        f" not [{len(texts)}, dim]"
      )
    self._bytes = [text.encode("utf-8", "replace") for text in texts]
    self._schema = (
      tantivy.SchemaBuilder()
      .add_text_field("text", tokenizer_name="whitespace", index_option="freq")
      .add_unsigned_field("position", fast=True)
      .build()
    )
    self._searcher = self._build(texts)

  def _build(self, texts: Sequence[str]) -> tantivy.Searcher:
    index = tantivy.Index(self._schema)
    # One thread writes one segment, in which equal scores keep their order.
    writer = index.writer(heap_size=64 * 2**20, num_threads=1)
    for i, text in enumerate(texts):
      document = tantivy.Document()
      document.add_text("text", " ".join(terms(text)))
      document.add_unsigned("position", i)
      writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    return index.searcher()

  def search(
    self, query: str, *, exclude: Collection[str] = (), limit: int = 50
  ) -> list[Hit]:
    """Chunks that match a query, best first.

    Reciprocal rank fusion: the score is Σ 1 / (20 + rank) over the two
    rankings, by BM25 (disjunction of the query's terms) and by inner product
    with the query's vector where that is positive. Equal scores keep the
    corpus's order. Any text is a query; of a long one the first 1,024
    characters and 32 distinct terms count.

    Args:
      query: words.
      exclude: chunk ids that are not ranked at all.
      limit: of hits, at least 0.
    """
    if limit < 1:
      return []
    query = query[:_MAX_QUERY_CHARS]
    positions = self.corpus.positions
    excluded = {positions[c] for c in exclude if c in positions}
    depth = max(limit, _DEPTH)
    scores: dict[int, float] = {}
    for ranking in (
      self._lexical(query, excluded, depth),
      self._dense(query, excluded, depth),
    ):
      for rank, i in enumerate(ranking, 1):
        scores[i] = scores.get(i, 0.0) + 1.0 / (_RRF_K + rank)
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:limit]
    return [Hit(self.corpus.chunks[i].chunk_id, score) for i, score in best]

  def _lexical(self, query: str, excluded: set[int], depth: int) -> list[int]:
    wanted = list(dict.fromkeys(terms(query)))[:_MAX_QUERY_TERMS]
    if not wanted:
      return []
    clauses = [
      (
        tantivy.Occur.Should,
        tantivy.Query.term_query(self._schema, "text", term, "freq"),
      )
      for term in wanted
    ]
    count = min(depth + len(excluded), len(self.corpus.chunks))
    found = self._searcher.search(
      tantivy.Query.boolean_query(clauses), count, count=False
    ).hits
    where = self._searcher.fast_field_values("position", [a for _, a in found])
    ranked = sorted(
      (-score, int(i or 0)) for (score, _), i in zip(found, where, strict=True)
    )
    return [i for _, i in ranked if i not in excluded][:depth]

  def _dense(self, query: str, excluded: set[int], depth: int) -> list[int]:
    similarity = self._similarity(query)
    similarity[list(excluded)] = 0.0
    # Stable, so that equal similarities keep the corpus's order.
    order = np.argsort(-similarity, kind="stable")[:depth]
    return [int(i) for i in order if similarity[i] > 0]

  def _similarity(self, query: str) -> np.ndarray:
    """[chunks] float32, inner product of each chunk with the query."""
    (vector,) = np.asarray(self._embed([query]), np.float32)
    return self._vectors @ vector

  def rank(self, query: str, chunk_ids: Iterable[str]) -> list[str]:
    """Sorts chunks by similarity to a query; the dense side alone.

    Raises:
      KeyError: an id isn't in the corpus.
    """
    similarity = self._similarity(query[:_MAX_QUERY_CHARS])
    positions = [self.corpus.positions[c] for c in chunk_ids]
    positions.sort(key=lambda i: (-float(similarity[i]), i))
    return [self.corpus.chunks[i].chunk_id for i in positions]

  def grep(self, pattern: str, *, limit: int = 5) -> list[str]:
    """Ids of the first chunks that a regular expression matches.

    RE2 syntax (linear time, no look-around or back-references), ignoring case;
    a match lies within one chunk.

    Raises:
      ValueError: the pattern is empty, longer than 256 characters, not valid
        RE2 or too large once compiled.
    """
    regex = _compile(pattern)
    found: list[str] = []
    for chunk, text in zip(self.corpus.chunks, self._bytes, strict=True):
      if len(found) >= limit:
        break
      if regex.search(text):
        found.append(chunk.chunk_id)
    return found


def _compile(pattern: str) -> Any:
  if not pattern or len(pattern) > _MAX_PATTERN_CHARS:
    raise ValueError(
      f"pattern has {len(pattern)} characters, not 1 to {_MAX_PATTERN_CHARS}"
    )
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
