"""A run in many processes, of which each kind is killed while it goes on."""

import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

from arl_jax.observability import metrics
from tests.launch.programs import train

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 12
# Of the recipe.
TASKS = 24
SECONDS = 900


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("many")


@pytest.fixture(scope="module")
def config(folder, rl_loop):
  path = folder / "loop.py"
  path.write_text(rl_loop)
  return path


def launch(config, run_dir, *flags):
  return train(
    config,
    run_dir,
    "--config.rl.substeps=1",
    *(f"--config.rl.steps={STEPS}", "--config.weights.dtype=float32"),
    *flags,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
  )


def many(config, run_dir, *flags):
  return launch(
    config,
    run_dir,
    *("--config.cluster.actors=1", "--config.cluster.servers=1"),
    *("--config.cluster.beat_seconds=0.5", "--config.cluster.lost_seconds=8"),
    *flags,
  )


def ended(process):
  out, _ = process.communicate(timeout=SECONDS)
  assert process.returncode == 0, out[-5000:]
  return out


def rl_lines(run_dir):
  path = run_dir / "metrics.jsonl"
  lines = metrics.read(path) if path.exists() else []
  return [line for line in lines if line["phase"] == "rl"]


def recorded(run_dir):
  """Groups by step, as JSON."""
  return {
    int(path.stem): [json.loads(x) for x in path.read_text().splitlines()]
    for path in sorted((run_dir / "groups").iterdir())
  }


def newest_commit(run_dir):
  commits = [p for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()]
  newest = max(commits, key=lambda p: int(p.name))
  return json.loads((newest / "commit.json").read_text())["arl_jax_commit"]


def commands():
  """Command lines of all processes, by pid, with their parents."""
  found = {}
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      words = (path / "cmdline").read_bytes().decode().split("\0")
      stat = (path / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
      continue
    if stat[0] != "Z":
      found[int(path.name)] = int(stat[1]), " ".join(words)
  return found


def descendants(pid):
  everything = commands()
  found, frontier = {}, {pid}
  while frontier:
    frontier = {
      p for p, (parent, _) in everything.items() if parent in frontier
    }
    found |= {p: everything[p][1] for p in frontier}
  return found


def victim(supervisor, name):
  """The pid of a role, None while there is none."""
  for pid, words in descendants(supervisor).items():
    if name == "environment_worker" and "environment_worker" in words:
      return pid
    if "launch.role" in words and f"--role={name} " in f"{words} ":
      return pid
  return None


def kill_once_there(process, name, run_dir, at_step):
  deadline = time.monotonic() + SECONDS
  while True:
    assert process.poll() is None, process.communicate()[0][-5000:]
    assert time.monotonic() < deadline, f"no step {at_step} to kill {name}"
    lines = rl_lines(run_dir)
    pid = victim(process.pid, name)
    if lines and lines[-1]["step"] >= at_step and pid is not None:
      os.kill(pid, signal.SIGKILL)
      return pid
    time.sleep(0.2)


def check_trained_once(run_dir):
  """No draw is trained twice, no task twice an epoch, and none is lost."""
  groups = recorded(run_dir)
  assert sorted(groups) == list(range(1, STEPS + 1))
  ids = [g["group_id"] for step in groups for g in groups[step]]
  numbers = [int(name.partition("/")[0]) for name in ids]
  assert len(set(numbers)) == len(numbers)
  tasks = [name.partition("/")[2] for name in ids]
  epochs = [n // TASKS for n in numbers]
  pairs = {*zip(epochs, tasks, strict=True)}
  assert len(pairs) == len(ids)
  state = newest_commit(run_dir)["record"]["ledger"]
  left = {number for number, *_ in state["open"]}
  assert left | {*numbers} == {*range(state["source"]["drawn"])}
  assert not left & {*numbers}


def test_every_kind_of_process_is_killed_once(folder, config):
  run_dir = folder / "killed"
  process = many(
    config,
    run_dir,
    *("--config.rl.max_staleness=1", "--config.cluster.environment_workers=1"),
  )
  seen = {}
  try:
    for step, name in enumerate(
      ("actor", "server", "environment_worker", "learner", "queue"), 2
    ):
      seen[name] = kill_once_there(process, name, run_dir, step)
    everybody = descendants(process.pid)
    out = ended(process)
  finally:
    process.kill()
  assert len(seen) == 5
  # Workers end by themselves when their actor is gone.
  limit = time.monotonic() + 20
  left = {*seen.values(), *everybody}
  while left & {*commands()} and time.monotonic() < limit:
    time.sleep(0.2)
  alive = commands()
  assert not left & {*alive}
  assert not [w for _, w in alive.values() if str(run_dir) in w]
  steps = [line["step"] for line in rl_lines(run_dir)]
  assert steps == list(range(1, STEPS + 1)), out[-3000:]
  check_trained_once(run_dir)
  # Seconds pass between lines, and none goes back.
  times = [line["time"] for line in rl_lines(run_dir)]
  assert times == sorted(times)
  assert (run_dir / "report.html").exists()


def test_strictly_on_policy_it_gives_the_numbers_of_one_process(folder, config):
  alone, together = folder / "alone", folder / "together"
  ended(launch(config, alone))
  ended(many(config, together))
  ours, theirs = recorded(alone), recorded(together)
  assert sorted(ours) == sorted(theirs)
  for step in ours:
    assert [g["group_id"] for g in ours[step]] == [
      g["group_id"] for g in theirs[step]
    ]
    for a, b in zip(ours[step], theirs[step], strict=True):
      for x, y in zip(a["episodes"], b["episodes"], strict=True):
        assert x["seed"] == y["seed"]
        assert x["reward"] == y["reward"]
        for s, t in zip(x["segments"], y["segments"], strict=True):
          assert s["ids"] == t["ids"]
          assert s["policy_version"] == t["policy_version"]
          assert s["behaviour_logp"] == pytest.approx(
            t["behaviour_logp"], abs=1e-5
          )
  assert any("loss" in line for line in rl_lines(alone))
  for a, b in zip(rl_lines(alone), rl_lines(together), strict=True):
    # A step whose groups have no signal updates nothing.
    assert a.get("loss") == pytest.approx(b.get("loss"), abs=1e-4)
    assert b["staleness_max"] == 0
  # What was recorded leads to the same bits again.
  replayed = folder / "replayed"
  mode = ("--mode=train_only", f"--config.replay={alone}")
  ended(launch(config, replayed, *mode))
  assert newest_commit(replayed)["leaves"] == newest_commit(alone)["leaves"]


def test_rollouts_alone_are_recorded_and_nothing_learned(folder, config):
  run_dir = folder / "rollouts"
  flags = ("--mode=rollout_only", "--config.rl.steps=3")
  ended(launch(config, run_dir, *flags))
  groups = recorded(run_dir)
  assert [len(groups[step]) for step in (1, 2, 3)] == [3, 3, 3]
  lines = rl_lines(run_dir)
  assert len(lines) == 3
  assert all("loss" not in line and "reward" in line for line in lines)
  tokens = [
    version
    for step in groups.values()
    for group in step
    for episode in group["episodes"]
    for segment in episode["segments"]
    for version in segment["policy_version"]
  ]
  # The version that the warm start ended in.
  assert {*tokens} == {-1, 1}
  assert (run_dir / "report.html").exists()


@pytest.mark.nightly
def test_an_interrupted_run_commits_and_goes_on(folder, config):
  run_dir = folder / "stopped"
  process = many(config, run_dir, "--config.rl.max_staleness=1")
  try:
    deadline = time.monotonic() + SECONDS
    while len(rl_lines(run_dir)) < 3:
      assert process.poll() is None, process.communicate()[0][-5000:]
      assert time.monotonic() < deadline
      time.sleep(0.2)
    process.terminate()
    out, _ = process.communicate(timeout=SECONDS)
  finally:
    process.kill()
  assert process.returncode == 130, out[-3000:]
  done = len(rl_lines(run_dir))
  commits = [int(p.name) for p in (run_dir / "checkpoints").iterdir()]
  # 60 steps of warm start come first; the last step done is committed.
  assert max(commits) == 60 + done
  ended(many(config, run_dir, "--config.rl.max_staleness=1", "--resume"))
  assert [x["step"] for x in rl_lines(run_dir)] == list(range(1, STEPS + 1))
  check_trained_once(run_dir)
