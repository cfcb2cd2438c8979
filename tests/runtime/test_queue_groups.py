"""The learner's side of the queue, with a queue in this process."""

import time

import pytest

from arl_jax.actors.jobs import Interrupted
from arl_jax.queueing.group_queue import GroupQueue, NotBegun
from arl_jax.runtime.config import Config
from arl_jax.runtime.queue_groups import QueueGroups
from arl_jax.types import Episode, Group, Reward, StopReason, Task

TASKS = tuple(Task(task_id=f"t{i}", prompt="?", truth={}) for i in range(6))


class Problem:
  train = TASKS


class Heart:
  def __init__(self):
    self.beats = 0

  def progress(self):
    self.beats += 1


class Queue:
  """A `LearnerQueue` of a queue that may die."""

  def __init__(self):
    self.there = GroupQueue(lease_seconds=60)
    self.begun = []
    self.counters = []

  def begin(self, start):
    self.begun.append(start)
    self.there.begin(start)

  def take(self, step, version, timeout):
    batch = self.there.take(step, version)
    if batch is None:
      time.sleep(min(timeout, 0.01))
    return batch

  def waiting(self):
    return self.there.waiting()

  def status(self):
    return self.there.status()

  def roles(self):
    return self.counters

  def die(self):
    self.there = GroupQueue(lease_seconds=60)


def deliver(queue, count):
  """An actor's work; returns the tasks' names."""
  done = []
  for lease in queue.there.lease("actor", count):
    task = next(t for t in TASKS if t.task_id == lease.task_id)
    episodes = tuple(
      Episode(
        task_id=task.task_id,
        rollout_index=i,
        segments=(),
        events=(),
        stop_reason=StopReason.ANSWERED,
        outcome={},
        turns=1,
        reward=Reward(total=float(i)),
      )
      for i in range(2)
    )
    group = Group(group_id=lease.group_id, task=task, episodes=episodes)
    assert queue.there.deliver("actor", lease, group) == "ready"
    done.append(task.task_id)
  return done


@pytest.fixture
def config():
  found = Config()
  found.cluster.actors = 1
  found.rl.tasks_per_step, found.rl.group_size = 2, 2
  found.rl.max_staleness, found.rl.epochs = 1, 1
  found.cluster.patience = 0.3
  return found


def source_of(config, queue, should_stop=lambda: False):
  return QueueGroups(config, Problem(), queue, Heart(), should_stop)


def test_a_queue_that_died_begins_again_where_the_learner_is(config):
  queue = Queue()
  source = source_of(config, queue)
  source.begin("first", 0, None, ())
  deliver(queue, 4)
  batch = source.take(1, 0)
  trained = [g.task.task_id for g in batch.groups]
  assert len(source.waiting(batch.ledger)) == 2
  queue.die()
  assert source.waiting(batch.ledger) == ()
  with pytest.raises(NotBegun):
    queue.take(2, 1, 0)
  config.cluster.patience = 30
  # It begins while nothing is ready; then an actor comes.
  stops = iter([False, False])

  def come():
    if next(stops, None) is None and not trained[2:]:
      trained.extend(deliver(queue, 4))
    return False

  source._should_stop = come
  second = source.take(2, 1)
  assert [start.lineage for start in queue.begun] == ["first", "first"]
  assert queue.begun[1].ledger == batch.ledger
  assert queue.begun[1].version == 1
  deliver(queue, 4)
  third = source.take(3, 2)
  found = [g.task.task_id for b in (batch, second, third) for g in b.groups]
  assert sorted(found) == sorted(t.task_id for t in TASKS)
  deliver(queue, 4)
  last = source.take(4, 3)
  assert last.ended
  assert not last.groups


def test_what_it_waits_for_is_said(config):
  queue = Queue()
  source = source_of(config, queue)
  source.begin("one", 0, None, ())
  queue.there.lease("slow", 1)
  with pytest.raises(TimeoutError, match=r"2 groups of step 1.*'leased': 1"):
    source.take(1, 0)
  assert source._heartbeat.beats > 2


def test_it_waits_as_long_as_actors_get_on(config):
  """Episodes of real agents take longer than anybody's patience."""
  queue = Queue()
  began = time.monotonic()

  def should_stop():
    # A turn now and then, for more than three times as long as its patience.
    turns = int(10 * (time.monotonic() - began))
    actor = {"role": "actor", "index": 0, "pid": 1, "counters": {}}
    queue.counters = [{**actor, "counters": {"turns": float(turns)}}]
    if turns == 10:
      deliver(queue, 2)
    return False

  source = source_of(config, queue, should_stop)
  source.begin("one", 0, None, ())
  assert len(source.take(1, 0).groups) == 2
  assert time.monotonic() - began > 3 * config.cluster.patience


def test_a_stop_ends_the_wait(config):
  queue = Queue()
  source = source_of(config, queue, should_stop=lambda: True)
  source.begin("one", 0, None, ())
  with pytest.raises(Interrupted):
    source.take(1, 0)


def test_shares_and_rates_are_over_the_roles_own_time(config):
  def role(name, index, pid, **counters):
    return {"role": name, "index": index, "pid": pid, "age": 0.1,
            "idle_seconds": 0.0, "counters": counters}  # fmt: skip

  queue = Queue()
  source = source_of(config, queue)
  source.begin("one", 0, None, ())
  queue.counters = [
    role("server", 0, 7, seconds=10.0, idle_seconds=4.0, sampled_tokens=100.0),
    role("server", 1, 8, seconds=10.0, idle_seconds=0.0, sampled_tokens=50.0),
  ]
  first = source.metrics()
  # 150 tokens of two processes that lived for 10 s each.
  assert first["tokens_per_second_server"] == pytest.approx(15.0)
  assert first["idle_server"] == pytest.approx(0.2)
  assert first["queue_open"] == 0
  queue.counters = [
    role("server", 0, 7, seconds=14.0, idle_seconds=6.0, sampled_tokens=140.0),
    # A new process: its counters begin anew.
    role("server", 1, 9, seconds=1.0, idle_seconds=1.0, sampled_tokens=0.0),
    role("actor", 0, 5, seconds=2.0, tool_calls=4.0, tool_seconds=1.0),
  ]
  second = source.metrics()
  assert second["tokens_per_second_server"] == pytest.approx(40 / 5 * 2)
  assert second["idle_server"] == pytest.approx(3 / 5)
  assert second["tool_seconds"] == pytest.approx(0.25)
