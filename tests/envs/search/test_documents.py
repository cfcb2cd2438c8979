"""Folders of hostile files: nothing is lost without a reason."""

import json
import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.envs.search import documents as documents_lib
from arl_jax.envs.search.corpus import Document, folder_documents
from arl_jax.envs.search.left_out import LeftOut


def read(root):
  """Documents of a folder, and what isn't among them."""
  left_out = LeftOut()
  found = []
  for file in documents_lib.list_files(root, left_out):
    reader = documents_lib.DocumentReader(file)
    found += list(reader)
    left_out.merge(reader.left_out)
  return found, {reason: count for reason, count, _ in left_out}


def test_reads_text_as_folder_documents_does(tmp_path):
  (tmp_path / "sub").mkdir()
  (tmp_path / "sub" / "b.md").write_text("two")
  (tmp_path / "a b.TXT").write_bytes(b"\xef\xbb\xbfone\r\nline")
  found, left_out = read(tmp_path)
  assert found == folder_documents(tmp_path)
  assert found[0] == Document("a-b.TXT", "a b.TXT", "one\nline")
  assert left_out == {}


def test_reads_pages(tmp_path):
  (tmp_path / "x.html").write_text("<title>T</title><p>a<p>b")
  (tmp_path / "y.htm").write_bytes(b"<meta charset=iso-8859-1><p>caf\xe9</p>")
  found, _ = read(tmp_path)
  assert found == [
    Document("x.html", "T", "a\n\nb"),
    Document("y.htm", "y.htm", "café"),
  ]


def test_reads_lines(tmp_path):
  lines = [
    {"text": "one"},
    {"text": "two", "id": "the second", "title": "Two\n2"},
    {"text": "three\r\n3", "id": 7, "other": [1]},
  ]
  (tmp_path / "x.jsonl").write_text(
    "\n\n".join(json.dumps(line) for line in lines)
  )
  found, left_out = read(tmp_path)
  assert found == [
    Document("x.jsonl:1", "x.jsonl:1", "one"),
    Document("the-second", "Two 2", "two"),
    Document("7", "7", "three\n3"),
  ]
  assert left_out == {}


def test_a_reader_goes_on_from_a_line(tmp_path):
  file = tmp_path / "x.jsonl"
  file.write_text('{"text": "one"}\n{"text": "two"}\n')
  (listed,) = documents_lib.list_files(tmp_path, LeftOut())
  first = documents_lib.DocumentReader(listed)
  assert next(iter(first)).text == "one"
  # 15 bytes and the end of the line.
  assert (first.end, first.line) == (16, 2)
  rest = documents_lib.DocumentReader(listed, first.end, first.line)
  assert [d.doc_id for d in rest] == ["x.jsonl:2"]
  whole = documents_lib.DocumentReader(listed)
  assert len(list(whole)) == 2
  assert whole.digest != rest.digest
  assert (rest.begin, rest.end) == (16, 32)


@pytest.mark.parametrize(
  ("name", "data", "reason"),
  [
    ("x.txt", b"", "empty files"),
    ("x.txt", b" \n\xef\xbb\xbf ", None),
    ("x.html", b"<p> </p>", "empty files"),
    ("x.txt", b"caf\xe9", "files that aren't text"),
    ("x.md", b"a\0b", "files that aren't text"),
    ("x.html", b"<meta charset=punycode>caf\xe9", "files that aren't text"),
    ("x.html", b"<meta charset=ascii>caf\xe9", "files that aren't text"),
    ("x.txt", b"\xff\xfea", "files that aren't text"),
    ("x.html", b"a<script>b", "ends of pages"),
    ("x.pdf", b"text", "files of other endings"),
    ("x.jsonl", b'{"text": ""}\n', "lines without text"),
    ("x.jsonl", b'["text"]\n', "lines that aren't documents"),
    ("x.jsonl", b"{\n", "lines that aren't documents"),
    ("x.jsonl", b'{"text": 3}\n', "lines that aren't documents"),
    ("x.jsonl", b'{"text": "a", "id": ""}\n', "lines that aren't documents"),
    ("x.jsonl", b'{"text": "a", "id": true}\n', "lines that aren't documents"),
    ("x.jsonl", b'{"text": "a", "title": 1}\n', "lines that aren't documents"),
    ("x.jsonl", b'{"text": "\\u0000"}\n', "lines that aren't documents"),
    ("x.jsonl", b'{"text": "\\ud800"}\n', "lines that aren't documents"),
    ("x.jsonl", b'{"text": "a\xff"}\n', "lines that aren't documents"),
    ("x.jsonl", b"[" * 100_000 + b"\n", "lines that aren't documents"),
  ],
)
def test_says_what_was_left_out(tmp_path, name, data, reason):
  (tmp_path / name).write_bytes(data)
  _, left_out = read(tmp_path)
  assert left_out == ({reason: 1} if reason else {})


def test_reads_utf_16_with_a_mark(tmp_path):
  (tmp_path / "x.txt").write_bytes("ünï".encode("utf-16"))
  (tmp_path / "y.txt").write_bytes("ünï".encode("utf-32"))
  found, _ = read(tmp_path)
  assert [d.text for d in found] == ["ünï", "ünï"]


def test_links_in_circles_end(tmp_path):
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "x.txt").write_text("one")
  (tmp_path / "a" / "loop").symlink_to(tmp_path)
  (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
  (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
  (tmp_path / "same.txt").symlink_to(tmp_path / "a" / "x.txt")
  os.mkfifo(tmp_path / "pipe.txt")
  found, left_out = read(tmp_path)
  assert [d.doc_id for d in found] == ["a/x.txt", "same.txt"]
  assert left_out == {
    "files that can't be read": 2,
    "links to folders": 1,
    "pipes, sockets and devices": 1,
  }


def test_a_file_that_goes_away_is_counted(tmp_path):
  (tmp_path / "x.txt").write_text("one")
  (file,) = documents_lib.list_files(tmp_path, LeftOut())
  (tmp_path / "x.txt").unlink()
  reader = documents_lib.DocumentReader(file)
  assert list(reader) == []
  assert reader.failed
  assert reader.left_out.count("files that can't be read") == 1


def test_names_that_are_no_text(tmp_path):
  with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "wb") as file:
    file.write(b"one")
  (found,), _ = read(tmp_path)
  assert found.doc_id == "caf\ufffd.txt"


def test_a_line_of_100_megabytes_is_passed_over(tmp_path):
  piece = b"x" * 2**20
  with (tmp_path / "x.jsonl").open("wb") as file:
    file.write(b'{"text": "before"}\n{"text": "')
    for _ in range(100):
      file.write(piece)
    file.write(b'"}\n{"text": "after"}\n')
  with (tmp_path / "y.txt").open("wb") as file:
    file.truncate(100 * 2**20)
  tracemalloc.start()
  try:
    found, left_out = read(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert [d.doc_id for d in found] == ["x.jsonl:1", "x.jsonl:3"]
  assert left_out == {
    "lines of more than 16777216 bytes": 1,
    "files of more than 16777216 bytes": 1,
  }
  # A line or document of 16 MiB, and what joining its pieces takes.
  assert peak < 48 * 2**20


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["txt", "html", "jsonl"]))
def test_any_bytes_are_documents_or_counted(tmp_path_factory, data, ending):
  root = tmp_path_factory.mktemp("any")
  (root / f"x.{ending}").write_bytes(data)
  found, left_out = read(root)
  assert found or left_out or not data.strip()
  assert all("\0" not in d.text and d.text.strip() for d in found)
