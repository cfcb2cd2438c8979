"""Groups that actors roll out elsewhere, from the run's group queue."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arl_jax.actors.jobs import Interrupted
from arl_jax.cluster.heartbeat import Heartbeat
from arl_jax.problems.problem import Problem
from arl_jax.queueing.client import LearnerQueue
from arl_jax.queueing.group_queue import Batch, NotBegun, Start
from arl_jax.queueing.ray_client import RayLearnerQueue
from arl_jax.runtime.config import Config
from arl_jax.runtime.group_source import (
  GroupSource,
  groups_per_step,
  say_ended,
  sources,
)
from arl_jax.types import Group

# Between two looks whether the run was asked to stop.
_LOOK_SECONDS = 2.0
# Counters of roles that are written as they grow, a second.
_RATES = {
  "sampled_tokens": "tokens_per_second",
  "prefilled_tokens": "prefilled_per_second",
}
# Seconds that are written as a share of the time.
_SHARES = {"idle_seconds": "idle"}
# Those written as mean a call.
_MEANS = {
  "tool_seconds": "tool_calls",
  "reward_seconds": "episodes",
  "episode_seconds": "episodes",
}


class QueueGroups(GroupSource):
  """Has actors roll out.

  The learner knows at any time what the queue must know, so a queue that died
  begins again from it: what was open at the last step's groups.
  """

  def __init__(
    self,
    config: Config,
    problem: Problem,
    queue: LearnerQueue | RayLearnerQueue,
    heartbeat: Heartbeat,
    should_stop: Callable[[], bool],
  ):
    """Args: heartbeat: of the learner, who gets on while it waits."""
    self._config, self._queue = config, queue
    self._heartbeat, self._should_stop = heartbeat, should_stop
    self._sources = sources(config, problem.train)
    self._wanted = groups_per_step(config, self._sources)
    self._lineage = ""
    self._ledger: Mapping[str, Any] | None = None
    self._counters: dict[tuple[str, str], float] = {}

  def begin(
    self,
    lineage: str,
    version: int,
    ledger: Mapping[str, Any] | None,
    groups: Sequence[Group],
  ) -> None:
    """See `GroupSource`. Raises TimeoutError if the queue isn't there."""
    self._lineage, self._ledger = lineage, ledger
    self._begin(version, groups)

  def _begin(self, version: int, groups: Sequence[Group]) -> None:
    rl = self._config.rl
    self._queue.begin(
      Start(
        lineage=self._lineage,
        version=version,
        seed=self._config.seed,
        epochs=rl.epochs,
        group_size=rl.group_size,
        groups_per_step=self._wanted,
        max_staleness=rl.max_staleness,
        tries=rl.tries,
        skip_below=rl.skip_below,
        skip_above=rl.skip_above,
        sources=self._sources,
        ledger=self._ledger,
        groups=tuple(groups),
      )
    )

  def take(self, step: int, version: int) -> Batch:
    """See `GroupSource`; episodes may take as long as they get on."""
    patience = self._config.cluster.patience
    limit, done = time.monotonic() + patience, -1.0
    while True:
      if self._should_stop():
        raise Interrupted
      try:
        batch = self._queue.take(step, version, timeout=_LOOK_SECONDS)
      except NotBegun:
        self._begin(version, ())
        continue
      self._heartbeat.progress()
      if batch is not None:
        self._ledger = batch.ledger
        if batch.ended and step < self._config.rl.steps:
          say_ended(self._config, step, batch.drops)
        return batch
      now = time.monotonic()
      if (more := self._done()) != done:
        limit, done = now + patience, more
      if now > limit:
        raise TimeoutError(
          f"waited {patience:.0f} s for {self._wanted} groups of step {step},"
          " and no actor took a turn or ended an episode; the queue says"
          f" {self._queue.status()}"
        )

  def _done(self) -> float:
    """Grows while actors get on with what this learner waits for."""
    try:
      roles = self._queue.roles()
    except TimeoutError:
      return -1.0
    return sum(
      role["counters"].get(name, 0.0)
      for role in roles
      for name in ("turns", "episodes")
      if role["role"] == "actor"
    )

  def waiting(self, ledger: Mapping[str, Any]) -> tuple[Group, ...]:
    opened = {f"{number}/{task}" for number, task, *_ in ledger["open"]}
    try:
      groups = self._queue.waiting()
    except (NotBegun, TimeoutError):
      # They are rolled out again; a commit doesn't wait for a queue.
      return ()
    return tuple(g for g in groups if g.group_id in opened)

  def metrics(self) -> dict[str, float]:
    """Of queue and roles; nothing while the queue can't be asked."""
    try:
      status, roles = self._queue.status(), self._queue.roles()
    except TimeoutError:
      return {}
    values = {
      f"queue_{name}": float(status[name])
      for name in ("ready", "leased", "open")
      if name in status
    }
    grown = self._grown(roles)
    count = Counter(role["role"] for role in roles)
    for (role, name), amount in grown.items():
      # Of all processes of the role together, between their last signs of life.
      seconds = grown.get((role, "seconds"), 0.0)
      if name in _RATES and seconds:
        values[f"{_RATES[name]}_{role}"] = amount / seconds * count[role]
      if name in _SHARES and seconds:
        values[f"{_SHARES[name]}_{role}"] = min(amount / seconds, 1.0)
      if name in _MEANS:
        calls = grown.get((role, _MEANS[name]), 0.0)
        values[name] = amount / calls if calls else 0.0
      if name in ("retries", "infrastructure_failures"):
        values[name] = values.get(name, 0.0) + amount
    proposed = grown.get(("server", "drafted_tokens"), 0.0)
    if proposed:
      accepted = grown.get(("server", "accepted_tokens"), 0.0)
      values["draft_acceptance"] = accepted / proposed
    return values

  def _grown(self, roles: Sequence[Any]) -> dict[tuple[str, str], float]:
    """By how much each role's counters grew; a new process begins at 0."""
    grown: dict[tuple[str, str], float] = defaultdict(float)
    counters = {}
    for role in roles:
      who = f"{role['role']}-{role['index']}-{role['pid']}"
      for name, value in role["counters"].items():
        before = self._counters.get((who, name), 0.0)
        grown[role["role"], name] += max(value - before, 0.0)
        counters[who, name] = value
    self._counters = counters
    return grown
