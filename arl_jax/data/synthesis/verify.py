"""Checks of a draft that need no model."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from arl_jax.data.synthesis import quotes
from arl_jax.data.synthesis.draft import FIRST_CLUES, Draft, Refused
from arl_jax.data.synthesis.duplicates import shingles
from arl_jax.data.synthesis.forms import holds, squeeze
from arl_jax.data.synthesis.quotes import QuoteRules, Verdict
from arl_jax.envs.search.index import IndexCorpus

# Of anything longer or more numerous nothing is read.
MAX_TEXT_CHARS = 2000
MAX_TRUTH_CHARS = 200
MAX_ITEMS = 16
MAX_QUOTES = 16
MAX_HOPS = 8
MAX_DISTRACTORS = 10
# Letters and digits of an answer; what is shorter stands anywhere.
MIN_TRUTH_CHARS = 3
# Share of two clues' shingles from which they are the same.
_SAME_CLUE = 0.4


def check_draft(
  draft: Draft,
  corpus: IndexCorpus,
  *,
  documents: Collection[str],
  rules: QuoteRules | None = None,
) -> tuple[Verdict, ...]:
  """Checks everything but the distractors.

  Args:
    draft: from anybody.
    corpus: that its ids are of.
    documents: that a task of this split may use.
    rules: for quotes.

  Returns:
    What became of each quote.

  Raises:
    Refused: says what is wrong first.
  """
  _check_sizes(draft)
  texts = _texts(draft, corpus, documents)
  sources = {corpus.chunk(clue.chunk_id).doc_id for clue in draft.clues}
  if len(sources) < min(len(draft.clues), FIRST_CLUES):
    raise Refused("clues_of_one_document", draft.prompt)
  for clue in draft.clues:
    if clue.chunk_id not in texts:
      raise Refused("clue_without_item", clue.text)
  _check_different(draft)
  for name in (draft.truth, *draft.bridges):
    if holds(draft.prompt, name):
      raise Refused("answer_in_prompt", f"{name}: {draft.prompt}")
  if any(holds(draft.truth, bridge) for bridge in draft.bridges):
    raise Refused("answer_is_bridge", draft.truth)
  verdicts = quotes.judge(
    [quote for item in draft.items for quote in item.quotes],
    clues=" ".join(clue.text for clue in draft.clues),
    texts=texts,
    rules=rules,
  )
  if reason := quotes.fault(verdicts):
    missing = (v.quote.text for v in verdicts if v.found is None)
    raise Refused(reason, next(missing, draft.prompt))
  if not any(holds(text, draft.truth) for text in texts.values()):
    raise Refused("answer_in_no_item", draft.truth)
  return verdicts


def _check_different(draft: Draft) -> None:
  """Two clues in nearly the same words are one."""
  for first, second in itertools.combinations(draft.clues, 2):
    one, other = shingles(first.text), shingles(second.text)
    if len(one & other) >= _SAME_CLUE * len(one | other):
      raise Refused("repeated_clue", f"{first.text} / {second.text}")


def _check_sizes(draft: Draft) -> None:
  if not 1 <= draft.hops <= MAX_HOPS:
    raise Refused("too_many_hops", draft.prompt)
  if len(draft.clues) != FIRST_CLUES + draft.hops - 1:
    raise Refused("wrong_number_of_clues", draft.prompt[:MAX_TEXT_CHARS])
  if not 1 <= len(draft.items) <= MAX_ITEMS:
    raise Refused("wrong_number_of_items", str(len(draft.items)))
  if any(
    len(found) > MAX_QUOTES
    for item in draft.items
    for found in (item.clue_quotes, item.item_quotes, item.truth_quotes)
  ):
    raise Refused("too_many_quotes")
  texts = [clue.text for clue in draft.clues] + [draft.question]
  texts += [quote.text for item in draft.items for quote in item.quotes]
  for text in texts:
    if len(text) > MAX_TEXT_CHARS:
      raise Refused("text_too_long", text[:MAX_TEXT_CHARS])
    if not quotes.normalise(text):
      raise Refused("text_without_words", text)
  for name in (draft.truth, *draft.bridges):
    if len(name) > MAX_TRUTH_CHARS:
      raise Refused("answer_too_long", name[:MAX_TRUTH_CHARS])
    if len(squeeze(name)) < MIN_TRUTH_CHARS:
      raise Refused("answer_too_short", name)


def _texts(
  draft: Draft, corpus: IndexCorpus, documents: Collection[str]
) -> dict[str, str]:
  """Texts of the items by id."""
  texts: dict[str, str] = {}
  for item in draft.items:
    if item.chunk_id in texts:
      raise Refused("item_twice", item.chunk_id)
    try:
      chunk = corpus.chunk(item.chunk_id)
    except KeyError:
      raise Refused("unknown_chunk", item.chunk_id) from None
    if chunk.doc_id not in documents:
      raise Refused("other_split", item.chunk_id)
    texts[item.chunk_id] = chunk.text
  for clue in draft.clues:
    if clue.chunk_id not in texts:
      raise Refused("clue_without_item", clue.text)
  return texts


def supports(draft: Draft, text: str) -> bool:
  """Whether a text could be taken for evidence.

  It holds a form of the answer or of a bridge, or all that was quoted from some
  item.
  """
  if any(holds(text, name) for name in (draft.truth, *draft.bridges)):
    return True
  return any(holds_quotes(text, item.item_quotes) for item in draft.items)


def holds_quotes(text: str, texts: Iterable[str]) -> bool:
  """Whether all quotes are substrings; false if there is none."""
  found = [quotes.is_part(quote, text) for quote in texts]
  return bool(found) and all(found)


def check_distractors(
  draft: Draft,
  distractors: Iterable[str],
  corpus: IndexCorpus,
  *,
  similar: Collection[str],
  evidence: Collection[str],
) -> tuple[str, ...]:
  """Checks distractors, whoever chose them.

  Args:
    draft: that they go with.
    distractors: chunk ids.
    corpus: that they are of.
    similar: ids that a search for the clues finds.
    evidence: ids that support the answer.

  Raises:
    Refused: there are more than 10, one is there twice, is unknown, is
      evidence, is similar to no clue, or could be taken for evidence.
  """
  found = tuple(distractors)
  if len(found) > MAX_DISTRACTORS:
    raise Refused("too_many_distractors", str(len(found)))
  if len(set(found)) < len(found):
    raise Refused("distractor_twice", " ".join(found))
  for chunk_id in found:
    if chunk_id in evidence:
      raise Refused("distractor_is_evidence", chunk_id)
    if chunk_id not in similar:
      raise Refused("distractor_not_similar", chunk_id)
    if supports(draft, corpus.chunk(chunk_id).text):
      raise Refused("distractor_supports", chunk_id)
  return found
