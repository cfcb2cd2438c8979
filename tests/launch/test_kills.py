"""Killed at random moments, a run ends in the bits it would have ended in.

How often each kind of run is killed: ARL_KILLS, once by default.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import time

import pytest

from arl_jax.learner.throughput import OF_THE_MACHINE
from arl_jax.observability import metrics
from tests.launch.programs import train

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
KILLS = int(os.environ.get("ARL_KILLS", "1"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("kills")


def launch(config, run_dir, *flags):
  return train(
    config,
    run_dir,
    *flags,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
  )


def succeed(process):
  _, err = process.communicate(timeout=900)
  assert process.returncode == 0, err[-3000:]


@pytest.fixture(scope="module")
def loop(folder, rl_loop):
  config = folder / "loop.py"
  config.write_text(rl_loop)
  run_dir = folder / "loop"
  succeed(launch(config, run_dir))
  return config, run_dir


@pytest.fixture(scope="module")
def sft(folder, tokenizer, chats, offline):
  config = folder / "sft.py"
  sources = ", ".join(
    f"SourceConfig(path={str(path)!r}, weight={weight})"
    for path, weight in zip(chats, (3.0, 1.0), strict=True)
  )
  config.write_text(
    offline.format(tokenizer=str(tokenizer), sources=sources, loss="sft")
  )
  run_dir = folder / "sft"
  succeed(launch(config, run_dir))
  return config, run_dir


@pytest.fixture(scope="module")
def replay(folder, loop, offline):
  """On the groups that the loop recorded."""
  config = folder / "replay.py"
  source = f"SourceConfig(kind='groups', path={str(loop[1] / 'groups')!r}),"
  config.write_text(
    offline.format(tokenizer="", sources=source, loss="cispo(ratio_max=4.0)")
  )
  run_dir = folder / "replay"
  succeed(launch(config, run_dir))
  return config, run_dir


def computed(run_dir):
  """Metrics by phase and step, but for those of the machine."""
  lines = metrics.read(run_dir / "metrics.jsonl")
  kept = [(line["phase"], line["step"]) for line in lines]
  assert len(kept) == len(set(kept))
  return {
    at: {k: v for k, v in line.items() if k not in ("time", *OF_THE_MACHINE)}
    for at, line in zip(kept, lines, strict=True)
  }


def commits(run_dir):
  """Commits by number, oldest first."""
  found = (run_dir / "checkpoints").iterdir()
  return {
    int(p.name): json.loads((p / "commit.json").read_text())["arl_jax_commit"]
    for p in sorted(found, key=lambda p: p.name.zfill(9))
    if p.name.isdigit()
  }


def lines_of(run_dir):
  path = run_dir / "metrics.jsonl"
  return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at_some_moment(process, run_dir, moment, draw):
  """Once there are so many lines of metrics, a moment later."""
  deadline = time.monotonic() + 300
  while lines_of(run_dir) < moment and process.poll() is None:
    assert time.monotonic() < deadline
    time.sleep(0.01)
  time.sleep(draw.random() * 0.3)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
  "kind",
  [
    pytest.param("sft", marks=pytest.mark.nightly),
    pytest.param("replay", marks=pytest.mark.nightly),
    "loop",
  ],
)
def test_killed_at_random_moments_it_ends_in_the_same_bits(
  kind, folder, request
):
  config, whole = request.getfixturevalue(kind)
  run_dir = folder / f"{kind}_killed"
  wanted = computed(whole)
  # Some step of each phase has learned something.
  assert {phase for (phase, _), x in wanted.items() if x.get("grad_norm")} == {
    phase for phase, _ in wanted
  }
  draw = random.Random(f"{kind} {KILLS}")
  # Moments may come before those that are reached already: then it is killed
  # while it starts.
  moments = sorted(draw.randrange(1, len(wanted)) for _ in range(KILLS))
  killed = 0
  for moment in moments:
    resume = ("--resume",) if (run_dir / "config.json").exists() else ()
    process = launch(config, run_dir, *resume)
    killed += kill_at_some_moment(process, run_dir, moment, draw)
  assert killed
  succeed(launch(config, run_dir, "--resume"))
  found = computed(run_dir)
  differing = {
    (at, name): (wanted[at].get(name), found.get(at, {}).get(name))
    for at in wanted
    for name in wanted[at]
    if wanted[at][name] != found.get(at, {}).get(name)
  }
  assert not differing, dict(list(differing.items())[:5])
  assert found.keys() == wanted.keys()
  (a, b) = commits(whole), commits(run_dir)
  number = max(a)
  assert max(b) == number
  assert a[number]["leaves"] == b[number]["leaves"]
  # Each restore opened a lineage of its own.
  assert len(a[number]["lineage"]) == 1
  assert len(b[number]["lineage"]) > 1
