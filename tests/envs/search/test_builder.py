"""Indexes on disk: brought up to date, gone on with, mended, shared."""

import dataclasses
import fcntl
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from arl_jax.envs.search.embedders import NamedEmbedder, named_embedder
from arl_jax.envs.search.stored_index import StoredIndex
from tests.envs.search import corpora

ROOT = pathlib.Path(__file__).parents[3]


def opened(path) -> StoredIndex:
  return StoredIndex(path)


def rebuilt(source, tmp_path):
  """What an index made in one go holds."""
  fresh = tmp_path / "fresh"
  shutil.rmtree(fresh, ignore_errors=True)
  corpora.build(source, fresh)
  return corpora.contents(opened(fresh))


@pytest.fixture
def source(tmp_path):
  corpora.write(tmp_path / "source")
  return tmp_path / "source"


class TestFirstBuild:
  def test_counts_what_it_did(self, source, tmp_path):
    summary = corpora.build(source, tmp_path / "out")
    index = opened(tmp_path / "out")
    assert summary.files == summary.read == 12
    assert summary.chunks == len(index.corpus.chunks)
    # Of the texts that f0, f9 and others share, the first one counts.
    repeated = summary.left_out.count("chunks whose text an earlier one has")
    assert summary.embedded == summary.chunks + repeated
    assert repeated == 1
    assert len(index.manifest.shards) > 1
    modes = {p.stat().st_mode & 0o666 for p in (tmp_path / "out").rglob("*.*")}
    assert modes == {(tmp_path / "out").stat().st_mode & 0o666}
    assert summary.bytes == sum(
      p.stat().st_size
      for p in (tmp_path / "out").rglob("*")
      if p.is_file() and p.name != "building.lock"
    )

  def test_ids_count_the_chunks_of_a_document(self, tmp_path):
    (tmp_path / "source").mkdir()
    text = "\n\n".join(f"word{i} " * 8 for i in range(3))
    (tmp_path / "source" / "a_1.txt").write_text(text)
    corpora.build(tmp_path / "source", tmp_path / "out")
    ids = [c.chunk_id for c in opened(tmp_path / "out").corpus.chunks]
    assert ids == ["a_1.txt_0", "a_1.txt_1", "a_1.txt_2"]

  def test_the_first_of_documents_with_one_id_counts(self, tmp_path):
    (tmp_path / "source").mkdir()
    lines = [
      {"text": "one ban", "id": "x"},
      {"text": "two ban", "id": "x"},
      {"text": "three ban"},
    ]
    (tmp_path / "source" / "a.jsonl").write_text(
      "\n".join(map(json.dumps, lines))
    )
    (tmp_path / "source" / "a-b.txt").write_text("four ban")
    (tmp_path / "source" / "a b.txt").write_text("five ban")
    summary = corpora.build(tmp_path / "source", tmp_path / "out")
    # "a b.txt" comes before "a-b.txt", whose id it takes.
    assert [c.text for c in opened(tmp_path / "out").corpus.chunks] == [
      "five ban",
      "one ban",
      "three ban",
    ]
    reason = "documents whose id an earlier one has"
    assert summary.left_out.count(reason) == 2

  def test_refuses_what_holds_no_text(self, tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(ValueError, match="holds no file ending in"):
      corpora.build(tmp_path / "source", tmp_path / "out")
    (tmp_path / "source" / "x.txt").write_text("---")
    with pytest.raises(ValueError, match="holds no text"):
      corpora.build(tmp_path / "source", tmp_path / "out")
    with pytest.raises(ValueError, match="isn't a folder"):
      corpora.build(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(ValueError, match="lies in source"):
      corpora.build(tmp_path / "source", tmp_path / "source" / "out")

  def test_refuses_a_folder_of_something_else(self, source, tmp_path):
    with pytest.raises(ValueError, match="and no index; name a folder"):
      corpora.build(tmp_path / "source", tmp_path)


class TestSecondBuild:
  def test_nothing_changed(self, source, tmp_path):
    corpora.build(source, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    summary = corpora.build(source, tmp_path / "out")
    assert (summary.read, summary.embedded, summary.changed) == (0, 0, False)
    del before[tmp_path / "out" / "building.lock"]
    assert before == {p: p.stat().st_mtime_ns for p in before}

  def test_a_touched_file_is_looked_at_and_not_made_again(
    self, source, tmp_path
  ):
    corpora.build(source, tmp_path / "out")
    os.utime(source / "f0.txt", ns=(1, 1))
    summary = corpora.build(source, tmp_path / "out")
    assert (summary.read, summary.embedded, summary.changed) == (0, 0, False)

  @pytest.mark.parametrize("seed", range(6))
  def test_equals_one_made_in_one_go(self, source, tmp_path, seed):
    corpora.build(source, tmp_path / "out")
    draw = np.random.default_rng(seed)
    changed = 0
    for path in sorted(source.iterdir()):
      kind = draw.integers(0, 5)
      if kind == 0:
        path.unlink()
      elif kind == 1 and path.suffix == ".txt":
        path.write_text(f"ban new text of {path.name}")
        changed += 1
    (source / "f5a.txt").write_text("inserted between others")
    (source / "z.txt").write_text("ban at the end")
    summary = corpora.build(source, tmp_path / "out")
    assert summary.read == changed + 2
    index = opened(tmp_path / "out")
    assert corpora.contents(index) == rebuilt(source, tmp_path)
    # What the first version alone had is gone from the disk.
    names = {s.name for s in index.manifest.shards}
    assert {p.stem for p in (tmp_path / "out").glob("shard-*")} == names

  def test_lines_that_were_added_are_read_alone(self, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    lines = [json.dumps({"text": f"ban line {i} " * 3}) for i in range(40)]
    (source / "x.jsonl").write_text("\n".join(lines[:30]) + "\n")
    first = corpora.build(source, tmp_path / "out")
    (source / "x.jsonl").write_text("\n".join(lines) + "\n")
    second = corpora.build(source, tmp_path / "out")
    # 30 chunks are shards of 12, 12 and 6; the last is read again, and 10 more.
    assert (first.embedded, second.embedded) == (30, 16)
    assert corpora.contents(opened(tmp_path / "out")) == rebuilt(
      source, tmp_path
    )

  def test_a_chunk_comes_back_when_its_first_is_gone(self, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in "abc":
      (source / f"{name}.txt").write_text("the very same text")
    corpora.build(source, tmp_path / "out")
    corpus = opened(tmp_path / "out").corpus
    assert [c.chunk_id for c in corpus.chunks] == ["a.txt_0"]
    assert corpus.chunks_of("b.txt") == ()
    (source / "a.txt").unlink()
    summary = corpora.build(source, tmp_path / "out")
    assert (summary.read, summary.embedded) == (0, 0)
    corpus = opened(tmp_path / "out").corpus
    assert [c.chunk_id for c in corpus.chunks] == ["b.txt_0"]

  def test_refuses_another_embedder_unless_told(self, source, tmp_path):
    corpora.build(source, tmp_path / "out")
    other = named_embedder("hashed:16")
    with pytest.raises(ValueError, match=r"made with embedder 'hashed:32'"):
      corpora.build(source, tmp_path / "out", other)
    summary = corpora.build(source, tmp_path / "out", other, overwrite=True)
    assert summary.read == 12
    assert opened(tmp_path / "out").manifest.made_by["dim"] == 16

  def test_an_open_index_stays_as_it_was(self, source, tmp_path):
    corpora.build(source, tmp_path / "out")
    index = opened(tmp_path / "out")
    before = corpora.contents(opened(tmp_path / "out"))
    shutil.rmtree(source)
    corpora.write(source, seed=1)
    corpora.build(source, tmp_path / "out")
    assert corpora.contents(index) == before
    assert corpora.contents(opened(tmp_path / "out")) != before


class TestInterrupted:
  def interrupt(self, source, out, after):
    """Builds until `after` batches were embedded."""
    left = [after]

    def embed(texts):
      left[0] -= 1
      if left[0] < 0:
        raise KeyboardInterrupt
      return corpora.EMBEDDER.embed(texts)

    embedder = dataclasses.replace(corpora.EMBEDDER, embed=embed)
    with pytest.raises(KeyboardInterrupt):
      corpora.build(source, out, embedder)

  @pytest.mark.parametrize("after", [0, 1, 3])
  def test_goes_on_where_it_was(self, source, tmp_path, after):
    whole = corpora.build(source, tmp_path / "whole")
    self.interrupt(source, tmp_path / "out", after)
    with pytest.raises(ValueError, match="holds no index; make one"):
      opened(tmp_path / "out")
    summary = corpora.build(source, tmp_path / "out")
    made = [s.chunks for s in opened(tmp_path / "whole").manifest.shards]
    assert summary.embedded == whole.embedded - sum(made[:after])
    assert corpora.contents(opened(tmp_path / "out")) == corpora.contents(
      opened(tmp_path / "whole")
    )

  def test_the_old_index_stays_meanwhile(self, source, tmp_path):
    corpora.build(source, tmp_path / "out")
    before = corpora.contents(opened(tmp_path / "out"))
    shutil.rmtree(source)
    corpora.write(source, seed=1)
    self.interrupt(source, tmp_path / "out", 2)
    assert corpora.contents(opened(tmp_path / "out")) == before
    corpora.build(source, tmp_path / "out")
    assert corpora.contents(opened(tmp_path / "out")) == rebuilt(
      source, tmp_path
    )

  @pytest.mark.slow
  def test_killed_at_any_step_it_goes_on(self, tmp_path):
    corpora.write(tmp_path / "source", files=6)
    done = subprocess.run(
      [sys.executable, "-m", "tests.envs.search.kills"]
      + [str(tmp_path / name) for name in ("source", "killed")],
      cwd=ROOT,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    # Three files a shard at least, each of three steps, every other of which
    # was the last one.
    assert int(done.stdout) >= 10

  def test_a_second_builder_is_refused(self, source, tmp_path):
    corpora.build(source, tmp_path / "out")
    with (tmp_path / "out" / "building.lock").open("w") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      lock.write("process 7")
      lock.flush()
      with pytest.raises(
        ValueError, match=r"built by another process \(process 7\); wait"
      ):
        corpora.build(source, tmp_path / "out")


class TestDamage:
  def damaged(self, out, pattern, change):
    path = max(out.glob(pattern), key=lambda p: p.stat().st_size)
    change(path)
    return path.name

  @pytest.mark.parametrize(
    "pattern",
    ["index.json", "shard-*.bin", "table-*.bin", "words-*/*.idx"],
  )
  @pytest.mark.parametrize("change", ["cut", "gone"])
  def test_is_said_and_mended(self, source, tmp_path, pattern, change):
    out = tmp_path / "out"
    corpora.build(source, out)
    before = corpora.contents(opened(out))

    def harm(path):
      if change == "gone":
        path.unlink()
      else:
        os.truncate(path, path.stat().st_size // 2)

    name = self.damaged(out, pattern, harm)
    with pytest.raises(ValueError, match=r"damaged|missing|no index") as caught:
      opened(out)
    assert name in str(caught.value) or name == "index.json"
    assert "\n" not in str(caught.value)
    summary = corpora.build(source, out)
    assert summary.changed
    assert corpora.contents(opened(out)) == before

  def test_other_bytes_are_found_when_asked_for(self, source, tmp_path):
    out = tmp_path / "out"
    corpora.build(source, out)
    before = corpora.contents(opened(out))

    def flip(path):
      data = bytearray(path.read_bytes())
      data[7] ^= 64
      path.write_bytes(data)

    self.damaged(out, "shard-*.bin", flip)
    assert not corpora.build(source, out).changed
    lines = []
    assert corpora.build(source, out, verify=True, say=lines.append).changed
    assert "other bytes than were written; reading its files" in lines[0]
    assert corpora.contents(opened(out)) == before

  def test_another_version_or_kind_is_said(self, source, tmp_path):
    out = tmp_path / "out"
    corpora.build(source, out)
    head, body = (out / "index.json").read_bytes().split(b"\n", 1)
    newer = head.replace(b'"format": 1', b'"format": 9')
    (out / "index.json").write_bytes(newer + b"\n" + body)
    for act in (lambda: opened(out), lambda: corpora.build(source, out)):
      with pytest.raises(ValueError, match="has format 9, this program reads"):
        act()
    (out / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="isn't a file of arl_jax search"):
      opened(out)

  def test_a_full_disk_is_one_error_and_the_run_goes_on(self, source, tmp_path):
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # More than any shard of 12 chunks takes but less than one of them all.
    large = dataclasses.replace(corpora.SMALL, shard_chunks=10_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
      with pytest.raises(OSError, match="File too large"):
        corpora.build(source, out, chunks=large)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(out.glob("*.partial"))
    corpora.build(source, out)
    assert corpora.contents(opened(out)) == rebuilt(source, tmp_path)


def test_refuses_an_embedder_of_another_shape(source, tmp_path):
  wrong = NamedEmbedder("x", "x", 4, lambda texts: np.zeros((len(texts), 3)))
  with pytest.raises(ValueError, match=r"embedder x gave shape \[\d+, 3\]"):
    corpora.build(source, tmp_path / "out", wrong)


@pytest.mark.parametrize("field", ["max_tokens", "tolerance", "shard_chunks"])
def test_refuses_bad_numbers(field):
  with pytest.raises(ValueError, match=f"{field} is -1, not at least"):
    dataclasses.replace(corpora.SMALL, **{field: -1})
