"""Hybrid search, and hostile queries and patterns."""

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.envs.search import corpus
from arl_jax.envs.search import index as index_lib

TEXTS = (
  "the cat sat on the mat",
  "a dog chased the cat",
  "__getattr__ is called for a missing attribute",
  "volcanic ash",
  "a dog barked",
)


def make(texts=TEXTS, embed=None) -> index_lib.SearchIndex:
  documents = [corpus.Document(f"d{i}", "", t) for i, t in enumerate(texts)]
  built = corpus.build_corpus(
    documents, count_tokens=lambda s: len(s.split()), max_tokens=64
  )
  return index_lib.SearchIndex(built, embed=embed)


INDEX = make()


def ids(hits) -> list[str]:
  return [hit.chunk_id for hit in hits]


def no_vectors(texts):
  return np.zeros((len(texts), 1), np.float32)


class TestSearch:
  def test_fuses_by_reciprocal_rank(self):
    # First by both sides: 1 / 21 + 1 / 21. Nothing else shares a word.
    best, *_ = INDEX.search("volcanic ash")
    assert best == index_lib.Hit("d3_0", pytest.approx(2 / 21))

  def test_ranks_by_words_alone_without_vectors(self):
    # "dog" and "chased" against "dog" alone.
    hits = make(embed=no_vectors).search("dog chased")
    assert ids(hits) == ["d1_0", "d4_0"]
    assert [h.score for h in hits] == pytest.approx([1 / 21, 1 / 22])

  def test_ranks_by_vectors_alone_without_a_shared_word(self):
    def embed(texts):
      return np.asarray([[len(t), 0.0] for t in texts], np.float32)

    # By length: 45, 22, 20, 12 and 12 characters, equals in corpus order.
    assert ids(make(embed=embed).search("zzz")) == [
      "d2_0",
      "d0_0",
      "d1_0",
      "d3_0",
      "d4_0",
    ]

  def test_finds_an_identifier_by_its_part(self):
    assert ids(INDEX.search("getattr"))[0] == "d2_0"
    assert index_lib.terms("An_Id __x__") == [
      "an_id", "an", "id", "__x__", "x",
    ]  # fmt: skip

  def test_excludes_before_it_cuts(self):
    hits = make(embed=no_vectors).search(
      "dog chased", exclude=["d1_0", "made-up"], limit=1
    )
    # d4 moves up to rank 1: the excluded chunk takes no place.
    assert hits == [index_lib.Hit("d4_0", pytest.approx(1 / 21))]

  def test_equal_scores_keep_the_order_of_the_corpus(self):
    built = make([f"word filler{i}" for i in range(60)], no_vectors)
    hits = built.search("word", limit=60)
    assert ids(hits) == [f"d{i}_0" for i in range(60)]

  def test_gives_nothing_for_nothing(self):
    assert INDEX.search("") == INDEX.search(" ?! ") == []
    assert INDEX.search("cat", limit=0) == []
    assert INDEX.search("cat", exclude=[f"d{i}_0" for i in range(5)]) == []

  @settings(max_examples=100, deadline=None)
  @given(st.text(max_size=60))
  def test_any_text_is_a_query(self, query):
    assert len(INDEX.search(query, limit=3)) <= 3

  @pytest.mark.parametrize(
    "query",
    [
      'text:(cat AND ^"-~2) OR [a TO *] \\ +-!{}',
      "\x00\x01 cat \x7f\ud800",
      "cat " * 25_000,
      "x" * 100_000,
      " ".join(f"w{i}" for i in range(20_000)),
    ],
  )
  def test_hostile_queries_are_cheap(self, query):
    start = time.perf_counter()
    INDEX.search(query)
    assert time.perf_counter() - start < 1.0

  def test_refuses_an_empty_corpus_and_a_wrong_embedder(self):
    with pytest.raises(ValueError, match="no chunks"):
      index_lib.SearchIndex(corpus.Corpus((), ()))
    with pytest.raises(ValueError, match=r"gave shape \[5\] for 5 texts"):
      make(embed=lambda texts: np.zeros(len(texts)))


class TestRank:
  def test_sorts_by_similarity(self):
    given_ids = ["d4_0", "d0_0", "d1_0"]
    assert INDEX.rank("dog chased cat", given_ids)[0] == "d1_0"
    assert sorted(INDEX.rank("", given_ids)) == INDEX.rank("", given_ids)
    with pytest.raises(KeyError):
      INDEX.rank("cat", ["made-up"])


class TestGrep:
  def test_matches_in_corpus_order_ignoring_case(self):
    assert INDEX.grep("CAT|dog") == ["d0_0", "d1_0", "d4_0"]
    assert INDEX.grep("CAT|dog", limit=2) == ["d0_0", "d1_0"]
    assert INDEX.grep(r"__\w+__") == ["d2_0"]
    assert INDEX.grep("zzz") == []

  @pytest.mark.parametrize(
    ("pattern", "message"),
    [
      ("", "has 0 characters"),
      ("a" * 257, "has 257 characters"),
      ("(", "isn't RE2 syntax"),
      (r"(a)\1", "isn't RE2 syntax"),
      ("(?=a)", "isn't RE2 syntax"),
      ("((a{100}){100}){100}", "isn't RE2 syntax"),
      (r"\pL{900}" * 3, "isn't RE2 syntax"),
      ("\ud800", "lone surrogate"),
    ],
  )
  def test_refuses_bad_patterns_in_one_line(self, pattern, message):
    with pytest.raises(ValueError, match=message) as caught:
      INDEX.grep(pattern)
    assert "\n" not in str(caught.value)

  def test_a_catastrophic_pattern_takes_linear_time(self):
    index = make(["a" * 50_000])
    start = time.perf_counter()
    assert index.grep(r"^(a+)+(a|aa)*$b") == []
    assert time.perf_counter() - start < 2.0

  @settings(max_examples=100, deadline=None)
  @given(
    st.one_of(st.text(max_size=30), st.text("ab()[]{}*+?|\\^$.,0", max_size=30))
  )
  def test_any_pattern_works_or_is_a_value_error(self, pattern):
    try:
      found = INDEX.grep(pattern)
    except ValueError as error:
      found = [str(error)]
    assert len(found) <= 5
    assert not any("\n" in line for line in found)


class TestHashedEmbedder:
  def test_rows_have_length_one_or_zero(self):
    rows = index_lib.hashed_embedder(16)(["cat dog", "the of", ""])
    assert rows.shape == (3, 16)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(
      np.linalg.norm(rows, axis=1), [1, 0, 0], atol=1e-6
    )

  def test_similar_words_are_nearer(self):
    a, b, c = index_lib.hashed_embedder()(["attribute", "attributes", "ash"])
    assert a @ b > 0.1 > a @ c

  def test_is_the_same_in_another_process(self):
    program = (
      "from arl_jax.envs.search import index;"
      "print(index.hashed_embedder(8)(['cat dog']).tobytes().hex())"
    )
    found = subprocess.run(
      [sys.executable, "-c", program],
      env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()
    here = index_lib.hashed_embedder(8)(["cat dog"]).tobytes().hex()
    assert found == here

  def test_refuses_no_dimension(self):
    with pytest.raises(ValueError, match="dim is 0"):
      index_lib.hashed_embedder(0)
