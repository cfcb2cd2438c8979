"""A draft of anybody is refused for the first thing that doesn't hold."""

import dataclasses

import pytest

from arl_jax.data.synthesis.draft import Clue, Item, Refused
from arl_jax.data.synthesis.evidence import EvidenceSearch
from arl_jax.data.synthesis.quotes import QuoteRules
from arl_jax.data.synthesis.verify import (
  check_distractors,
  check_draft,
  supports,
)
from arl_jax.envs.search.corpus import Document
from tests.data.synthesis import linked_corpus

ALL = frozenset(linked_corpus.TEXTS)


@pytest.fixture(scope="module")
def index():
  return linked_corpus.town_index()


def check(index, documents=ALL, rules=None, **changes):
  draft = linked_corpus.town_draft(**changes)
  return check_draft(draft, index.corpus, documents=documents, rules=rules)


def test_a_good_draft_passes(index):
  verdicts = check(index)
  assert [v.found for v in verdicts] == ["substring"] * 9
  assert {v.quote.chunk_id for v in verdicts} == {"a_0", "b_0", "c_0"}


GOOD = linked_corpus.town_draft()


def with_item(number, **changes):
  items = list(GOOD.items)
  items[number] = dataclasses.replace(items[number], **changes)
  return {"items": tuple(items)}


def with_clue(number, **changes):
  clues = list(GOOD.clues)
  clues[number] = dataclasses.replace(clues[number], **changes)
  return {"clues": tuple(clues)}


@pytest.mark.parametrize(
  ("reason", "changes"),
  [
    ("wrong_number_of_clues", {"clues": GOOD.clues[:2]}),
    ("wrong_number_of_clues", {"clues": (*GOOD.clues, GOOD.clues[0])}),
    ("wrong_number_of_items", {"items": ()}),
    ("wrong_number_of_items", {"items": GOOD.items * 6}),
    ("too_many_hops", {"bridges": ("Stromness",) * 8}),
    ("item_twice", {"items": (*GOOD.items, GOOD.items[0])}),
    ("unknown_chunk", with_item(1, chunk_id="z_9")),
    ("unknown_chunk", with_item(1, chunk_id="b_0\0" * 1000)),
    ("clue_without_item", {"items": GOOD.items[:2]}),
    (
      "clues_of_one_document",
      with_clue(1, chunk_id="a_0"),
    ),
    ("answer_in_prompt", {"question": "Is it KIRKWALL?"}),
    ("answer_in_prompt", with_clue(0, text="The lighthouse of Kirk-wall’s.")),
    ("repeated_clue", with_clue(1, text="It has an amber, old lighthouse.")),
    ("repeated_clue", with_clue(2, text="It has an Amber lighthouse!")),
    ("answer_too_short", {"truth": "Ki"}),
    ("answer_too_short", {"truth": "???"}),
    ("answer_too_long", {"truth": "Kirkwall " * 30}),
    ("text_too_long", {"question": "town? " * 500}),
    ("text_without_words", {"question": "?!"}),
    ("too_many_quotes", with_item(0, item_quotes=("amber",) * 17)),
    ("text_too_long", with_item(0, item_quotes=("amber " * 500,))),
    ("no_truth_quote", {
      "items": tuple(
        dataclasses.replace(i, truth_quotes=()) for i in GOOD.items
      )
    }),
    # One of three may be missing, two may not; of the truth none.
    ("item_quotes_not_found", {
      "items": (
        dataclasses.replace(GOOD.items[0], item_quotes=("purple unicorns",)),
        dataclasses.replace(GOOD.items[1], item_quotes=("purple unicorns",)),
        GOOD.items[2],
      )
    }),
    ("truth_quotes_not_found", with_item(2, truth_quotes=("reach Wick",))),
    ("answer_in_no_item", {"truth": "Aberdeen"}),
  ],
)  # fmt: skip
def test_refuses(index, reason, changes):
  with pytest.raises(Refused) as refused:
    check(index, **changes)
  assert refused.value.reason == reason
  assert len(refused.value.example) <= 200


def test_a_third_of_the_quotes_may_be_missing(index):
  verdicts = check(index, **with_item(0, item_quotes=("purple unicorns",)))
  assert sum(v.found is None for v in verdicts) == 1


def test_refuses_chunks_of_another_split(index):
  with pytest.raises(Refused, match="other_split"):
    check(index, documents=ALL - {"b"})


def test_refuses_quotes_of_single_letters(index):
  # The published rule alone would take them.
  items = tuple(
    dataclasses.replace(i, clue_quotes=("a",), item_quotes=("e",))
    for i in GOOD.items
  )
  assert check(index, items=items)
  with pytest.raises(Refused, match="clue_quotes_not_found"):
    check(index, items=items, rules=QuoteRules(shortest=8))


def longer(**changes):
  """Kirkwall as a bridge to Dufftown."""
  items = (
    *(dataclasses.replace(i, truth_quotes=()) for i in GOOD.items),
    Item(
      chunk_id="d_0",
      clue_quotes=("copper distillery",),
      item_quotes=("copper distillery of",),
      truth_quotes=("distillery of Dufftown",),
    ),
  )
  clue = Clue(text="A copper distillery sends barrels there.", chunk_id="d_0")
  return {
    "clues": (*GOOD.clues, clue),
    "items": items,
    "truth": "Dufftown",
    "bridges": ("Kirkwall",),
    "question": "Where is the distillery?",
    **changes,
  }


def test_a_further_hop_hides_its_bridge(index):
  assert check(index, **longer())
  with pytest.raises(Refused, match="answer_in_prompt"):
    check(index, **longer(question="Who sends barrels to Kirkwall?"))
  with pytest.raises(Refused, match="answer_is_bridge"):
    check(index, **longer(truth="kirkwalls"))


def test_distractors_support_nothing(index):
  draft = linked_corpus.town_draft()
  evidence = EvidenceSearch(index).look(draft, documents=ALL)
  # e shares the lighthouse and the harbour, f the market; d names Kirkwall.
  assert {"e_0", "f_0"} <= set(evidence.candidates)
  assert "d_0" not in evidence.candidates
  assert not set(evidence.candidates) & {"a_0", "b_0", "c_0"}

  def distracted(*ids, similar=evidence.similar):
    return check_distractors(
      draft, ids, index.corpus, similar=similar, evidence={"a_0", "b_0", "c_0"}
    )

  assert distracted("e_0", "f_0") == ("e_0", "f_0")
  for ids, similar, reason in (
    (("a_0",), None, "distractor_is_evidence"),
    (("e_0", "e_0"), None, "distractor_twice"),
    (("made up",), None, "distractor_not_similar"),
    (("e_0",), ("f_0",), "distractor_not_similar"),
    (("d_0",), None, "distractor_supports"),
    (tuple(f"e_{i}" for i in range(11)), None, "too_many_distractors"),
  ):
    with pytest.raises(Refused) as refused:
      distracted(*ids, similar=similar or (*evidence.similar, "d_0"))
    assert refused.value.reason == reason


def test_what_holds_an_items_quotes_is_evidence():
  draft = linked_corpus.town_draft()
  assert supports(draft, "An Amber Lighthouse was built in Wick.")
  assert not supports(draft, "An amber lighthouse stands in Wick.")
  assert supports(draft, "the kirk-wall")


def test_copies_of_an_item_count_as_its_fact():
  texts = linked_corpus.TEXTS
  documents = [
    Document(name, name, text)
    for name, text in {**texts, "h": "Again: " + texts["b"]}.items()
  ]
  index = linked_corpus.indexed(documents)
  look = EvidenceSearch(index).look
  everything = ALL | {"h"}
  evidence = look(linked_corpus.town_draft(), documents=everything)
  assert evidence.facts == (("a_0",), ("b_0", "h_0"), ("c_0",))
  assert len(evidence.ranks) == 3
  assert all(rank <= 3 for rank in evidence.ranks)
  assert evidence.level == "easy"
  # A copy that only the other split may use spoils the task.
  with pytest.raises(Refused, match="other_split"):
    look(linked_corpus.town_draft(), documents=ALL)
  copies = [Document(f"k{i}", "", f"{i}. {texts['b']}") for i in range(3)]
  with pytest.raises(Refused, match="ambiguous_clue"):
    EvidenceSearch(linked_corpus.indexed([*documents, *copies])).look(
      linked_corpus.town_draft(), documents=everything | {"k0", "k1", "k2"}
    )


def test_a_clue_that_finds_nothing_is_refused(index):
  class Silent:
    """An index whose search for the first clue fails."""

    corpus = index.corpus

    def search(self, query, *, exclude=(), limit=50):
      return [] if "amber" in query else index.search(query, limit=limit)

  with pytest.raises(Refused) as refused:
    EvidenceSearch(Silent()).look(linked_corpus.town_draft(), documents=ALL)
  assert refused.value.reason == "clue_finds_nothing"
  assert refused.value.example == "It has an amber lighthouse."
