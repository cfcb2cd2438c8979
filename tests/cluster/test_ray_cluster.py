"""Runs of small processes on a Ray cluster of two nodes, killed for real."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.actors.processes import gone, wait_until

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
  pytest.mark.slow,
  # Ray's own.
  pytest.mark.filterwarnings("ignore::ResourceWarning"),
  pytest.mark.filterwarnings("ignore::DeprecationWarning"),
  pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STEPS, PER_STEP = 8, 2
# Keeps processes on the head's node.
AT_HOME = dict.fromkeys(("queue", "learner", "server", "actor"), "home=1")


@pytest.fixture(scope="module")
def cluster():
  made = cluster_utils.Cluster(
    initialize_head=True,
    head_node_args={
      "num_cpus": 8,
      "resources": {"home": 8},
      "include_dashboard": False,
    },
  )
  yield made
  made.shutdown()


class Run:
  """A supervisor's process, and what its run leaves in a folder."""

  def __init__(self, folder, address, **cluster):
    self.folder = folder
    settings = {
      "address": address,
      "actors": 1,
      "servers": 1,
      "beat_seconds": 0.2,
      "lost_seconds": 20.0,
      "patience": 240.0,
      **cluster,
    }
    # No pipe, which could fill up.
    with open(folder / "log", "wb") as log:
      self.process = subprocess.Popen(
        [
          *(sys.executable, "-m", "tests.cluster.ray_run"),
          *(str(folder), json.dumps(settings)),
        ],
        cwd=ROOT,
        stdout=log,
        stderr=log,
      )

  def hold(self, step):
    (self.folder / f"hold-{step}").touch()

  def release(self, step):
    (self.folder / f"hold-{step}").unlink()

  def starts(self, name):
    """Lists of words after a name, pid first."""
    path = self.folder / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [x.split()[1:] for x in lines if x.split()[0] == name]

  def steps(self):
    path = self.folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["groups"] for line in lines]

  def finish(self):
    code = self.process.wait(timeout=300)
    return code, (self.folder / "log").read_text()

  def close(self):
    if self.process.poll() is None:
      self.process.terminate()
      try:
        self.process.wait(timeout=60)
      except subprocess.TimeoutExpired:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def run(cluster, tmp_path):
  """Starts a run whose learner holds at a step."""
  made = []

  def start(hold=None, **settings):
    if hold is not None:
      (tmp_path / f"hold-{hold}").touch()
    made.append(Run(tmp_path, cluster.address, **settings))
    return made[-1]

  yield start
  for one in made:
    one.close()


def check_steps(run):
  """Each draw was trained once, and held what its actor had put in."""
  steps = run.steps()
  assert len(steps) == STEPS
  groups = [group for step in steps for group in step]
  assert len(groups) == STEPS * PER_STEP
  numbers = [int(name.partition("/")[0]) for name, _, _ in groups]
  assert sorted(numbers) == list(range(STEPS * PER_STEP))
  assert [n for _, n, _ in groups] == [2] * len(groups)
  # A million ids, each the number of the draw.
  assert [total for _, _, total in groups] == [n * 10**6 for n in numbers]


def test_a_run_outlives_actor_queue_and_learner(run):
  one = run(hold=0)
  wait_until(lambda: len(one.starts("delivered-3")) == 1, 240)
  ((actor, loaded),) = one.starts("actor-0")
  assert loaded == "jax=False"
  one.hold(3)
  os.kill(int(actor), signal.SIGKILL)
  wait_until(lambda: len(one.starts("actor-0")) == 2, 240)
  one.release(0)
  wait_until(lambda: len(one.steps()) == 3, 240)
  # The dead actor's groups were still there: none was rolled out again.
  assert [len(one.starts(f"delivered-{i}")) for i in range(4)] == [1] * 4
  ((_, queue),) = one.starts("queue-0")
  one.hold(5)
  os.kill(int(queue), signal.SIGKILL)
  one.release(3)
  wait_until(lambda: len(one.steps()) == 5, 240)
  os.kill(int(one.starts("learner-0")[0][0]), signal.SIGKILL)
  one.release(5)
  code, errors = one.finish()
  assert code == 0, errors
  for role in ("actor-0", "queue-0", "learner-0"):
    assert f"{role} ended with signal 9" in errors
  assert [words[1:] for words in one.starts("learner-0")] == [[], ["resume"]]
  check_steps(one)
  kind, state = (one.folder / "learned").read_text().split()
  assert (kind, state) == ("RayLearnerQueue", "running")


def test_processes_end_with_their_supervisor(run):
  one = run(hold=0)
  wait_until(lambda: one.starts("delivered-0"), 240)
  pids = [
    int(one.starts(role)[0][0]) for role in ("actor-0", "learner-0", "server-0")
  ]
  pids.append(int(one.starts("queue-0")[0][1]))
  one.process.kill()
  wait_until(lambda: all(map(gone, pids)), 240)


def test_a_stopped_run_says_so(run):
  one = run(hold=0)
  wait_until(lambda: one.starts("delivered-0"), 240)
  pid = int(one.starts("learner-0")[0][0])
  one.process.send_signal(signal.SIGTERM)
  code, errors = one.finish()
  assert code == 130, errors
  wait_until(lambda: gone(pid), 240)


@pytest.fixture
def lose(cluster):
  """A node that is lost once a run is at a step, and another one then."""
  nodes = [cluster.add_node(num_cpus=0, resources={"spare": 1})]

  def replace(run, step):
    wait_until(lambda: len(run.steps()) == step, 240)
    nodes.append(cluster.add_node(num_cpus=0, resources={"spare": 1}))
    cluster.remove_node(nodes.pop(0))

  yield replace
  cluster.remove_node(nodes[0])


def test_a_server_moves_from_a_lost_node(run, lose):
  one = run(hold=2, **{**AT_HOME, "server": "spare=1"})
  lose(one, 2)
  wait_until(lambda: len(one.starts("server-0")) == 2, 240)
  # Actors are told by being started again; nobody else asks servers.
  wait_until(lambda: len(one.starts("actor-0")) == 2, 240)
  one.release(2)
  code, errors = one.finish()
  assert code == 0, errors
  assert one.starts("server-0")[0][1] != one.starts("server-0")[1][1]
  assert "server-0 moved to http://" in errors
  assert len(one.starts("learner-0")) == 1
  check_steps(one)


def test_a_queue_moves_from_a_lost_node(run, lose):
  one = run(hold=2, **{**AT_HOME, "queue": "spare=1"})
  lose(one, 2)
  # Everybody is told.
  for role in ("learner-0", "server-0", "actor-0"):
    wait_until(lambda role=role: len(one.starts(role)) == 2, 240)
  one.release(2)
  code, errors = one.finish()
  assert code == 0, errors
  assert "queue-0 moved to http://" in errors
  check_steps(one)


def test_what_no_node_has_is_said(run):
  one = run(server="GPU=1", patience=15.0)
  code, errors = one.finish()
  assert code != 0
  assert "Ray has no node for server-0" in errors
  assert "cluster.ray.server asks 'GPU=1'" in errors
