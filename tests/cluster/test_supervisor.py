"""Supervision: its judgement, on a made-up clock."""

import itertools
import pathlib

import pytest

from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.supervisor import Sign, Supervisor, processes_of

ROOT = pathlib.Path(__file__).parents[2]


class Handle:
  def __init__(self, world, name, plan):
    self.world, self.name, self.began = world, name, world.now
    self.code, self.ends_at, self.planned = None, None, None
    if plan is not None:
      lifetime, self.planned = plan
      self.ends_at = world.now + lifetime

  def poll(self):
    planned = self.ends_at is not None and self.world.now >= self.ends_at
    if self.code is None and planned:
      self.code = self.planned
    return self.code

  def terminate(self):
    self.world.events.append(("terminate", self.name, self.world.now))
    if self.name not in self.world.deaf and self.code is None:
      self.code = 130 if self.name == "learner-0" else 0

  def kill(self):
    if self.code is None:
      self.world.events.append(("kill", self.name, self.world.now))
      self.code = -9

  def last_lines(self):
    return f"last of {self.name}"


class World:
  """Processes live as planned; time passes when somebody sleeps."""

  def __init__(self, **plans):
    # Of each start: (seconds it lives, exit code), or None to live on.
    self.plans = {name.replace("_", "-"): list(p) for name, p in plans.items()}
    self.now, self.events, self.said = 0.0, [], []
    self.starts, self.deaf = [], set()
    self.look = list
    self.stop_at = float("inf")

  def start(self, role, index, *, resume):
    name = f"{role}-{index}"
    self.starts.append((name, self.now, resume))
    plans = self.plans.get(name, [])
    return Handle(self, name, plans.pop(0) if plans else None)

  def sleep(self, seconds):
    self.now += seconds
    assert self.now < 1e5, "it never ends"

  def run(self, opened=lambda: True, **cluster):
    supervisor = Supervisor(
      self,
      ClusterConfig(**{"actors": 1, **cluster}),
      self,
      opened=opened,
      should_stop=lambda: self.now >= self.stop_at,
      say=self.said.append,
      clock=lambda: self.now,
      sleep=self.sleep,
    )
    return supervisor.run()

  def times(self, name):
    return [at for n, at, _ in self.starts if n == name]


def test_processes_of_a_run():
  cluster = ClusterConfig(actors=2, servers=3, evaluators=1)
  assert processes_of(cluster) == [
    ("queue", 0),
    ("learner", 0),
    *(("server", i) for i in range(3)),
    *(("actor", i) for i in range(2)),
    ("evaluator", 0),
  ]


def test_ends_with_the_learner_and_stops_actors_before_the_queue():
  world = World(learner_0=[(10.0, 0)])
  assert world.run(evaluators=1) == 0
  stopped = [name for what, name, _ in world.events if what == "terminate"]
  assert stopped == ["actor-0", "evaluator-0", "server-0", "queue-0"]
  assert world.said == []
  assert [name for name, _, _ in world.starts] == [
    *("queue-0", "learner-0", "server-0", "actor-0", "evaluator-0"),
  ]


def test_waits_twice_as_long_after_each_quick_end():
  world = World(actor_0=[(0.0, -11)] * 7 + [(100.0, 3)], learner_0=[(400, 0)])
  assert world.run() == 0
  times = world.times("actor-0")
  waits = [b - a for a, b in itertools.pairwise(times)]
  # Each end is seen one poll of 0.2 s after the start, as is that it is due.
  # The last start lived for 100 s, so that the one after waits the least.
  for wait, least in zip(waits, (1, 2, 4, 8, 16, 30, 30, 101), strict=True):
    assert least <= wait < least + 0.7
  assert (
    "actor-0 ended with signal 11 after 0 s; start 2 in 1 s" in (world.said[0])
  )
  assert world.said[0].endswith("  | last of actor-0")
  assert "ended with exit code 3 after 100 s; start 9 in 1 s" in world.said[-1]


def test_other_roles_are_started_again_even_after_a_clean_end():
  world = World(server_0=[(5.0, 0)], learner_0=[(30, 0)])
  assert world.run() == 0
  assert len(world.times("server-0")) == 2


def test_gives_up_after_so_many_restarts():
  world = World(actor_0=[(0.0, -9)] * 9)
  assert world.run(restarts=3) == 1
  assert len(world.times("actor-0")) == 4
  assert "start 4, and cluster.restarts is 3" in world.said[-1]
  # The learner, which could still commit, was asked to.
  stopped = [name for what, name, _ in world.events if what == "terminate"]
  assert stopped == ["learner-0", "server-0", "queue-0"]


@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize("name", ["learner_0", "actor_0", "queue_0"])
def test_known_errors_of_a_first_start_end_the_run(name, code):
  world = World(**{name: [(7.0, code)]})
  if name != "queue_0":
    world.look = list
  else:
    world.look = lambda: None
  assert world.run() == code
  assert len(world.times(name.replace("_", "-"))) == 1
  assert f"ended with exit code {code}" in world.said[-1]
  assert f"last of {name.replace('_', '-')}" in world.said[-1]


def test_known_errors_of_one_that_worked_before_are_no_reason_to_give_up():
  world = World(actor_0=[(7.0, 1)], learner_0=[(1000.0, 1), (10.0, 0)])
  world.look = lambda: [sign("actor", 1.0)]
  assert world.run(stall_seconds=900.0) == 0
  assert len(world.times("actor-0")) == 2
  assert [r for n, _, r in world.starts if n == "learner-0"] == [False, True]


def test_a_wrong_configuration_found_late_ends_the_run():
  world = World(server_0=[(7.0, 2)])
  world.look = lambda: [sign("server", 1.0)]
  assert world.run() == 2
  assert len(world.times("server-0")) == 1


def test_a_learner_goes_on_only_with_a_folder_that_it_has_opened():
  world = World(learner_0=[(1.0, -9), (1.0, -9), (1.0, 0)])
  opened = iter([False, True])
  assert world.run(opened=lambda: next(opened)) == 0
  assert [r for n, _, r in world.starts if n == "learner-0"] == [
    *(False, False, True),
  ]


def test_an_interrupted_learner_ends_the_run():
  world = World(learner_0=[(5.0, 130)])
  assert world.run() == 130
  assert len(world.times("learner-0")) == 1


def test_processes_of_a_learner_are_started_again_together():
  world = World(learner_1=[(5.0, -9)], learner_0=[None, (30.0, 0)])
  assert world.run(learners=3) == 0
  # The others, which hang without it, are killed, and only the first resumes.
  killed = [n for what, n, at in world.events if what == "kill" and at < 30]
  assert killed == ["learner-0", "learner-2"]
  starts = [(n, at, r) for n, at, r in world.starts if "learner" in n]
  assert [(n, r) for n, _, r in starts] == [
    *(("learner-0", False), ("learner-1", False), ("learner-2", False)),
    *(("learner-0", True), ("learner-1", False), ("learner-2", False)),
  ]
  assert len({at for _, at, _ in starts[3:]}) == 1
  assert len(world.said) == 1


def test_processes_of_a_replica_are_started_again_together():
  world = World(server_3=[(5.0, -9)], learner_0=[(30.0, 0)])
  assert world.run(servers=2, server_hosts=2) == 0
  assert world.times("server-0") == world.times("server-1") == [0.0]
  # The replica's first host, which waits for the other one, is killed.
  killed = [n for what, n, at in world.events if what == "kill" and at < 30]
  assert killed == ["server-2"]
  assert world.times("server-2") == world.times("server-3")
  assert len(world.times("server-3")) == 2
  assert len(world.said) == 1
  stopped = [n for what, n, _ in world.events if what == "terminate"]
  assert stopped == ["actor-0", *(f"server-{i}" for i in range(4)), "queue-0"]


def test_a_silent_host_ends_its_replica_alone():
  world = World(learner_0=[(60.0, 0)])

  def look():
    quiet = world.now >= 10
    ages = [0.0, world.now - 10.0 if quiet else 0.0, 0.0, 0.0]
    return [
      Sign(role="server", index=i, age=age, idle_seconds=0.0)
      for i, age in enumerate(ages)
    ]

  world.look = look
  assert world.run(servers=2, server_hosts=2, lost_seconds=20.0) == 0
  assert len(world.times("server-0")) == len(world.times("server-1")) > 1
  assert len(world.times("server-2")) == len(world.times("server-3")) == 1
  assert "server-1 gave no sign of life for 2" in world.said[0]


def test_a_learners_other_processes_may_end_before_the_first():
  world = World(learner_1=[(8.0, 0)], learner_0=[(10.0, 0)])
  assert world.run(learners=2) == 0
  assert len(world.times("learner-1")) == 1
  assert not world.said


def test_a_known_error_of_one_process_of_a_learner_ends_all():
  world = World(learner_1=[(3.0, 1)])
  assert world.run(learners=2) == 1
  assert "learner-1 ended with exit code 1" in world.said[-1]
  assert ("kill", "learner-0") in [(what, n) for what, n, _ in world.events]


def test_asked_to_stop_it_waits_for_the_learner_first():
  world = World()
  world.stop_at = 20.0
  assert world.run() == 130
  events = [(what, name) for what, name, _ in world.events]
  assert events == [
    ("terminate", "learner-0"),
    ("terminate", "actor-0"),
    ("terminate", "server-0"),
    ("terminate", "queue-0"),
  ]


def test_who_does_not_stop_is_killed():
  world = World()
  world.stop_at, world.deaf = 20.0, {"learner-0", "actor-0"}
  assert world.run(stall_seconds=60.0) == 130
  at = {name: when for what, name, when in world.events if what == "kill"}
  asked = {n: w for what, n, w in world.events if what == "terminate"}
  assert {*at} == {"learner-0", "actor-0"}
  assert 60 < at["learner-0"] - asked["learner-0"] < 61
  assert 15 < at["actor-0"] - asked["actor-0"] < 16
  assert at["learner-0"] <= asked["actor-0"]


def sign(role, age, idle=0.0, index=0):
  return Sign(role=role, index=index, age=age, idle_seconds=idle)


def test_silence_counts_from_the_latest_sign():
  world = World(learner_0=[(60.0, 0)])
  world.look = lambda: [sign("actor", max(0.0, world.now - 5.0))]
  assert world.run(lost_seconds=20.0) == 0
  (killed,) = [e for e in world.events if e[0] == "kill"]
  # Silent since 5.0; asked every 2 s.
  assert killed[1] == "actor-0"
  assert 25.0 < killed[2] <= 27.5
  # The next one has never been seen: the sign is one of the process before.
  assert len(world.times("actor-0")) == 2
  assert "gave no sign of life for 2" in world.said[0]


def test_who_never_gives_a_sign_gets_as_long_as_a_start_may_take():
  world = World(learner_0=[(2000.0, 0)])
  world.look = lambda: [sign("learner", 0.0), sign("server", 0.0)]
  assert world.run(stall_seconds=900.0) == 0
  killed = [(n, at) for what, n, at in world.events if what == "kill"]
  assert [n for n, _ in killed] == ["actor-0", "actor-0"]
  assert 900 < killed[0][1] < 903


def test_who_does_not_get_on_is_killed():
  world = World(learner_0=[(100.0, 0)])
  world.look = lambda: [
    sign("learner", 0.0),
    sign("server", 0.0, idle=50.0),
    sign("actor", 0.0, idle=51.0 if len(world.times("actor-0")) < 2 else 0.0),
  ]
  assert world.run(stall_seconds=50.0) == 0
  killed = [n for what, n, _ in world.events if what == "kill"]
  assert killed == ["actor-0"]
  assert "did not get on with its work for 51 s" in world.said[0]


def test_a_queue_that_is_away_makes_nobody_lost():
  world = World(learner_0=[(100.0, 0)], queue_0=[(30.0, -9)])
  # Beats until 30; nobody answers until 50; then nobody is known for a while.
  born = 50.0

  def look():
    if 30.0 <= world.now < born:
      return None
    if born <= world.now < born + 8.0:
      return []
    return [sign(role, 0.0) for role in ("learner", "actor", "server")]

  world.look = look
  assert world.run(lost_seconds=10.0) == 0
  assert [e for e in world.events if e[0] == "kill"] == []
  assert len(world.times("queue-0")) == 2


def test_who_stays_away_from_a_queue_that_is_back_is_lost():
  world = World(learner_0=[(100.0, 0)], queue_0=[(30.0, -9)])
  world.look = lambda: (
    [sign("learner", 0.0), sign("server", 0.0)]
    + ([sign("actor", 0.0)] if world.now < 30 else [])
  )
  assert world.run(lost_seconds=10.0) == 0
  (killed,) = [e for e in world.events if e[0] == "kill"]
  # Back at 31.2 at the earliest, first asked up to 2 s later.
  assert killed[1] == "actor-0"
  assert 41.0 < killed[2] < 46.0


def test_a_queue_that_stops_answering_is_killed():
  world = World(learner_0=[(100.0, 0)])
  world.look = lambda: [] if world.now < 20 or world.now > 40 else None
  assert world.run(lost_seconds=10.0) == 0
  (killed,) = [e for e in world.events if e[0] == "kill"]
  assert killed[1] == "queue-0"
  assert 28.0 < killed[2] < 33.0
