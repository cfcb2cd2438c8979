"""A learner of two processes, for real: what it learns, and its death."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal

import jax
import numpy as np
import pytest

from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.local_processes import LocalProcesses, assign_addresses
from arl_jax.cluster.supervisor import Supervisor
from arl_jax.model import transformer
from arl_jax.observability import metrics
from arl_jax.problems.problem import make_problem
from arl_jax.queueing.group_queue import Batch
from arl_jax.records import to_json
from arl_jax.runtime import learner_hosts
from arl_jax.runtime.config import Config
from arl_jax.runtime.learner_hosts import LearnerHosts
from arl_jax.sharding import make_mesh, shapes
from arl_jax.weights import Subscriber
from tests.queueing import leased_groups

STEPS = 5
PROBLEM = "tests.actors.echo_problem:Problem"
# Compiled faster, in the same order of operations.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


class Blind:
  """Nobody is asked for signs of life, so that exits alone count."""

  def look(self):
    return None


class Launch:
  """A run and its supervisor.

  Attributes:
    started: pids by name of process, one a start.
    said: what the supervisor said.
  """

  def __init__(self, folder, name, learners):
    config = self.config = Config(problem=PROBLEM, checkpoint_every=1)
    config.run_dir = str(folder / name)
    config.warm_start.steps = config.warm_start.opening_steps = 0
    config.rl.steps, config.rl.group_size = STEPS, 2
    config.rl.tasks_per_step = 3
    model = config.model
    model.layers, model.width, model.head_dim = 1, 16, 8
    model.experts, model.dense_width = 0, 16
    config.learner.row_length = 320
    config.learner.microbatch_tokens = 640
    config.learner.microbatches = 1
    config.learner.mesh.fsdp = 2
    config.weights.dtype = "float32"
    config.mode = "train"
    config.cluster = ClusterConfig(
      actors=1, learners=learners, lost_seconds=30.0, patience=120.0
    )
    config.resolve()
    assign_addresses(config.cluster)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    self.processes = LocalProcesses(
      path, folder / f"{name}.logs", program=("-m", "tests.runtime.learner_job")
    )
    self.started, self.said = {}, []

  def start(self, role, index, *, resume):
    handle = self.processes.start(role, index, resume=resume)
    self.started.setdefault(f"{role}-{index}", []).append(handle.pid)
    return handle

  def run(self, look=lambda launch: False):
    """Its exit code. `look` is called often, and may ask it to stop."""
    supervisor = Supervisor(
      self,
      self.config.cluster,
      Blind(),
      opened=(self.run_dir / "config.json").exists,
      should_stop=lambda: look(self),
      say=self.said.append,
    )
    return supervisor.run()

  @property
  def run_dir(self):
    return pathlib.Path(self.config.run_dir)

  def lines(self):
    with contextlib.suppress(FileNotFoundError):
      return metrics.read(self.run_dir / "metrics.jsonl")
    return []

  def params(self):
    """Version and leaves that servers would take now."""
    vocab = make_problem(self.config).renderer.tokenizer.vocab_size
    model = dataclasses.replace(self.config.model, vocab_size=vocab)
    like = shapes(transformer.specs(model))
    subscriber = Subscriber(self.config.weights.folder, like)
    fetched = subscriber.fetch()
    subscriber.close()
    return fetched.version.number, jax.tree.leaves(fetched.params)


@pytest.fixture
def folder(tmp_path_factory, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setenv("XLA_FLAGS", FLAGS)
  return tmp_path_factory.mktemp("run")


@pytest.mark.slow
@pytest.mark.nightly
def test_killed_amid_a_run_it_learns_what_one_process_learns(
  folder, monkeypatch
):
  killed = []

  def kill_second(launch):
    if not killed and len(launch.lines()) >= 2:
      killed.append(launch.started["learner-1"][0])
      os.kill(killed[0], signal.SIGKILL)
    return False

  two = Launch(folder, "two", 2)
  assert two.run(kill_second) == 0, two.said
  assert killed
  # Both went together, and the first did not wait to be found lost. Which end
  # is seen first is the machine's business: without the other, either fails.
  assert len(two.started["learner-0"]) == 2, two.said
  assert len(two.started["learner-1"]) == 2, two.said
  assert "learner-1 ended with signal 9" in two.said[0] or (
    "learner-0 ended with" in two.said[0]
  ), two.said

  # The mesh takes two of them; with no more, they may wait for each other for
  # good, in a pool of as many threads.
  monkeypatch.setenv(
    "XLA_FLAGS", f"{FLAGS} --xla_force_host_platform_device_count=8"
  )
  one = Launch(folder, "one", 1)
  assert one.run() == 0, one.said
  assert [x["step"] for x in two.lines()] == list(range(1, STEPS + 1))
  for a, b in zip(one.lines(), two.lines(), strict=True):
    assert a["trained_tokens"] == b["trained_tokens"] > 0
    for name in ("loss", "grad_norm", "reward", "entropy"):
      assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-6)
  (ours, params), (theirs, others) = one.params(), two.params()
  assert ours == theirs == STEPS
  for x, y in zip(params, others, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
  # The report is the first process's.
  assert (two.run_dir / "report.html").exists()


def test_a_mesh_without_devices_of_some_process_is_refused():
  hosts = LearnerHosts(
    ClusterConfig(actors=1, learners=2, coordinator="127.0.0.1:1"), 1
  )
  # All devices here are process 0's.
  with pytest.raises(ValueError, match=r"has no device of learner 1"):
    hosts.check(make_mesh(fsdp=jax.device_count()))
  LearnerHosts().check(make_mesh(fsdp=jax.device_count()))


@pytest.mark.slow
@pytest.mark.nightly
def test_asked_to_stop_all_its_processes_commit(folder):
  launch = Launch(folder, "stopped", 2)
  assert launch.run(lambda launch: len(launch.lines()) >= 1) == 130
  assert not launch.said
  done = len(launch.lines())
  commits = [int(p.name) for p in (launch.run_dir / "checkpoints").iterdir()]
  assert max(commits) == done


def test_what_is_sent_comes_back():
  lease = leased_groups.a_lease(number=4, version=2)
  batch = Batch(
    groups=(leased_groups.group(lease),),
    ledger={"source": {"drawn": 5}, "open": [[4, "t1"]]},
    ended=True,
    drops={"stale": 2},
    waiting=3,
  )
  form = learner_hosts.BATCH
  found = form.read(form.write(batch))
  assert to_json(found.groups[0]) == to_json(batch.groups[0])
  assert dataclasses.replace(found, groups=()) == dataclasses.replace(
    batch, groups=()
  )
  episodes = list(batch.groups[0].episodes)
  form = learner_hosts.EPISODES
  assert [to_json(e) for e in form.read(form.write(episodes))] == [
    to_json(e) for e in episodes
  ]
  with pytest.raises(ValueError, match="a Group, not an Episode"):
    form.read(learner_hosts.messages.pack_group(batch.groups[0]))


def test_one_process_does_its_work_itself():
  with LearnerHosts() as hosts:
    assert hosts.first
    values = [object()]
    assert hosts.told(lambda: values[0]) is values[0]
    assert hosts.gathered(values) is values
    with pytest.raises(ZeroDivisionError):
      hosts.told(lambda: 1 / 0)


@pytest.mark.parametrize(
  ("changes", "index", "says"),
  [
    ({"learners": 2}, 0, "cluster.coordinator is empty"),
    ({"learners": 2, "coordinator": "a:1"}, 2, "--index is 2, but"),
    ({}, 1, "--index is 1, but cluster.learners is 1"),
  ],
)
def test_a_process_that_cannot_be_is_refused(changes, index, says):
  with pytest.raises(ValueError, match=says):
    LearnerHosts(ClusterConfig(**changes), index)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"learners": 0}, "cluster.learners is 0, not >= 1"),
    ({"learners": 2}, "cluster.learners is 2, but without cluster.actors"),
    ({"coordinator": "http://a:1"}, "not like 10.0.0.8:7001"),
    ({"coordinator": "a"}, "not like 10.0.0.8:7001"),
    ({"coordinator": "a:99999"}, "not like 10.0.0.8:7001"),
  ],
)
def test_a_cluster_that_cannot_be_is_refused(changes, says):
  with pytest.raises(ValueError, match=says):
    ClusterConfig(**changes).validate()
