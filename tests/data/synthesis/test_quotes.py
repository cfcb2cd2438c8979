"""Quotes are found by the published rule, and by nothing laxer."""

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.data.synthesis import quotes
from arl_jax.data.synthesis.quotes import Quote, QuoteRules, find, normalise

TEXT = "The quick brown foxes jumped over three lazy hounds yesterday."


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("Don’t — STOP", "dont stop"),
    ("a  b\t\nc", "a b c"),
    ("“quoted” ‘words’", "quoted words"),
    ("end‑of–file—mark", "end of file mark"),
    ("see [the docs](http://x.org/a?b=1) now", "see the docs now"),
    ("at https://x.org/path, or www.y.org", "at or"),
    ("`read_text`(path)", "read text path"),
    ("Café ﬁne ①", "cafe fine 1"),
    ("Straße", "strasse"),
    ("...", ""),
    ("", ""),
    ("\ud800x\0y", "x y"),
  ],
)
def test_normalises(text, expected):
  assert normalise(text) == expected


def test_a_substring_is_found_whatever_its_dress():
  assert find("QUICK brown", TEXT) == "substring"
  assert find("“quick”—brown, foxes!", TEXT) == "substring"
  # Not at the borders of words: the published rule says substring.
  assert find("ick bro", TEXT) == "substring"


@pytest.mark.parametrize(
  ("quote", "found"),
  [
    # quick, brown, foxes have more than 3 letters and stand in this order.
    ("quick and brown foxes", "words"),
    # Only the first five long words count: quick brown foxes jumped over.
    ("quick, brown; foxes then jumped well over unicorns", None),
    ("quick brown foxes jumped quite over", None),
    ("quick brown foxes jumped the over and unicorns", "words"),
    # The order matters.
    ("brown and quick foxes", None),
    # Two long words are too few, and no substring.
    ("quick the foxes", None),
    # A word is a whole word.
    ("quick and brown fox jump", None),
    # The same word twice needs two of them.
    ("quick quick brown foxes", None),
    # lazy has 4 letters, the and 3ab not.
    ("three so lazy hounds", "words"),
    ("the 3ab of", None),
    ("", None),
    ("?!", None),
  ],
)
def test_else_the_first_five_long_words_must_come_in_order(quote, found):
  assert find(quote, TEXT) == found


def quote(kind, text, chunk_id="c"):
  return Quote(kind=kind, chunk_id=chunk_id, text=text)


def judged(clue, item, truth, rules=None):
  """Verdicts of so many found and so many missing quotes of each kind."""
  found = []
  for kind, (hits, misses) in (
    ("clue", clue),
    ("item", item),
    ("truth", truth),
  ):
    found += [quote(kind, "quick brown")] * hits
    found += [quote(kind, "purple unicorns")] * misses
  return quotes.judge(found, clues=TEXT, texts={"c": TEXT}, rules=rules)


@pytest.mark.parametrize(
  ("clue", "item", "truth", "fault"),
  [
    ((1, 0), (1, 0), (1, 0), None),
    # ⌈2/3⌉ of 3 is 2, of 4 is 3, of 2 is 2, of 5 is 4.
    ((2, 1), (2, 1), (1, 0), None),
    ((1, 2), (2, 1), (1, 0), "clue_quotes_not_found"),
    ((3, 1), (3, 1), (2, 0), None),
    ((2, 2), (3, 1), (2, 0), "clue_quotes_not_found"),
    ((2, 0), (1, 1), (1, 0), "item_quotes_not_found"),
    ((4, 1), (4, 1), (1, 0), None),
    ((4, 1), (3, 2), (1, 0), "item_quotes_not_found"),
    # All of the truth.
    ((3, 0), (3, 0), (5, 1), "truth_quotes_not_found"),
    ((0, 0), (1, 0), (1, 0), "no_clue_quote"),
    ((1, 0), (0, 0), (1, 0), "no_item_quote"),
    ((1, 0), (1, 0), (0, 0), "no_truth_quote"),
  ],
)
def test_a_task_passes_by_the_published_shares(clue, item, truth, fault):
  assert quotes.fault(judged(clue, item, truth)) == fault


def test_clue_quotes_are_of_the_clues_and_the_others_of_their_item():
  verdicts = quotes.judge(
    [
      quote("clue", "only in clues"),
      quote("clue", "first text"),
      quote("item", "first text", "a"),
      quote("item", "first text", "b"),
      quote("truth", "second text", "b"),
    ],
    clues="what is only in clues",
    texts={"a": "the first text", "b": "the second text"},
  )
  assert [v.found for v in verdicts] == [
    "substring", None, "substring", None, "substring",
  ]  # fmt: skip
  with pytest.raises(KeyError):
    quotes.judge([quote("item", "x", "z")], clues="", texts={})


def test_short_quotes_support_nothing_if_told_so():
  rules = QuoteRules(shortest=12)
  # "quick brown" has 11 characters.
  assert quotes.fault(judged((1, 0), (1, 0), (1, 0), rules)) == (
    "clue_quotes_not_found"
  )
  rules = QuoteRules(shortest=11)
  assert quotes.fault(judged((1, 0), (1, 0), (1, 0), rules)) is None


def test_refuses_rules_that_cannot_be():
  with pytest.raises(ValueError, match="shortest is 0"):
    QuoteRules(shortest=0)
  with pytest.raises(ValueError, match="fewest_words is 6, not at most"):
    QuoteRules(fewest_words=6)
  with pytest.raises(dataclasses.FrozenInstanceError):
    QuoteRules().letters = 2


@settings(deadline=None)
@given(st.text())
def test_normalising_twice_is_normalising_once(text):
  once = normalise(text)
  assert normalise(once) == once
  assert once == once.strip()
  assert all(c == " " or c.isalnum() for c in once)


words = st.lists(st.sampled_from(("alpha", "beta", "gamma", "delta", "of")))


@settings(deadline=None)
@given(words, words, words)
def test_what_stands_in_a_text_is_found(before, quoted, after):
  text = " ".join((*before, *quoted, *after))
  found = find(" ".join(quoted).upper(), text)
  assert found == ("substring" if quoted else None)


@settings(deadline=None)
@given(words, words)
def test_a_match_by_words_is_a_match_in_order(quoted, text):
  found = find(" ".join(quoted), " ".join(text))
  long = [w for w in quoted if len(w) > 3][:5]
  rest = iter(text)
  in_order = len(long) >= 3 and all(w in rest for w in long)
  if found == "words":
    assert in_order
  elif found is None:
    assert not in_order


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_two_thirds_rounded_up(count):
  # The smallest whole number whose triple is at least 2 n.
  least = quotes.needed(count)
  assert 3 * least >= 2 * count > 3 * (least - 1)


@pytest.mark.parametrize(
  "piece",
  ["[", "](", "[a](", "[]()", "http://", "www.", "[[a](b)](", "'\u00b4"],
)
def test_markup_of_any_shape_takes_linear_time(piece):
  began = time.process_time()
  normalise(piece * 50_000)
  # A tenth of it on a slow machine; squares would take hours.
  assert time.process_time() - began < 5
