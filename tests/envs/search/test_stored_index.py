"""An index on disk behaves as one in memory."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.envs.search import ranking
from arl_jax.envs.search.corpus import Corpus
from arl_jax.envs.search.embedders import named_embedder
from arl_jax.envs.search.shards import digest
from arl_jax.envs.search.stored_index import StoredIndex
from tests.envs.search import corpora


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  root = tmp_path_factory.mktemp("stored")
  corpora.write(root / "source", files=24)
  corpora.build(root / "source", root / "out")
  return StoredIndex(root / "out")


@pytest.fixture(scope="module")
def memory(stored):
  return corpora.in_memory(stored)


QUERIES = st.lists(st.sampled_from([*corpora.WORDS, "same", "zzz"]), max_size=6)


class TestSearch:
  @settings(max_examples=60, deadline=None)
  @given(words=QUERIES, limit=st.integers(0, 80), excluded=st.integers(0, 30))
  def test_has_the_hits_of_one_in_memory(
    self, stored, memory, words, limit, excluded
  ):
    query = " ".join(words)
    exclude = [h.chunk_id for h in stored.search(query, limit=excluded)]
    exclude.append("made-up_0")
    found = stored.search(query, exclude=exclude, limit=limit)
    assert found == memory.search(query, exclude=exclude, limit=limit)
    assert len(found) <= limit
    assert not {h.chunk_id for h in found} & set(exclude)

  def test_equal_scores_keep_the_order_of_the_corpus(self, tmp_path):
    (tmp_path / "source").mkdir()
    for i in range(150):
      (tmp_path / "source" / f"{i:03d}.txt").write_text(f"word filler{i:03d}")
    corpora.build(tmp_path / "source", tmp_path / "out")
    index = StoredIndex(tmp_path / "out")
    # BM25 gives all the same; 60 of 150 are wanted, from thirteen shards.
    ranked = index._lexicon.rank("word", {0, 5}, 60)
    assert ranked == [i for i in range(62) if i not in (0, 5)]
    memory = corpora.in_memory(index)
    for query in ("word", "word filler003"):
      assert index.search(query, limit=70) == memory.search(query, limit=70)

  @pytest.mark.parametrize(
    "query", ["x" * 100_000, "\x00\ud800 ban", "ban " * 50_000, " ?! "]
  )
  def test_hostile_queries_are_cheap(self, stored, query):
    began = time.perf_counter()
    stored.search(query)
    assert time.perf_counter() - began < 1.0


def test_every_chunk_is_found_by_its_id(tmp_path):
  # One document of 256 has a digest that ends in a zero.
  names = [f"{i}" for i in range(3000)]
  zeros = [n for n in names if digest(f"{n}.txt").endswith(b"\0")]
  assert zeros
  (tmp_path / "source").mkdir()
  for name in (*zeros, *names[:20]):
    (tmp_path / "source" / f"{name}.txt").write_text(f"word number{name}")
  corpora.build(tmp_path / "source", tmp_path / "out")
  corpus = StoredIndex(tmp_path / "out").corpus
  for i, chunk in enumerate(corpus.chunks):
    assert corpus.position(chunk.chunk_id) == i
    assert corpus.chunk(chunk.chunk_id) == chunk
    assert corpus.chunks_of(chunk.doc_id) == (chunk,)


class TestRank:
  def test_ranks_as_one_in_memory(self, stored, memory):
    ids = [c.chunk_id for c in stored.corpus.chunks][::3]
    assert stored.rank("ban kit", ids) == memory.rank("ban kit", ids)
    assert stored.rank("ban", []) == memory.rank("ban", []) == []
    with pytest.raises(KeyError):
      stored.rank("ban", ["made-up_0"])


class TestGrep:
  @pytest.mark.parametrize(
    "pattern",
    [
      "ban",
      "BAN|kit",
      r"^\w+",
      r"\.$",
      r"(?m)^the",
      r"\bsame\b",
      "a*",
      r"\Athe",
      r"(?s).\z",
      r"[^a-z .]",
      r"\s[^b]",
      r"\W",
      r"[\^$]",
      r"\Q$\E",
      r"\B",
      "zzz",
    ],
  )
  @pytest.mark.parametrize("limit", [0, 3, 1000])
  def test_finds_what_one_in_memory_finds(self, stored, memory, pattern, limit):
    import re2

    found = stored.grep(pattern, limit=limit)
    assert found == memory.grep(pattern, limit=limit)
    # Chunk by chunk, as the pattern is meant.
    regex = re2.compile("(?i)" + pattern)
    assert (
      found
      == [c.chunk_id for c in stored.corpus.chunks if regex.search(c.text)][
        :limit
      ]
    )
    assert found.note == ""

  @settings(max_examples=100, deadline=None)
  @given(st.text("ab^$.*[]()\\n |kt", min_size=1, max_size=10))
  def test_any_pattern_is_read_chunk_by_chunk(self, stored, pattern):
    import re2

    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    try:
      found = stored.grep(pattern, limit=10_000)
    except ValueError:
      return
    regex = re2.compile(pattern, options)
    assert found == [
      c.chunk_id for c in stored.corpus.chunks if regex.search(c.text)
    ]

  def test_refuses_a_bad_pattern(self, stored):
    with pytest.raises(ValueError, match="isn't RE2 syntax"):
      stored.grep("(")


class TestCorpus:
  def test_reads_as_one_in_memory(self, stored):
    corpus = stored.corpus
    plain = Corpus(tuple(corpus.documents), tuple(corpus.chunks))
    assert corpus.digest == plain.digest
    assert dict(corpus.positions) == plain.positions
    for document in plain.documents:
      assert corpus.chunks_of(document.doc_id) == plain.chunks_of(
        document.doc_id
      )
    for chunk in plain.chunks:
      assert corpus.chunk(chunk.chunk_id) == chunk
    assert corpus.chunks[-1] == plain.chunks[-1]
    assert corpus.chunks[2:9:3] == plain.chunks[2:9:3]
    assert plain.chunks[3] in corpus.chunks
    with pytest.raises(IndexError):
      corpus.chunks[len(plain.chunks)]

  @pytest.mark.parametrize(
    "name",
    ["", "_", "f0.txt", "f0.txt_", "f0.txt_00", "f0.txt_-1", "f0.txt_ 0",
     "f0.txt_99", "f0.txt_" + "9" * 30, "\ud800_0", "f99.txt_0", "f0.txt_٠"],
  )  # fmt: skip
  def test_no_other_name_is_a_chunk(self, stored, name):
    assert name not in stored.corpus.positions
    assert stored.corpus.positions.get(name) is None
    with pytest.raises(KeyError):
      stored.corpus.chunk(name)

  def test_a_document_has_the_text_of_its_chunks(self, stored):
    document = stored.corpus.documents[0]
    chunks = stored.corpus.chunks_of(document.doc_id)
    assert document.text == "\n\n".join(c.text for c in chunks)
    with pytest.raises(KeyError):
      stored.corpus.chunks_of("made-up")


def test_refuses_another_embedder(tmp_path):
  corpora.write(tmp_path / "source")
  corpora.build(tmp_path / "source", tmp_path / "out")
  with pytest.raises(ValueError, match=r"made with embedder 'hashed:32'"):
    StoredIndex(tmp_path / "out", embedder=named_embedder("hashed:64"))
  StoredIndex(tmp_path / "out", embedder=named_embedder("hashed:32"))
  index = StoredIndex(tmp_path / "out", grep_seconds=0.0)
  found = index.grep("ban")
  assert (found, found.note) == ([], "stopped after 0 s")


class TestNearest:
  def test_takes_the_best_and_keeps_the_order_of_equals(self):
    rows = np.zeros((6, 4), np.float32)
    rows[:, 0] = [0.5, 1.0, 0.25, 1.0, 0.0, -1.0]
    query = np.array([1, 0, 0, 0], np.float32)

    def take(depth, excluded=()):
      return ranking.nearest(
        rows @ query,
        lambda i: ranking.row_products(rows[i], query),
        set(excluded),
        depth,
      )

    # Equal ones in order, nothing of what is orthogonal or opposite.
    assert take(9) == [1, 3, 0, 2]
    assert take(1) == [1]
    assert take(2, [1]) == [3, 0]
    assert take(0) == []

  @settings(max_examples=60, deadline=None)
  @given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 12))
  def test_equals_a_full_sort(self, seed, n, depth):
    draw = np.random.default_rng(seed)
    rows = draw.integers(-2, 3, (n, 8)).astype(np.float32)
    query = draw.integers(-2, 3, 8).astype(np.float32)
    exact = (rows * query).sum(axis=1)
    order = np.argsort(-exact, kind="stable")[:depth]
    found = ranking.nearest(
      rows @ query,
      lambda i: ranking.row_products(rows[i], query),
      set(),
      depth,
    )
    assert found == [int(i) for i in order if exact[i] > 0]
