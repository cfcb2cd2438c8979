"""Supervision of real processes, which die, hang and stay."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from arl_jax.actors.config import ActorConfig
from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.local_processes import (
  LocalProcesses,
  assign_addresses,
)
from arl_jax.cluster.signs import QueueSigns
from arl_jax.cluster.supervisor import processes_of

ROOT = pathlib.Path(__file__).parents[2]


class Run:
  """A supervisor of tiny processes, as its own process."""

  def __init__(self, folder, *flags, orphan_seconds=2.0, **cluster):
    self.folder = folder
    self.cluster = ClusterConfig(
      **{
        "actors": 1,
        "beat_seconds": 0.2,
        "lost_seconds": 4.0,
        "stall_seconds": 30.0,
        **cluster,
      }
    )
    assign_addresses(self.cluster)
    config = ActorConfig(cluster=self.cluster)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    self.err = folder / "err"
    with open(self.err, "ab") as err:
      self.process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.tiny_run", str(folder), *flags],
        cwd=ROOT,
        env={
          **os.environ,
          "TINY_RUN": str(folder),
          "TINY_ORPHAN_SECONDS": str(orphan_seconds),
        },
        stdout=err,
        stderr=err,
      )

  def lines(self, name):
    path = self.folder / name
    return path.read_text().splitlines() if path.exists() else []

  def pids(self, name):
    """Of each start of a process, oldest first."""
    lines = [line.split() for line in self.lines("starts")]
    return [int(line[1]) for line in lines if line[0] == name]

  def everyone(self):
    """All processes that there ever were, but for queues; and children."""
    lines = [line.split() for line in self.lines("starts")]
    return [int(x[2] if "child" in x[0] else x[1]) for x in lines]

  def wait(self, condition, what, seconds=40.0):
    limit = time.monotonic() + seconds
    while not condition():
      assert time.monotonic() < limit, (
        f"waited {seconds} s for {what}; {self.err.read_text()[-3000:]}"
      )
      time.sleep(0.05)

  def wait_up(self):
    """Until all are at work, have a child, and the queue has heard of them."""
    names = ["learner-0", "server-0"]
    names += [f"actor-{i}" for i in range(self.cluster.actors)]
    with QueueSigns(self.cluster) as signs:
      self.wait(
        lambda: (
          {*names} <= {f"{s.role}-{s.index}" for s in signs.look() or ()}
          and len(self.everyone()) == 2 * len(names)
        ),
        "all processes",
      )
    # So that the supervisor has, too.
    time.sleep(2 * self.cluster.beat_seconds)

  def tell(self, name, code):
    """Has a process end with a code."""
    temporary = self.folder / ".exit"
    temporary.write_text(str(code))
    temporary.rename(self.folder / f"{name}.exit")

  def end(self):
    """Exit code of the supervisor."""
    return self.process.wait(timeout=40)

  def said(self):
    return self.err.read_text()


def alive(pid):
  try:
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
  except FileNotFoundError:
    return False
  return state.split()[0] != "Z"


@pytest.fixture
def launch(tmp_path):
  runs = []

  def start(*flags, **settings):
    runs.append(Run(tmp_path, *flags, **settings))
    return runs[-1]

  yield start
  for run in runs:
    with contextlib.suppress(ProcessLookupError):
      run.process.kill()
    run.process.wait()
    left = [pid for pid in run.everyone() if alive(pid)]
    for pid in left:
      os.kill(pid, signal.SIGKILL)


def queue_pid(run):
  """Of who listens at the queue's address, from the supervisor's children."""
  children = pathlib.Path(
    f"/proc/{run.process.pid}/task/{run.process.pid}/children"
  )
  for pid in children.read_text().split():
    command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    if b"--role=queue" in command:
      return int(pid)
  return None


@pytest.mark.slow
def test_what_dies_or_hangs_is_started_again_until_the_learner_is_done(launch):
  run = launch("--overwrite", actors=2)
  run.wait_up()
  first_queue = queue_pid(run)
  (hung,), (crashed,) = run.pids("actor-0"), run.pids("actor-1")
  os.kill(hung, signal.SIGSTOP)
  run.tell("actor-1", 7)
  os.kill(run.pids("learner-0")[0], signal.SIGKILL)
  for name in ("actor-0", "actor-1", "learner-0"):
    run.wait(lambda name=name: len(run.pids(name)) == 2, f"{name} again")
  os.kill(first_queue, signal.SIGKILL)
  run.wait(lambda: queue_pid(run) not in (None, first_queue), "the queue again")
  # Nobody else was started anew because of that.
  time.sleep(1.0)
  run.tell("learner-0", 0)
  assert run.end() == 0
  said = run.said()
  assert "actor-0 gave no sign of life for" in said
  assert "actor-1 ended with exit code 7" in said
  assert "  | actor-1 was told to end[2J\n" in said  # Without the escape.
  assert "learner-0 ended with signal 9" in said
  assert "queue-0 ended with signal 9" in said
  learners = [x.split() for x in run.lines("starts") if x[:10] == "learner-0 "]
  assert [words[2:] for words in learners] == [["overwrite"], ["resume"]]
  assert len(run.pids("server-0")) == 1
  assert not [p for p in {*run.everyone(), hung, crashed} if alive(p)]
  log = (run.folder / "logs" / "actor-1.log").read_text()
  assert log.count("-- started") == 2


@pytest.mark.slow
def test_a_process_that_does_not_get_on_is_started_again(launch):
  run = launch(stall_seconds=10.0)
  run.wait_up()
  (run.folder / "actor-0.stuck").touch()
  run.wait(lambda: "did not get on with its work" in run.said(), "the kill")
  (run.folder / "actor-0.stuck").unlink()
  run.wait(lambda: len(run.pids("actor-0")) == 2, "the actor again")
  run.tell("learner-0", 0)
  assert run.end() == 0
  assert not [p for p in run.everyone() if alive(p)]


@pytest.mark.slow
def test_a_process_that_always_crashes_ends_the_run_in_order(launch):
  run = launch(restarts=1)
  run.wait_up()
  run.tell("actor-0", 9)
  run.wait(lambda: len(run.pids("actor-0")) == 2, "the actor again")
  run.tell("actor-0", 9)
  assert run.end() == 1
  assert "start 2, and cluster.restarts is 1" in run.said()
  assert run.lines("stopped") == ["learner-0", "server-0"]
  assert not [p for p in run.everyone() if alive(p)]


def test_sigterm_stops_the_learner_first_and_leaves_nobody(launch):
  run = launch()
  run.wait_up()
  run.process.terminate()
  assert run.end() == 130
  assert run.lines("stopped")[0] == "learner-0"
  assert {*run.lines("stopped")} == {
    *("learner-0", "actor-0", "server-0"),
  }
  assert not [p for p in run.everyone() if alive(p)]
  assert queue_dead(run)


def queue_dead(run):
  """Whether nobody listens at the queue's address."""
  port = int(run.cluster.queue.rpartition(":")[2])
  with socket.socket() as client:
    return client.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(launch):
  run = launch()
  run.wait_up()
  (run.folder / "learner-0.deaf").touch()
  run.process.send_signal(signal.SIGINT)
  run.wait(lambda: "stopping all" in run.said(), "the first signal")
  run.process.send_signal(signal.SIGINT)
  began = time.monotonic()
  assert run.end() == 130
  assert time.monotonic() - began < 5.0
  assert run.lines("stopped") == []
  assert not [p for p in run.everyone() if alive(p)]


def test_a_killed_supervisor_leaves_nobody(launch):
  run = launch(orphan_seconds=2.0, actors=2)
  run.wait_up()
  (run.folder / "actor-0.deaf").touch()
  queue = queue_pid(run)
  run.process.kill()
  run.process.wait()
  run.wait(lambda: not [p for p in [*run.everyone(), queue] if alive(p)], "all")
  # Those who heard of it stopped in order; the deaf one was ended, and its
  # child with it.
  assert {*run.lines("stopped")} == {"learner-0", "actor-1", "server-0"}
  assert "the supervisor is gone" in run.said()


# What is on one machine.


def test_addresses_are_free_and_of_their_own():
  cluster = ClusterConfig(actors=1, servers=3)
  assign_addresses(cluster)
  cluster.validate()
  urls = [cluster.queue, *cluster.replica_urls]
  assert len({*urls}) == 4
  ports = [int(url.removeprefix("http://127.0.0.1:")) for url in urls]
  # Not among those that the system gives to connections.
  assert all(10000 <= port < 32768 for port in ports)
  given = dataclasses.replace(cluster)
  assign_addresses(given)
  assert given == cluster


def test_replicas_of_several_hosts_get_a_coordinator_each():
  cluster = ClusterConfig(actors=1, servers=3, server_hosts=2)
  assign_addresses(cluster)
  cluster.validate()
  coordinators = cluster.replica_coordinators
  urls = (cluster.queue, *cluster.replica_urls)
  ports = [u.rpartition(":")[2] for u in (*urls, *coordinators)]
  assert len({*ports}) == 7
  assert all(c.startswith("127.0.0.1:") for c in coordinators)
  given = dataclasses.replace(cluster)
  assign_addresses(given)
  assert given == cluster
  assert processes_of(cluster)[2:8] == [("server", i) for i in range(6)]


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"server_hosts": 0}, r"cluster\.server_hosts is 0, not >= 1"),
    ({"server_hosts": 2}, r"server_hosts is 2, but without cluster\.actors"),
    (
      {"actors": 1, "servers": 2, "server_coordinators": "a:1"},
      r"server_coordinators has 1 addresses for cluster\.servers 2",
    ),
    ({"actors": 1, "server_coordinators": "http://a:1"}, "not like 10.0.0.8"),
    (
      {"actors": 1, "servers": 2, "server_coordinators": "a:1,a:1"},
      r"server_coordinators has 'a:1', which is that of cluster\.server_coor",
    ),
    (
      {"actors": 1, "server_coordinators": "a:1", "replicas": "http://a:1"},
      r"which is that of cluster\.replicas, too",
    ),
    (
      {"actors": 1, "coordinator": "a:1", "server_coordinators": "a:1"},
      r"which is that of cluster\.coordinator, too",
    ),
  ],
)
def test_replicas_that_cannot_be_are_refused(changes, says):
  with pytest.raises(ValueError, match=says):
    ClusterConfig(**changes).validate()


def test_addresses_that_do_not_fit_the_servers_are_refused():
  cluster = ClusterConfig(actors=1, servers=2, replicas="http://a:1")
  with pytest.raises(ValueError, match=r"has 1 addresses .*servers 2"):
    assign_addresses(cluster)


def test_what_a_process_printed_last_is_short_and_of_its_own_start(tmp_path):
  script = tmp_path / "noisy.py"
  script.write_text("for i in range(5000): print('line', i)\n")
  log = tmp_path / "logs" / "actor-0.log"
  log.parent.mkdir()
  log.write_text("of before\n")
  processes = LocalProcesses(
    tmp_path / "none", log.parent, program=(str(script),)
  )
  handle = processes.start("actor", 0, resume=False)
  limit = time.monotonic() + 20
  while handle.poll() is None:
    assert time.monotonic() < limit
    time.sleep(0.02)
  lines = handle.last_lines().splitlines()
  assert lines == [*(f"line {i}" for i in range(4990, 5000)), f"(from {log})"]
  script.write_text("")
  handle = processes.start("actor", 0, resume=False)
  while handle.poll() is None:
    assert time.monotonic() < limit
    time.sleep(0.02)
  assert handle.last_lines() == ""
