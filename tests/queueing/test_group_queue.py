"""Each task is trained at most once, whatever dies; nothing is ever lost."""

import collections
import dataclasses
import json
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
  RuleBasedStateMachine,
  initialize,
  invariant,
  precondition,
  rule,
)

from arl_jax.queueing.group_queue import GroupQueue, NotBegun
from arl_jax.queueing.task_source import Source, TaskSource
from tests.queueing.leased_groups import a_lease, episode, group, start

SECONDS = 10.0


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def queue_of(clock=None, **changes):
  queue = GroupQueue(lease_seconds=SECONDS, clock=clock or Clock())
  queue.begin(start(**changes))
  return queue


def deliver_all(queue, leases, actor="a", **changes):
  return [queue.deliver(actor, x, group(x, **changes)) for x in leases]


def numbers(groups):
  return [int(g.group_id.partition("/")[0]) for g in groups]


def test_a_step_gets_its_groups_in_order_of_draws():
  queue = queue_of(groups_per_step=2, max_staleness=1)
  assert queue.take(0, 0) is None
  # At most (1 + 1) · 2 are out.
  leases = queue.lease("a", 10)
  assert [x.number for x in leases] == [0, 1, 2, 3]
  assert deliver_all(queue, leases[::-1]) == ["ready"] * 4
  batch = queue.take(0, 0)
  assert numbers(batch.groups) == [0, 1]
  assert not batch.ended
  assert batch.waiting == 2
  assert [row[0] for row in batch.ledger["open"]] == [2, 3]
  assert batch.ledger["source"]["drawn"] == 4
  # Two ready, two being trained.
  assert queue.lease("a", 10) == []
  assert numbers(queue.waiting()) == [2, 3]
  # The answer was lost; then the next step, at the next version.
  assert queue.take(0, 0) is batch
  assert numbers(queue.take(1, 1).groups) == [2, 3]
  assert [x.number for x in queue.lease("a", 10)] == [4, 5]


def test_nothing_is_leased_for_a_step_while_its_weights_are_made():
  # Strictly on-policy: tasks of step 1 go out with version 1 only.
  queue = queue_of(groups_per_step=2, max_staleness=0)
  deliver_all(queue, queue.lease("a", 10))
  queue.take(0, 0)
  assert queue.lease("a", 10) == []
  assert queue.take(1, 1) is None
  leases = queue.lease("a", 10)
  assert [(x.number, x.version) for x in leases] == [(2, 1), (3, 1)]


def test_lost_actors_tasks_are_handed_out_again():
  clock = Clock()
  queue = queue_of(clock)
  one, two = queue.lease("a", 2)
  clock.now += 6
  assert queue.renew("a", [one]) == []
  clock.now += 6
  # `one` was renewed 6 s ago, `two` handed out 12 s ago.
  assert queue.renew("a", [one, two]) == [two]
  again = queue.lease("b", 1)
  assert again == [dataclasses.replace(two, attempt=2)]
  assert queue.status()["drops"] == {"lease_expired": 1}
  assert queue.status()["actors"] == {"a": 1, "b": 1}
  # The first of both to come is taken, the second isn't.
  assert queue.deliver("a", two, group(two)) == "ready"
  assert queue.renew("b", again) == again
  assert queue.deliver("b", again[0], group(again[0])) == "duplicate"


def test_what_is_given_back_goes_to_the_next_who_asks():
  queue = queue_of()
  leases = queue.lease("a", 2)
  queue.give_back("b", leases)
  assert queue.status()["leased"] == 2
  queue.give_back("a", leases[:1])
  assert queue.lease("b", 1) == leases[:1]


def test_failures_are_tried_again_then_given_up():
  queue = queue_of(tries=2, tasks=2, epochs=1, groups_per_step=2)
  one, two = queue.lease("a", 2)
  assert queue.deliver("a", one, None) == "infrastructure"
  # The same report again, as its answer was lost, is no second failure.
  assert queue.deliver("a", one, None) == "duplicate"
  (again,) = queue.lease("b", 5)
  assert again == dataclasses.replace(one, attempt=2)
  # Nor does it take the task from whoever has it now.
  assert queue.deliver("a", one, None) == "duplicate"
  assert queue.renew("b", [again]) == []
  assert queue.deliver("b", again, None) == "infrastructure"
  assert queue.status()["drops"] == {
    "infrastructure": 2,
    "duplicate": 2,
    "task_given_up": 1,
  }
  assert queue.deliver("a", two, group(two)) == "ready"
  batch = queue.take(0, 0)
  assert (numbers(batch.groups), batch.ended) == ([1], True)
  assert batch.ledger["open"] == []
  assert queue.take(1, 1).groups == ()


def test_stale_groups_are_rolled_out_again():
  queue = queue_of(version=5, max_staleness=1, groups_per_step=1)
  one, two = queue.lease("a", 2)
  # Version 3 is two behind 5.
  assert queue.deliver("a", one, group(one, versions=3)) == "stale"
  assert queue.deliver("a", two, group(two, versions=4)) == "ready"
  # It goes stale while it waits: 4 is two behind 6.
  assert queue.take(0, 6) is None
  again = queue.lease("b", 2)
  assert [(x.number, x.attempt, x.version) for x in again] == [
    (0, 2, 6),
    (1, 2, 6),
  ]
  # One of them still came from the old attempt: it doesn't end the new one.
  assert queue.deliver("a", one, group(one, versions=3)) == "stale"
  assert queue.renew("b", again) == []
  assert queue.status()["drops"] == {"stale": 3}


def test_the_oldest_trained_token_decides():
  queue = queue_of(version=5, max_staleness=1)
  (lease,) = queue.lease("a", 1)
  mixed = group(lease, versions=np.array([5, 5, 5, 3]))
  assert queue.deliver("a", lease, mixed) == "stale"


def test_tokens_of_versions_that_nobody_told_are_refused():
  queue = queue_of(version=5)
  one, two = queue.lease("a", 2)
  # 6 may be published already: the learner tells it with its next take.
  assert queue.deliver("a", one, group(one, versions=6)) == "ready"
  assert queue.deliver("a", two, group(two, versions=7)) == "foreign_version"
  assert queue.lease("b", 1) == [dataclasses.replace(two, attempt=2)]


def test_groups_of_another_lineage_are_refused():
  queue = queue_of()
  old = queue.lease("a", 1)
  queue.begin(start(lineage="second"))
  assert queue.lineage == "second"
  assert queue.renew("a", old) == old
  assert deliver_all(queue, old) == ["lineage"]
  (new,) = queue.lease("b", 1)
  assert (new.lineage, new.number) == ("second", 0)
  # The old actor's name is no key to it.
  queue.give_back("b", [dataclasses.replace(new, lineage="first")])
  assert queue.renew("b", [new]) == []


@pytest.mark.parametrize(
  ("wrong", "reason"),
  [
    (lambda x: group(x, group_id="9/t0"), "group_id is '9/t0', not '0/"),
    (
      lambda x: group(
        dataclasses.replace(x, task_id="t9"), group_id=x.group_id
      ),
      "task_id is 't9', not",
    ),
    (lambda x: group(x, rewards=(1.0,)), "has 1 rollouts, not >= 2"),
    (lambda x: group(x, rewards=(1.0, 0.0, 1.0)), "indices .0, 1, 2., not"),
    (lambda x: group(x, rewards=(math.nan, 0.0)), "reward that isn't finite"),
    (lambda x: group(x, rewards=(None, 1.0)), "holds an unscored episode"),
    (
      lambda x: group(x, episodes=(episode(x.task_id, 1, 0, 1.0),) * 2),
      "indices .1, 1., not",
    ),
  ],
)
def test_groups_that_are_not_of_the_lease(wrong, reason):
  queue = queue_of()
  (lease,) = queue.lease("a", 1)
  with pytest.raises(ValueError, match=reason):
    queue.deliver("a", lease, wrong(lease))
  assert queue.renew("a", [lease]) == []
  assert queue.deliver("a", lease, group(lease)) == "ready"


def test_rollouts_that_failed_are_counted():
  queue = queue_of(group_size=4)
  (lease,) = queue.lease("a", 1)
  assert queue.deliver("a", lease, group(lease)) == "ready"
  assert queue.status()["drops"] == {"episode_infrastructure": 2}


def test_too_hard_tasks_come_no_more():
  queue = queue_of(tasks=2, groups_per_step=2, skip_below=0.25, max_staleness=0)
  one, two = queue.lease("a", 2)
  # Mean rewards 0 and ½.
  queue.deliver("a", one, group(one, rewards=(0.0, 0.0)))
  queue.deliver("a", two, group(two))
  queue.take(0, 0)
  queue.take(1, 1)
  assert {x.task_id for x in queue.lease("a", 5)} == {two.task_id}


def test_the_last_step_is_smaller_and_the_end_stays():
  queue = queue_of(tasks=3, epochs=1, groups_per_step=2, max_staleness=1)
  deliver_all(queue, queue.lease("a", 5))
  first = queue.take(0, 0)
  assert (len(first.groups), first.ended) == (2, False)
  last = queue.take(1, 1)
  assert (len(last.groups), last.ended) == (1, True)
  assert queue.lease("a", 5) == []
  end = queue.take(2, 2)
  assert (end.groups, end.ended) == ((), True)


def test_the_end_waits_for_what_is_still_rolled_out():
  queue = queue_of(tasks=2, epochs=1, groups_per_step=2)
  one, two = queue.lease("a", 2)
  deliver_all(queue, [one])
  assert queue.take(0, 0) is None
  deliver_all(queue, [two])
  assert len(queue.take(0, 0).groups) == 2


def test_a_queue_that_knows_no_run_says_so():
  queue = GroupQueue(lease_seconds=SECONDS)
  lease = a_lease()
  for ask in (
    lambda: queue.take(0, 0),
    queue.waiting,
    lambda: queue.lineage,
    lambda: queue.lease("a", 1),
    lambda: queue.renew("a", [lease]),
    lambda: queue.give_back("a", [lease]),
    lambda: queue.deliver("a", lease, None),
  ):
    with pytest.raises(NotBegun, match="no learner has begun"):
      ask()
  assert queue.status() == {"state": "not begun"}


def test_a_commits_groups_are_those_of_its_step():
  queue = queue_of(groups_per_step=1, max_staleness=2)
  deliver_all(queue, queue.lease("a", 9))
  batch = queue.take(0, 0)
  kept = queue.waiting()
  assert numbers(kept) == [1, 2]
  for _ in range(2):
    # Into the same queue and into a new one.
    queue.begin(
      start(
        lineage="second",
        groups_per_step=1,
        max_staleness=2,
        ledger=batch.ledger,
        groups=kept,
      )
    )
    assert queue.waiting() == kept
    assert [x.number for x in queue.lease("a", 9)] == [3]
    queue = GroupQueue(lease_seconds=SECONDS)


def test_a_number_that_is_another_task_now_is_none_of_the_old_ones():
  # What was measured before the queue died may have drawn another task.
  queue = queue_of()
  (lease,) = queue.lease("a", 1)
  other = dataclasses.replace(
    lease, task_id="t1" if lease.task_id == "t0" else "t0"
  )
  assert queue.deliver("a", other, group(other)) == "duplicate"
  assert queue.deliver("a", lease, group(lease)) == "ready"
  ledger = {
    "source": {"drawn": 1, "places": {"": [0, 1, 1]}, "measured": {}},
    "open": [[0, lease.task_id, 0, 1]],
  }
  queue = GroupQueue(lease_seconds=SECONDS)
  foreign = group(other)
  queue.begin(start(ledger=ledger, groups=(foreign,)))
  assert queue.waiting() == ()
  # Of a commit's group and one that is there, the commit's stays.
  (again,) = queue.lease("a", 1)
  deliver_all(queue, [again], rewards=(0.0, 0.0))
  kept = group(lease)
  queue.begin(start(ledger=ledger, groups=(kept,)))
  assert queue.waiting() == (kept,)


def test_groups_that_the_commit_does_not_know_are_left_out():
  queue = queue_of(version=3, groups_per_step=1, max_staleness=2)
  leases = queue.lease("a", 3)
  deliver_all(queue, leases[:1])
  batch = queue.take(0, 3)
  one, two = leases[1:]
  # One with a token of a version beyond the commit, one without.
  deliver_all(queue, [one], versions=4)
  deliver_all(queue, [two])
  unknown = group(dataclasses.replace(two, number=77))
  queue.begin(
    start(
      lineage="second",
      version=3,
      groups_per_step=1,
      max_staleness=2,
      ledger=batch.ledger,
      groups=(unknown,),
    )
  )
  assert numbers(queue.waiting()) == [two.number]
  assert [x.number for x in queue.lease("a", 9)] == [one.number, 3]


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"source": None}, r"ledger\.source is None"),
    ({"open": None}, r"ledger\.open is None"),
    ({"open": [[0, "t0", 0]]}, "not the number, task, epoch"),
    ({"open": [[2, "t0", 0, 1]]}, "not the number, task, epoch"),
    ({"open": [[-1, "t0", 0, 1]]}, "not the number, task, epoch"),
    ({"open": [[0, "t6", 0, 1]]}, "each task one of the run's"),
    ({"open": [[0, "t0", 0, 0]]}, "attempt"),
    ({"open": [[0, "t0", 0, 1]] * 2}, "each draw once"),
    ({"open": ["abcd"]}, "not the number, task, epoch"),
  ],
)
def test_ledgers_that_cannot_be(changes, reason):
  queue = queue_of(max_staleness=0)
  deliver_all(queue, queue.lease("a", 2))
  good = queue.take(0, 0).ledger
  before = queue.status()
  with pytest.raises(ValueError, match=reason):
    queue.begin(start(lineage="second", ledger={**good, **changes}))
  assert queue.status() == before


@dataclasses.dataclass(frozen=True)
class Commit:
  """What a learner would have on disk."""

  version: int
  step: int
  ledger: dict
  groups: tuple
  trained: frozenset
  given_up: frozenset


class Run(RuleBasedStateMachine):
  """Actors, a learner and a queue that die; held against the order of draws."""

  @initialize(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    epochs=st.integers(1, 3),
    per_step=st.integers(1, 3),
    staleness=st.integers(0, 2),
    tries=st.integers(1, 2),
  )
  def begin(self, sizes, epochs, per_step, staleness, tries):
    self.clock = Clock()
    sources = tuple(
      Source(
        name="xyz"[i],
        weight=1.0 + i,
        task_ids=tuple(f"{'xyz'[i]}{n}" for n in range(size)),
      )
      for i, size in enumerate(sizes)
    )
    self.values = {
      "sources": sources,
      "epochs": epochs,
      "groups_per_step": per_step,
      "max_staleness": staleness,
      "tries": tries,
    }
    oracle = TaskSource(sources, seed=7, epochs=epochs)
    self.draws = []
    while (draw := oracle.draw()) is not None:
      self.draws.append(draw)
    self.lineages = 0
    self.leases = []
    self.go_on(Commit(0, 0, None, (), frozenset(), frozenset()), fresh=True)
    self.commits = [self.commit_now(())]

  def start(self, ledger, groups):
    return start(
      lineage=f"l{self.lineages}",
      version=self.version,
      ledger=ledger,
      groups=groups,
      **self.values,
    )

  def go_on(self, commit, fresh):
    """A learner starts from a commit; the queue may be a new one."""
    self.lineages += 1
    # What the queue heard last may be one behind what is published.
    self.version = self.told = commit.version
    self.step = commit.step
    self.trained, self.given_up = set(commit.trained), set(commit.given_up)
    self.ledger = commit.ledger
    if fresh:
      self.queue = GroupQueue(lease_seconds=SECONDS, clock=self.clock)
    self.queue.begin(self.start(commit.ledger, commit.groups))
    self.ended = False

  def commit_now(self, groups):
    return Commit(
      self.version,
      self.step,
      # As a file would give it back.
      json.loads(json.dumps(self.ledger)),
      groups,
      frozenset(self.trained),
      # Of the ledger's time: what is given up later is open in it.
      frozenset(self.given_up_in_ledger()),
    )

  def given_up_in_ledger(self):
    if self.ledger is None:
      return set()
    drawn = self.ledger["source"]["drawn"]
    opened = {row[0] for row in self.ledger["open"]}
    return {n for n in self.given_up if n < drawn and n not in opened}

  @rule(actor=st.sampled_from("ab"), most=st.integers(1, 5))
  def lease(self, actor, most):
    for lease in self.queue.lease(actor, most):
      draw = self.draws[lease.number]
      assert lease.task_id == draw.task_id
      assert lease.version == self.told
      assert lease.number not in self.trained
      assert lease.number not in self.given_up
      self.leases.append((actor, lease))

  @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
  def wait(self, seconds):
    self.clock.now += seconds

  @precondition(lambda self: self.leases)
  @rule(data=st.data())
  def renew(self, data):
    actor, lease = data.draw(st.sampled_from(self.leases))
    assert self.queue.renew(actor, [lease]) in ([], [lease])

  @precondition(lambda self: self.leases)
  @rule(data=st.data())
  def give_back(self, data):
    actor, lease = data.draw(st.sampled_from(self.leases))
    self.queue.give_back(actor, [lease])

  @precondition(lambda self: self.leases)
  @rule(data=st.data(), age=st.integers(-2, 3), fails=st.integers(0, 4))
  def deliver(self, data, age, fails):
    actor, lease = data.draw(st.sampled_from(self.leases))
    before = self.queue.status()["drops"].get("task_given_up", 0)
    found = None
    if fails:
      found = group(lease, versions=max(0, self.told - age))
    fate = self.queue.deliver(actor, lease, found)
    wrong_lineage = lease.lineage != f"l{self.lineages}"
    assert (fate == "lineage") == wrong_lineage
    if fate == "ready":
      assert -1 <= age <= self.values["max_staleness"] or self.told < age
      assert lease.number not in self.trained
    if self.queue.status()["drops"].get("task_given_up", 0) > before:
      self.given_up.add(lease.number)

  @rule()
  def take(self):
    self.told = self.version
    batch = self.queue.take(self.step, self.version)
    if batch is None:
      return
    assert self.queue.take(self.step, self.version) is batch
    per_step = self.values["groups_per_step"]
    assert len(batch.groups) == per_step or batch.ended
    found = numbers(batch.groups)
    assert found == sorted(set(found))
    assert not self.trained & {*found}
    assert not self.given_up & {*found}
    self.trained |= {*found}
    for g in batch.groups:
      oldest = min(e.oldest_version for e in g.episodes)
      assert self.version - oldest <= self.values["max_staleness"]
    self.ledger, self.ended = batch.ledger, batch.ended
    self.check_conserved()
    self.step += 1
    self.version += 1
    if batch.ended:
      assert self.trained | self.given_up == {*range(len(self.draws))}

  def check_conserved(self):
    """Every draw is trained, open or given up, and only one of them."""
    opened = [row[0] for row in self.ledger["open"]]
    total = [*opened, *self.trained, *self.given_up]
    assert sorted(total) == [*range(self.ledger["source"]["drawn"])]
    for number, task_id, epoch, _ in self.ledger["open"]:
      draw = self.draws[number]
      assert (draw.task_id, draw.epoch) == (task_id, epoch)

  @rule()
  def commit(self):
    groups = self.queue.waiting()
    opened = {row[0] for row in (self.ledger or {"open": []})["open"]}
    kept = tuple(g for g in groups if numbers([g])[0] in opened)
    self.commits.append(self.commit_now(kept))

  @rule(data=st.data(), fresh=st.booleans())
  def learner_dies(self, data, fresh):
    self.go_on(data.draw(st.sampled_from(self.commits[-3:])), fresh)

  @rule()
  def queue_dies(self):
    """The learner that lives begins again from its last step's groups."""
    self.queue = GroupQueue(lease_seconds=SECONDS, clock=self.clock)
    with pytest.raises(NotBegun):
      self.queue.take(self.step, self.version)
    self.given_up = self.given_up_in_ledger()
    self.queue.begin(self.start(self.ledger, ()))
    self.told = self.version

  @invariant()
  def bounded(self):
    if not hasattr(self, "queue"):
      return
    status = self.queue.status()
    most = (self.values["max_staleness"] + 1) * self.values["groups_per_step"]
    assert status["open"] + status["training"] <= most
    assert status["ready"] + status["leased"] <= status["open"]

  def teardown(self):
    """Whatever happened, a run whose actors work gets to its end."""
    if not hasattr(self, "queue"):
      return
    for _ in range(2 * len(self.draws) + 5):
      self.clock.now += SECONDS + 1
      for lease in self.queue.lease("c", 99):
        assert self.queue.deliver("c", lease, group(lease)) == "ready"
      self.take()
      if self.ended:
        break
    assert self.ended
    counts = collections.Counter(
      (self.draws[n].task_id, self.draws[n].epoch) for n in self.trained
    )
    assert {*counts.values()} <= {1}


TestRun = Run.TestCase
TestRun.settings = hypothesis.settings(
  max_examples=60,
  stateful_step_count=40,
  deadline=None,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
