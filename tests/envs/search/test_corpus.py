"""Documents and chunks."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.envs.search import corpus


def words(text: str) -> int:
  return len(text.split())


def build(*texts: str, max_tokens: int = 4, count_tokens=words):
  documents = [corpus.Document(f"d{i}", "", t) for i, t in enumerate(texts)]
  return corpus.build_corpus(
    documents, count_tokens=count_tokens, max_tokens=max_tokens
  )


def texts(built: corpus.Corpus) -> list[str]:
  return [chunk.text for chunk in built.chunks]


class TestBuildCorpus:
  def test_merges_paragraphs_while_they_fit(self):
    # 2 + 2 words fill a chunk of 4; the third paragraph begins the next one.
    built = build("a b\n\nc d\n\ne f")
    assert texts(built) == ["a b\n\nc d", "e f"]
    assert [c.chunk_id for c in built.chunks] == ["d0_0", "d0_1"]

  def test_cuts_a_long_paragraph_between_sentences(self):
    assert texts(build("a b c. d e f. g")) == ["a b c.", "d e f. g"]

  def test_cuts_a_long_sentence_between_words(self):
    assert texts(build("a b c d e f")) == ["a b c d", "e f"]

  def test_cuts_a_long_word_in_the_middle(self):
    assert texts(build("abcdefgh", count_tokens=len)) == ["abcd", "efgh"]

  def test_counts_the_whole_again(self):
    # 7 characters are 1 token, twice that are 14 // 4 = 3, not 1 + 1.
    built = build(
      "aaaaaaa bbbbbb\n\ncccc",
      max_tokens=2,
      count_tokens=lambda s: max(1, len(s) // 4),
    )
    assert max(len(t) // 4 for t in texts(built)) <= 2
    assert "".join(re.findall(r"\w", "".join(texts(built)))) == (
      "aaaaaaabbbbbbcccc"
    )

  def test_drops_duplicates_and_what_has_no_letter(self):
    built = build("same text", "=====\n\n", "same text", "other")
    assert texts(built) == ["same text", "other"]
    assert built.chunks_of("d1") == built.chunks_of("d2") == ()

  def test_looks_up_by_id(self):
    built = build("a b c d e", "f")
    assert built.chunk("d0_1").text == "e"
    assert [c.text for c in built.chunks_of("d0")] == ["a b c d", "e"]
    assert built.positions == {"d0_0": 0, "d0_1": 1, "d1_0": 2}
    with pytest.raises(KeyError):
      built.chunks_of("d2")

  def test_digest_follows_the_contents(self):
    assert build("a b").digest == build("a b").digest
    assert build("a b").digest != build("a c").digest

  def test_refuses_a_repeated_id(self):
    document = corpus.Document("x", "", "a")
    with pytest.raises(ValueError, match="'x' occurs twice"):
      corpus.build_corpus([document, document], count_tokens=words)

  def test_refuses_a_bound_below_one(self):
    with pytest.raises(ValueError, match="max_tokens is 0"):
      build("a", max_tokens=0)

  def test_refuses_a_character_above_the_bound(self):
    with pytest.raises(ValueError, match="character 'é' alone has 2"):
      build("é", max_tokens=1, count_tokens=lambda s: len(s.encode()))

  @settings(max_examples=60, deadline=None)
  @given(
    st.text("ab .\n\t<\x00é", max_size=200),
    st.sampled_from([words, len, lambda s: max(1, len(s) // 4)]),
    st.integers(2, 20),
  )
  def test_chunks_are_bounded_and_lose_no_letter(self, text, count, most):
    built = build(text, max_tokens=most, count_tokens=count)
    assert all(count(t) <= most for t in texts(built))
    assert all(t == t.strip() and t for t in texts(built))
    assert len(set(texts(built))) == len(built.chunks)
    # Only repeated chunks may go missing.
    assert set("".join(texts(built))) >= set(re.findall("[abé]", text))


class TestFolderDocuments:
  def test_reads_text_files_in_order(self, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("two")
    (tmp_path / "a b.txt").write_bytes(b"\xef\xbb\xbfone\r\nline")
    (tmp_path / "empty.rst").write_text(" \n")
    (tmp_path / "code.py").write_text("no")
    assert corpus.folder_documents(tmp_path) == [
      corpus.Document("a-b.txt", "a b.txt", "one\nline"),
      corpus.Document("sub/b.md", "sub/b.md", "two"),
    ]

  @pytest.mark.parametrize(
    ("data", "message"),
    [
      (b"\x7fELF\0\1", r"x\.txt holds a NUL byte"),
      (b"caf\xe9", r"x\.txt isn't UTF-8 \(byte 3\)"),
      (b"  ", "only empty files"),
    ],
  )
  def test_refuses_what_is_not_text(self, tmp_path, data, message):
    (tmp_path / "x.txt").write_bytes(data)
    with pytest.raises(ValueError, match=message):
      corpus.folder_documents(tmp_path)

  def test_refuses_a_folder_without_files(self, tmp_path):
    with pytest.raises(ValueError, match="holds no file ending in"):
      corpus.folder_documents(tmp_path)
    with pytest.raises(ValueError, match="isn't a folder"):
      corpus.folder_documents(tmp_path / "missing")

  def test_refuses_a_huge_file(self, tmp_path):
    with (tmp_path / "x.txt").open("wb") as file:
      file.truncate(2**24 + 1)
    with pytest.raises(ValueError, match="more than 16777216"):
      corpus.folder_documents(tmp_path)


class TestPythonDocuments:
  def test_reads_topics_and_modules(self):
    documents = {
      d.doc_id: d.text for d in corpus.python_documents(max_modules=None)
    }
    assert '"yield" statement' in documents["topic.yield"]
    assert "string.capwords(s, sep=None)\n" in documents["module.string"]
    assert not {"module.test", "module.antigravity"} & set(documents)
    assert sum(map(len, documents.values())) < 1_500_000

  def test_keeps_the_modules_with_most_text(self):
    documents = corpus.python_documents(max_modules=3)
    modules = [d for d in documents if d.doc_id.startswith("module.")]
    assert len(modules) == 3
    assert all(len(d.text) == 10_000 for d in modules)

  def test_none_of_the_modules(self):
    documents = corpus.python_documents(max_modules=0)
    assert all(d.doc_id.startswith("topic.") for d in documents)
    with pytest.raises(ValueError, match="max_modules is -1"):
      corpus.python_documents(max_modules=-1)
