"""The program that makes tasks from a folder."""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from arl_jax.actors.config import ActorConfig
from arl_jax.actors.jobs import Job, run_jobs
from arl_jax.agents.harness import AgentConfig
from arl_jax.data.task_file import read_tasks
from arl_jax.envs.search.builder import build_index
from arl_jax.envs.search.chunking import Chunking
from arl_jax.envs.search.embedders import named_embedder
from arl_jax.problems.search import SearchProblem
from tests.data.synthesis import linked_corpus

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("texts")
  for document in linked_corpus.documents():
    (path / f"{document.doc_id}.txt").write_text(document.text)
  return path


def command(*flags):
  return [sys.executable, "-m", "launch.prepare_tasks", *flags]


def prepare(*flags):
  return subprocess.run(
    command(*flags), cwd=ROOT, capture_output=True, text=True, timeout=300
  )


def test_tasks_of_an_index_are_what_the_search_problem_takes(folder, tmp_path):
  for name, size in (("index", 60), ("other", 20)):
    chunks = Chunking(max_tokens=size, tolerance=0)
    build_index(folder, tmp_path / name, named_embedder("hashed:32"), chunks)
  index, out = tmp_path / "index", tmp_path / "tasks.jsonl"
  done = prepare(f"--index={index}", f"--out={out}", "--count=10", "--hops=1")
  assert done.returncode == 0, done.stderr
  config = ActorConfig()
  config.corpus.index, config.tasks.path = str(index), str(out)
  config.corpus.vocab_size, config.search.rerank = 500, True
  config.tasks.train = 5
  problem = SearchProblem(config)
  # As many as are wanted, and all that are held out.
  found = read_tasks(out)
  assert problem.train == found.train[:5]
  assert problem.heldout == found.heldout
  task = problem.train[0]
  job = Job(task=task, rollout_index=0, seed=1)
  (episode,) = asyncio.run(
    run_jobs(
      [job],
      problem,
      lambda job: problem.demonstrator(job.task, job.seed),
      AgentConfig(token_budget=4000, soft_threshold=3000, hard_threshold=3500),
      concurrency=1,
      training=True,
    )
  )
  assert episode.outcome["encountered"]
  # The other index has the same documents, and chunks of the same ids.
  config.corpus.index = str(tmp_path / "other")
  with pytest.raises(ValueError, match="was made from another corpus"):
    SearchProblem(config)
  refused = prepare(f"--index={index}", f"--corpus={folder}", f"--out={out}2")
  assert refused.returncode == 1
  assert "leave out --corpus and --chunk_tokens" in refused.stderr


def test_makes_a_file_and_a_report(folder, tmp_path):
  out = tmp_path / "tasks.jsonl"
  flags = (f"--corpus={folder}", f"--out={out}", "--chunk_tokens=60")
  done = prepare(*flags, "--count=10", "--hops=1,2")
  assert done.returncode == 0, done.stderr
  found = read_tasks(out)
  # A fifth is held out.
  assert (len(found.train), len(found.heldout)) == (8, 2)
  assert {t.provenance["source"] for t in found.train} == {"docs_1", "docs_2"}
  report = json.loads((tmp_path / "tasks.jsonl.report.json").read_text())
  assert report["tasks"] == 10
  assert report["by"]["hops"] == {"1": 5, "2": 5}
  assert report["attempts"] == 10 + sum(
    r["count"] for r in report["rejected"].values()
  )
  assert report["config"]["seed"] == 0
  assert "10 tasks from" in done.stdout
  assert "tasks/s" in done.stdout
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "tasks.jsonl", "tasks.jsonl.report.json"
  ]  # fmt: skip
  again = prepare(*flags)
  assert again.returncode == 1
  assert "exists; --overwrite replaces it" in again.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_a_killed_run_leaves_no_half_file_and_goes_on(folder, tmp_path):
  flags = (f"--corpus={folder}", "--count=60", "--chunk_tokens=60")
  whole, out = tmp_path / "whole.jsonl", tmp_path / "tasks.jsonl"
  done = prepare(*flags, f"--out={whole}")
  assert done.returncode == 0, done.stderr
  partial = tmp_path / "tasks.jsonl.partial"
  with subprocess.Popen(
    command(*flags, f"--out={out}"), cwd=ROOT, stdout=subprocess.PIPE
  ) as running:
    limit = time.monotonic() + 120
    while time.monotonic() < limit and (
      not partial.exists() or partial.read_bytes().count(b"\n") < 8
    ):
      time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
  assert partial.exists()
  assert not out.exists()
  # Another command's outcomes are not taken for this one's.
  other = prepare(*flags, f"--out={out}", "--seed=1")
  assert other.returncode == 1
  assert "is of a run with another config" in other.stderr
  done = prepare(*flags, f"--out={out}")
  assert done.returncode == 0, done.stderr
  assert "going on after" in done.stdout
  assert out.read_bytes() == whole.read_bytes()
  assert not partial.exists()


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (("--out=nowhere/tasks.jsonl",), "nowhere is no folder"),
    (("--hops=1,two",), "--hops is '1,two'"),
    (("--domain=wiki",), "domain is 'wiki', not one of"),
    (("--corpus=nowhere",), "isn't a folder"),
  ],
)
def test_what_cannot_be_is_one_line(tmp_path, flags, message):
  done = prepare(f"--out={tmp_path}/tasks.jsonl", *flags)
  assert done.returncode == 1
  assert message in done.stderr
  assert len(done.stderr.splitlines()) == 1
  assert list(tmp_path.iterdir()) == []
