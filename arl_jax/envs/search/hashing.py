"""Vectors of texts without a model: signed hashing of words."""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from arl_jax.envs.search.ranking import terms

_STOP_WORDS = frozenset(
  terms(
    "a an and are as at be been but by can for from has have if in is it its"
    " may no not of on or other see such than that the their then there these"
    " they this to used using was when which will with you"
  )
)


def hashed_embedder(dim: int = 256) -> Callable[[Sequence[str]], np.ndarray]:
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
      where = np.concatenate([i for i, _ in found])
      weights = np.concatenate([w for _, w in found])
      times = np.fromiter(counts.values(), np.float64, len(counts))
      scale = np.repeat(1.0 + np.log(times), [len(i) for i, _ in found])
      row[:] = np.bincount(where, weights * scale, dim)
      row /= max(float(np.linalg.norm(row)), 1e-12)
    return rows

  return embed
