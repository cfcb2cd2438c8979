"""Tasks that say what another one says already."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable

from arl_jax.data.synthesis import quotes
from arl_jax.data.synthesis.forms import squeeze

_SHINGLE = 3
_NEAR = 0.6


def shingles(text: str) -> frozenset[int]:
  """Hashes of each three normalised words in a row; of fewer, of all."""
  words = quotes.normalise(text).split()
  last = max(1, len(words) - _SHINGLE + 1)
  # The same in every process and on every machine, which `hash` isn't.
  return frozenset(
    zlib.crc32(" ".join(words[i : i + _SHINGLE]).encode())
    for i in range(last if words else 0)
  )


class Duplicates:
  """The tasks accepted so far.

  Args:
    near: Jaccard similarity of two tasks' shingles from which they are the
      same, in (0, 1].
    per_truth: tasks that may have one answer.

  Raises:
    ValueError: an argument is out of its range.
  """

  def __init__(self, *, near: float = _NEAR, per_truth: int = 4):
    if not 0 < near <= 1:
      raise ValueError(f"near is {near}, not above 0 and at most 1")
    if per_truth < 1:
      raise ValueError(f"per_truth is {per_truth}, not at least 1")
    self._near, self._per_truth = near, per_truth
    self._exact: set[str] = set()
    self._evidence: set[tuple[str, frozenset[str]]] = set()
    self._truths: Counter[str] = Counter()
    self._sizes: list[int] = []
    self._with: dict[int, list[int]] = defaultdict(list)

  def add(self, clues: str, truth: str, relevant: Iterable[str]) -> str | None:
    """Takes a task in, or says why not.

    Args:
      clues: its text without the question, whose words many tasks share.
      truth: its answer.
      relevant: ids of its evidence.

    Returns:
      None if it was taken in, else "duplicate" (the same clues, or the same
      answer from the same chunks), "near_duplicate" or "overused_answer".
    """
    plain, name = quotes.normalise(clues), squeeze(truth)
    evidence = (name, frozenset(relevant))
    if plain in self._exact or evidence in self._evidence:
      return "duplicate"
    own = shingles(clues)
    shared = Counter(
      other for shingle in own for other in self._with.get(shingle, ())
    )
    for other, both in shared.items():
      if both / (len(own) + self._sizes[other] - both) >= self._near:
        return "near_duplicate"
    if self._truths[name] >= self._per_truth:
      return "overused_answer"
    self._exact.add(plain)
    self._evidence.add(evidence)
    self._truths[name] += 1
    for shingle in own:
      self._with[shingle].append(len(self._sizes))
    self._sizes.append(len(own))
    return None
