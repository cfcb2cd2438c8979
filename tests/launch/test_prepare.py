"""The program that prepares an index, stopped and started again."""

import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from arl_jax.envs.search.stored_index import StoredIndex
from tests.envs.search import corpora

ROOT = pathlib.Path(__file__).parents[2]


def start(*arguments):
  return subprocess.Popen(
    [sys.executable, "-m", "launch.prepare", *map(str, arguments)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def run(*arguments):
  process = start(*arguments)
  out, errors = process.communicate(timeout=120)
  return process.returncode, out, errors


def test_prints_what_it_did(tmp_path):
  corpora.write(tmp_path / "source")
  (tmp_path / "source" / "empty.md").write_text("")
  (tmp_path / "source" / "x.bin").write_bytes(b"\0")
  flags = [f"--source={tmp_path / 'source'}", f"--out={tmp_path / 'out'}"]
  code, out, errors = run("index", *flags, "--max_tokens=16", "--tolerance=4")
  assert (code, out.splitlines()[:3]) == (
    0,
    [
      "left out: 1 chunks whose text an earlier one has",
      "left out: 1 empty files, as empty.md",
      "left out: 1 files of other endings, as x.bin",
    ],
  ), errors
  index = StoredIndex(tmp_path / "out")
  assert index.manifest.made_by == {
    "max_tokens": 16,
    "tolerance": 4,
    "counter": "bytes/4",
    "embedder": "hashed:256",
    "dim": 256,
  }
  chunks = len(index.corpus.chunks)
  assert f" documents in {chunks} chunks, " in out
  assert f"13 of 13 files read, {chunks + 1} chunks embedded in " in out
  # Said in one line: an index that was made otherwise.
  code, _, errors = run("index", *flags)
  assert code == 1
  assert errors.startswith("error: ")
  assert errors.count("\n") == 1
  assert "was made with max_tokens 16 and not 512" in errors


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "say `index` and flags such as --source"),
    (["index"], "--source is missing"),
    (["index", "--source=/nowhere"], "--out is missing"),
    (["index", "--source=/nowhere", "--out=OUT"], "/nowhere isn't a folder"),
    (
      ["index", "--source=.", "--out=OUT", "--embedder=glove"],
      "embedder is 'glove'; it must be",
    ),
    (
      ["index", "--source=.", "--out=OUT", "--max_tokens=3"],
      "max_tokens is 3, not at least 16",
    ),
    (
      ["index", "--source=.", "--out=OUT", "--tokenizer=/nowhere"],
      "--tokenizer: /nowhere can't be read",
    ),
  ],
)
def test_says_what_is_wrong_in_one_line(tmp_path, arguments, message):
  code, _, errors = run(
    *(a.replace("OUT", str(tmp_path / "out")) for a in arguments)
  )
  assert code == 1
  assert errors.startswith("error: ")
  assert errors.count("\n") == 1
  assert message in errors
  assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_at_random_moments_it_goes_on(tmp_path):
  corpora.write(tmp_path / "source", files=120)
  flags = [
    "index",
    f"--source={tmp_path / 'source'}",
    "--max_tokens=16",
    "--tolerance=4",
    "--shard_chunks=12",
  ]
  code, _, errors = run(*flags, f"--out={tmp_path / 'whole'}")
  assert code == 0, errors
  draw, out = random.Random(0), tmp_path / "out"
  for _ in range(4):
    process = start(*flags, f"--out={out}")
    until = time.monotonic() + 60
    while not list(out.glob("shard-*")) and time.monotonic() < until:
      time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.5))
    process.send_signal(signal.SIGKILL)
    process.communicate()
  first = start(*flags, f"--out={out}")
  code, output, errors = run(*flags, f"--out={out}")
  _, first_errors = first.communicate()
  # Whichever came second either waited for its turn or was told off.
  codes = sorted([code, first.returncode])
  assert codes in ([0, 0], [0, 1]), errors + first_errors
  if 1 in codes:
    assert "is being built by another process" in errors + first_errors
  code, output, errors = run(*flags, f"--out={out}")
  assert code == 0, errors
  assert "0 chunks embedded" in output
  assert "nothing has changed" in output
  assert corpora.contents(StoredIndex(out)) == corpora.contents(
    StoredIndex(tmp_path / "whole")
  )
