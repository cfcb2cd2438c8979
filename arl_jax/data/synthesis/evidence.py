"""What a search for the clues finds: evidence, ranks and what only looks alike.

"Cheap" measures of difficulty: no model plays the task; the index that the task
will be searched with is asked for each clue once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection

from arl_jax.data.synthesis.draft import Draft, Refused
from arl_jax.data.synthesis.verify import holds_quotes, supports
from arl_jax.envs.search.index import Index

# Hits that a clue's search is asked for.
DEPTH = 50
# Chunks with the same words as an item's quotes; with more of them a clue names
# nothing in particular.
MAX_FACT_CHUNKS = 3
# What an author chooses distractors from.
MAX_CANDIDATES = 20
_EASY, _HARD = 5, 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
  """What a draft's clues find.

  Attributes:
    facts: of each item, the chunks that hold all of its quotes, its own first.
    ranks: of each clue, at which place from 1 a search for its words has a
      chunk of its fact; None if at none of the first 50.
    told_ranks: likewise with the bridges named, as for a searcher who knows
      them.
    similar: ids that a search for some clue finds, best first.
    candidates: the first 20 of them that support nothing.
  """

  facts: tuple[tuple[str, ...], ...]
  ranks: tuple[int | None, ...]
  told_ranks: tuple[int | None, ...]
  similar: tuple[str, ...]
  candidates: tuple[str, ...]

  @property
  def level(self) -> str:
    """How hard: "easy" with each fact among the first 5, "hard" beyond 20."""
    ranks = [DEPTH + 1 if rank is None else rank for rank in self.ranks]
    if max(ranks) <= _EASY:
      return "easy"
    return "hard" if max(ranks) > _HARD else "medium"


class EvidenceSearch:
  """Searches an index for the clues of drafts."""

  def __init__(self, index: Index):
    self._index = index
    # A draft's clues are searched for again after each of its extensions.
    self._hits = functools.lru_cache(maxsize=256)(self._search)

  def _search(self, query: str) -> tuple[str, ...]:
    return tuple(h.chunk_id for h in self._index.search(query, limit=DEPTH))

  def look(self, draft: Draft, *, documents: Collection[str]) -> Evidence:
    """Finds what stands for and against a draft that `check_draft` has passed.

    Args:
      draft: to look for.
      documents: that a task of this split may use.

    Raises:
      Refused: a clue fits too many chunks, evidence lies in another split or
        belongs to two items, or a clue's fact isn't found at all.
    """
    hits = [self._hits(clue.text) for clue in draft.clues]
    similar = _interleaved(hits)
    facts = self._facts(draft, similar, documents)
    fact_of = {fact[0]: frozenset(fact) for fact in facts}
    ranks, told = [], []
    for number, (clue, found) in enumerate(zip(draft.clues, hits, strict=True)):
      wanted = fact_of[clue.chunk_id]
      ranks.append(_rank(found, wanted))
      bridge = _bridge(draft, number)
      query = f"{bridge} {clue.text}" if bridge else clue.text
      told.append(_rank(self._hits(query), wanted))
      if told[-1] is None and ranks[-1] is None:
        raise Refused("clue_finds_nothing", clue.text)
    evidence = {chunk_id for fact in facts for chunk_id in fact}
    corpus = self._index.corpus
    candidates = (
      chunk_id
      for chunk_id in similar
      if chunk_id not in evidence
      and not supports(draft, corpus.chunk(chunk_id).text)
    )
    return Evidence(
      facts=facts,
      ranks=tuple(ranks),
      told_ranks=tuple(told),
      similar=similar,
      candidates=tuple(itertools.islice(candidates, MAX_CANDIDATES)),
    )

  def _facts(
    self, draft: Draft, similar: tuple[str, ...], documents: Collection[str]
  ) -> tuple[tuple[str, ...], ...]:
    corpus = self._index.corpus
    facts = []
    for item in draft.items:
      copies = [
        chunk_id
        for chunk_id in similar
        if chunk_id != item.chunk_id
        and holds_quotes(corpus.chunk(chunk_id).text, item.item_quotes)
      ]
      fact = (item.chunk_id, *copies)
      if len(fact) > MAX_FACT_CHUNKS:
        raise Refused("ambiguous_clue", " / ".join(item.item_quotes))
      if any(corpus.chunk(c).doc_id not in documents for c in copies):
        raise Refused("other_split", " ".join(copies))
      facts.append(fact)
    if len({c for fact in facts for c in fact}) < sum(map(len, facts)):
      raise Refused("overlapping_facts", draft.prompt)
    return tuple(facts)


def _bridge(draft: Draft, number: int) -> str | None:
  """What a searcher knows before the clue of a further hop."""
  first = len(draft.clues) - len(draft.bridges)
  return draft.bridges[number - first] if number >= first else None


def _rank(found: tuple[str, ...], wanted: Collection[str]) -> int | None:
  ranks = (rank for rank, chunk_id in enumerate(found, 1) if chunk_id in wanted)
  return next(ranks, None)


def _interleaved(rankings: list[tuple[str, ...]]) -> tuple[str, ...]:
  """Ids of all rankings, the best of each first, none twice."""
  depth = max(map(len, rankings), default=0)
  return tuple(
    dict.fromkeys(
      ranking[i]
      for i in range(depth)
      for ranking in rankings
      if i < len(ranking)
    )
  )
