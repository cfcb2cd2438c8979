"""Tasks that repeat others are told apart from those that don't."""

import pytest

from arl_jax.data.synthesis.duplicates import Duplicates, shingles


def test_shingles_are_of_normalised_words():
  # Five words have three runs of three; two have one run, of both.
  assert len(shingles("one two three four five")) == 3
  assert len(shingles("one two")) == 1
  assert shingles("One, two: THREE") == shingles("one two three")
  assert shingles("?") == frozenset()


def test_exact_repeats():
  seen = Duplicates()
  assert seen.add("a b c d e", "Truth", ["c1", "c2"]) is None
  assert seen.add("A b c—d e!", "other", ["c9"]) == "duplicate"
  # The same answer from the same chunks, however it is asked.
  assert seen.add("f g h i j", "truth", ["c2", "c1"]) == "duplicate"
  assert seen.add("f g h i j", "truth", ["c2", "c3"]) is None


def test_near_repeats():
  seen = Duplicates(near=0.5)
  # Runs: abc bcd cde def.
  assert seen.add("a b c d e f", "one", ["1"]) is None
  # abc bcd cde dex: 3 of 5 in all are shared, 0.6.
  assert seen.add("a b c d e x", "two", ["2"]) == "near_duplicate"
  # abc bcd cdx dxy: 2 of 6, 0.33.
  assert seen.add("a b c d x y", "three", ["3"]) is None


def test_an_answer_is_not_asked_for_again_and_again():
  seen = Duplicates(per_truth=2)
  assert seen.add("a b c", "X-ray", ["1"]) is None
  assert seen.add("d e f", "x ray", ["2"]) is None
  assert seen.add("g h i", "X ray", ["3"]) == "overused_answer"


@pytest.mark.parametrize(
  ("field", "value"), [("near", 0), ("near", 1.5), ("per_truth", 0)]
)
def test_refuses_what_cannot_be(field, value):
  with pytest.raises(ValueError, match=f"{field} is {value}"):
    Duplicates(**{field: value})
