"""Which tasks are due, rolled out, or wait as groups. Imports no jax."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from arl_jax.queueing import ledger
from arl_jax.queueing.ledger import Open
from arl_jax.queueing.task_source import Draw, Source, TaskSource
from arl_jax.types import NO_VERSION, Group


class NotBegun(Exception):
  """The queue doesn't know the run yet, or not any more; `begin` tells it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
  """What a learner has the queue begin with; JSON values but for the groups.

  Attributes:
    lineage: of the weights; what was rolled out by another one's is refused.
    version: of the policy, published already.
    seed: of the order of tasks.
    epochs: of each source; 0 for no end.
    group_size: rollouts of a task.
    groups_per_step: that the learner takes at a time.
    max_staleness: policy versions between a group's oldest trained token and
      the learner that takes it, at most.
    tries: of a task whose group failed for reasons of infrastructure.
    skip_below: see `TaskSource`.
    skip_above: likewise.
    sources: of tasks.
    ledger: of the commit that the run goes on from, None for the first task.
    groups: that waited in that commit.
  """

  lineage: str
  version: int
  seed: int
  epochs: int
  group_size: int
  groups_per_step: int
  max_staleness: int
  tries: int
  skip_below: float
  skip_above: float
  sources: tuple[Source, ...]
  ledger: Mapping[str, Any] | None = None
  groups: tuple[Group, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
  """A task that an actor is to roll out as one group.

  Attributes:
    lineage: of the weights to use.
    number: of the task's draw.
    attempt: of it, from 1.
    task_id: of the task.
    epoch: of its source, from 0.
    group_size: rollouts.
    version: newest when it was handed out; no older one may sample.
  """

  lineage: str
  number: int
  attempt: int
  task_id: str
  epoch: int
  group_size: int
  version: int

  @property
  def group_id(self) -> str:
    return f"{self.number}/{self.task_id}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
  """What a step trains on.

  Attributes:
    groups: in order of their draws.
    ledger: what is drawn and not trained once these groups are; JSON values.
    ended: whether no more will come.
    drops: groups and rollouts that weren't trained, by reason, since `begin`.
    waiting: groups that are ready for later steps.
  """

  groups: tuple[Group, ...]
  ledger: Mapping[str, Any]
  ended: bool
  drops: Mapping[str, int]
  waiting: int


class GroupQueue:
  """Hands out tasks and takes groups, so that each is trained at most once.

  A task that is drawn stays open until the learner takes its group; whatever
  happens to who rolls it out, it is handed out again. At most
  (max_staleness + 1) · groups_per_step tasks are open or being trained, so that
  rollouts can't run away from updates, nor groups pile up. One thread at a time
  may call.
  """

  def __init__(
    self,
    *,
    lease_seconds: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Knows no run before `begin`.

    Args:
      lease_seconds: after which a lease that isn't renewed is handed out again.
      clock: returns seconds.
    """
    self._lease_seconds, self._clock = lease_seconds, clock
    self._start: Start | None = None
    self._open: dict[int, Open] = {}
    self._drops: Counter[str] = Counter()
    # The last answer, which may have been lost on its way.
    self._taken: tuple[int, Batch] | None = None

  @property
  def lineage(self) -> str:
    """Of the run that began last.

    Raises:
      NotBegun: the queue must begin first.
    """
    return self._known().lineage

  # For the learner.

  def begin(self, start: Start) -> None:
    """Begins, or goes on from another commit.

    Groups that are ready, whose task is open in the ledger and which no version
    beyond the commit's has sampled, stay.

    Raises:
      ValueError: the ledger doesn't fit the sources.
    """
    source = TaskSource(
      start.sources,
      seed=start.seed,
      epochs=start.epochs,
      skip_below=start.skip_below,
      skip_above=start.skip_above,
    )
    opened: dict[int, Open] = {}
    if start.ledger is not None:
      opened = ledger.read(start.ledger, source, start.sources)
    there = [o.group for o in self._open.values() if o.group is not None]
    # Of two, the commit's.
    for group in (*there, *start.groups):
      found = opened.get(_number(group))
      if (
        found is not None
        and found.draw.task_id == group.task.task_id
        and _newest(group) <= start.version
      ):
        found.group = group
    self._start, self._source, self._open = start, source, opened
    self._version, self._training, self._taken = start.version, 0, None
    self._drops = Counter()

  def take(self, step: int, version: int) -> Batch | None:
    """The groups of a step; None while there aren't enough.

    Args:
      step: of the learner. A step that is asked for again gets the same groups,
        as its answer may have been lost.
      version: of the policy, published already.

    Raises:
      NotBegun: the queue must begin first.
    """
    start = self._known()
    if self._taken is not None and self._taken[0] == step:
      return self._taken[1]
    self._version, self._training = version, 0
    self._expire()
    self._drop_stale()
    ready = sorted(n for n, o in self._open.items() if o.group is not None)
    wanted = start.groups_per_step
    ended = len(ready) < wanted and self._has_ended(ready)
    if len(ready) < wanted and not ended:
      return None
    groups = []
    for number in ready[:wanted]:
      group = self._open.pop(number).group
      assert group is not None
      groups.append(group)
    self._training = len(groups)
    batch = Batch(
      groups=tuple(groups),
      ledger=ledger.write(self._source, self._open),
      ended=ended,
      drops=dict(self._drops),
      waiting=len(ready) - len(groups),
    )
    self._taken = step, batch
    return batch

  def waiting(self) -> tuple[Group, ...]:
    """Groups that are ready, in order of their draws.

    Raises:
      NotBegun: the queue must begin first.
    """
    self._known()
    ready = sorted(self._open.items())
    return tuple(o.group for _, o in ready if o.group is not None)

  def status(self) -> dict[str, Any]:
    """What is going on, for people and metrics; JSON values."""
    if self._start is None:
      return {"state": "not begun"}
    self._expire()
    leased = [o for o in self._open.values() if o.actor is not None]
    return {
      "state": "running",
      "lineage": self._start.lineage,
      "version": self._version,
      "ready": sum(o.group is not None for o in self._open.values()),
      "leased": len(leased),
      "open": len(self._open),
      "training": self._training,
      "actors": dict(Counter(str(o.actor) for o in leased)),
      "drops": dict(self._drops),
    }

  # For actors.

  def lease(self, actor: str, most: int) -> list[Lease]:
    """Up to `most` tasks to roll out; none if there is nothing to do now.

    Raises:
      NotBegun: the queue must begin first.
    """
    start = self._known()
    self._expire()
    leases: list[Lease] = []
    due = sorted(
      n for n, o in self._open.items() if o.actor is None and o.group is None
    )
    while len(leases) < most:
      if due:
        found = self._open[due.pop(0)]
      elif self._room() and (draw := self._source.draw()) is not None:
        found = self._open[draw.number] = Open(draw)
      else:
        break
      found.actor = actor
      found.expires = self._clock() + self._lease_seconds
      leases.append(
        Lease(
          lineage=start.lineage,
          number=found.draw.number,
          attempt=found.attempt,
          task_id=found.draw.task_id,
          epoch=found.draw.epoch,
          group_size=start.group_size,
          version=self._version,
        )
      )
    return leases

  def renew(self, actor: str, leases: Sequence[Lease]) -> list[Lease]:
    """Keeps an actor's leases; those that it has lost come back.

    Raises:
      NotBegun: the queue must begin first.
    """
    self._known()
    self._expire()
    lost = []
    for lease in leases:
      found = self._held(actor, lease)
      if found is None:
        lost.append(lease)
      else:
        found.expires = self._clock() + self._lease_seconds
    return lost

  def give_back(self, actor: str, leases: Sequence[Lease]) -> None:
    """Has tasks handed out to others; an actor that stops says so.

    Raises:
      NotBegun: the queue must begin first.
    """
    self._known()
    for lease in leases:
      if (found := self._held(actor, lease)) is not None:
        found.actor = None

  def deliver(self, actor: str, lease: Lease, group: Group | None) -> str:
    """Takes what became of a lease.

    Args:
      actor: who had it.
      lease: as handed out.
      group: of its task, scored; None if fewer than two rollouts succeeded.
        One is welcome after its lease has expired, too, while nobody else's is
        there; what else comes late changes nothing for whoever has it then.

    Returns:
      "ready", or why the group isn't trained: "lineage", "duplicate",
      "infrastructure", "stale", "foreign_version".

    Raises:
      NotBegun: the queue must begin first.
      ValueError: the group isn't one of that lease.
    """
    start = self._known()
    found = self._open.get(lease.number)
    if lease.lineage != start.lineage:
      return self._drop("lineage")
    if (
      found is None
      or found.group is not None
      or found.draw.task_id != lease.task_id
    ):
      return self._drop("duplicate")
    held = self._held(actor, lease) is not None
    if group is None:
      # A report that is sent again counts once.
      if not held:
        return self._drop("duplicate")
      self._fail(found)
      return self._drop("infrastructure")
    _check(group, lease, found.draw, start.group_size)
    if _newest(group) > self._version + 1:
      # The learner is at most one publication ahead of what it has told.
      reason = "foreign_version"
      return self._reopen(found, reason) if held else self._drop(reason)
    self._source.measure(lease.task_id, float(np.mean(group.rewards)))
    if self._stale(group):
      return self._reopen(found, "stale") if held else self._drop("stale")
    found.group, found.actor = group, None
    missing = start.group_size - len(group.episodes)
    if missing:
      self._drops["episode_infrastructure"] += missing
    return "ready"

  def _known(self) -> Start:
    if self._start is None:
      raise NotBegun("no learner has begun a run with this queue yet")
    return self._start

  def _held(self, actor: str, lease: Lease) -> Open | None:
    found = self._open.get(lease.number)
    same = found is not None and (
      (found.actor, found.attempt) == (actor, lease.attempt)
    )
    start = self._known()
    return found if same and lease.lineage == start.lineage else None

  def _room(self) -> bool:
    start = self._known()
    most = (start.max_staleness + 1) * start.groups_per_step
    return len(self._open) + self._training < most

  def _has_ended(self, ready: Sequence[int]) -> bool:
    """Whether nothing is open but what is ready, and nothing can be drawn."""
    if len(self._open) > len(ready):
      return False
    if (draw := self._source.draw()) is None:
      return True
    self._open[draw.number] = Open(draw)
    return False

  def _expire(self) -> None:
    now = self._clock()
    for found in self._open.values():
      if found.actor is not None and found.expires < now:
        found.actor = None
        found.attempt += 1
        self._drops["lease_expired"] += 1

  def _drop_stale(self) -> None:
    for found in self._open.values():
      if found.group is not None and self._stale(found.group):
        self._reopen(found, "stale")

  def _stale(self, group: Group) -> bool:
    oldest = [e.oldest_version for e in group.episodes]
    oldest = [version for version in oldest if version != NO_VERSION]
    staleness = self._version - min(oldest, default=self._version)
    return staleness > self._known().max_staleness

  def _reopen(self, found: Open, reason: str) -> str:
    found.group = found.actor = None
    found.attempt += 1
    return self._drop(reason)

  def _fail(self, found: Open) -> None:
    found.failures += 1
    if found.failures >= self._known().tries:
      del self._open[found.draw.number]
      self._drops["task_given_up"] += 1
    else:
      found.actor = None
      found.attempt += 1

  def _drop(self, reason: str) -> str:
    self._drops[reason] += 1
    return reason


def _number(group: Group) -> int:
  """Of the draw, from a group's id (see `Lease.group_id`)."""
  number = group.group_id.partition("/")[0]
  return int(number) if number.isdecimal() else -1


def _newest(group: Group) -> int:
  """Version of the newest sampled token, trained or not."""
  versions = [
    int(s.policy_version.max(initial=NO_VERSION))
    for e in group.episodes
    for s in e.segments
    if s.trainable
  ]
  return max(versions, default=NO_VERSION)


def _check(group: Group, lease: Lease, draw: Draw, size: int) -> None:
  """Raises ValueError for a group that isn't one of a lease."""
  for name, found, right in (
    ("group_id", group.group_id, lease.group_id),
    ("task_id", group.task.task_id, draw.task_id),
  ):
    if found != right:
      raise ValueError(f"the group's {name} is {found!r:.100}, not {right!r}")
  indices = [e.rollout_index for e in group.episodes]
  if len(set(indices)) < len(indices) or not ({*indices} <= {*range(size)}):
    raise ValueError(
      f"the group's rollouts have indices {indices!r:.100}, not each one of 0"
      f" to {size - 1}"
    )
  if len(group.episodes) < 2:
    raise ValueError(f"the group has {len(group.episodes)} rollouts, not >= 2")
  if not np.isfinite(group.rewards).all():
    raise ValueError("the group has a reward that isn't finite")
