"""Tails that join their predecessors; the rest is in test_corpus.py."""

from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.envs.search import chunking


def words(text: str) -> int:
  return len(text.split())


def cut(text, tolerance):
  return list(chunking.cut(text, words, 4, tolerance))


def test_a_short_tail_joins_its_predecessor():
  # 4 + 1 words are within 4 + 1; without tolerance the tail is a chunk.
  assert cut("a b c d\n\ne", 1) == ["a b c d\n\ne"]
  assert cut("a b c d\n\ne", 0) == ["a b c d", "e"]


def test_a_longer_tail_stays_alone():
  # 2 words are more than the tolerance of 1.
  assert cut("a b c d\n\ne f", 1) == ["a b c d", "e f"]


def test_only_the_last_chunk_is_longer():
  assert cut("a b c d\n\ne f g h\n\ni", 1) == ["a b c d", "e f g h\n\ni"]


def test_a_tail_joins_no_more_than_its_neighbour_allows():
  # Counted as one, "d" and the tail are a word more than apart.
  def count(text):
    return len(text.split()) + text.count("\n\n")

  assert list(chunking.cut("a b c d\n\ne", count, 4, 1)) == ["a b c d", "e"]


def test_counts_a_quarter_of_the_bytes():
  # 5 bytes are 2 tokens, rounded up; an ideograph has 3 bytes.
  assert chunking.quarter_of_bytes("abcde") == 2
  assert chunking.quarter_of_bytes("漢" * 4) == 3
  assert chunking.quarter_of_bytes("") == 0
  assert chunking.quarter_of_bytes("\ud800") == 1


@settings(max_examples=60, deadline=None)
@given(st.text("ab .\n", max_size=200), st.integers(2, 9), st.integers(0, 5))
def test_all_but_the_last_keep_to_the_bound(text, most, tolerance):
  found = list(chunking.cut(text, words, most, tolerance))
  assert all(words(part) <= most for part in found[:-1])
  assert all(words(part) <= most + tolerance for part in found)
  assert "".join(found).split() == [] or "".join(
    "".join(found).split()
  ) == "".join(text.split())
