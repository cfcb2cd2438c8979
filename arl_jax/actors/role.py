"""The process that rolls out groups for a learner. Imports no jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from absl import logging

from arl_jax.actors.config import ActorConfig
from arl_jax.actors.environment_pool import EnvironmentPool, WorkerDied
from arl_jax.actors.environments import (
  Environments,
  LocalEnvironments,
  TimedEnvironment,
)
from arl_jax.actors.replicas import GroupClient, NoReplica, Replicas
from arl_jax.agents.harness import derive_seed, run_episode
from arl_jax.cluster.heartbeat import Heartbeat
from arl_jax.problems.problem import Problem, make_problem
from arl_jax.queueing.group_queue import Lease
from arl_jax.queueing.task_source import of_epoch
from arl_jax.queueing.transport import actor_queue
from arl_jax.serving.config import read_token
from arl_jax.types import Episode, Group, Sample, Task

# Tries of an episode whose infrastructure failed, before it is left out.
_TRIES = 2
# Seconds between two looks whether to stop.
_STOP_POLL = 0.1
# Seconds that finished groups, and leases to give back, get at a stop.
_LAST_SECONDS = 3.0
# Tasks of one request, at most.
_MOST_LEASES = 1024
# Files that an actor has open beside its connections.
_OTHER_FILES = 256


class Queue(Protocol):
  """What an actor asks of the group queue (see `ActorQueue`)."""

  async def lease(self, most: int) -> list[Lease]: ...

  async def renew(self, leases: Sequence[Lease]) -> list[Lease]: ...

  async def give_back(self, leases: Sequence[Lease]) -> None: ...

  async def deliver(self, lease: Lease, group: Group | None) -> str: ...


class LifeSigns(Protocol):
  """What an actor tells of itself (see `Heartbeat`)."""

  def progress(self) -> None: ...

  def count(self, name: str, amount: float = 1.0) -> None: ...


def run(
  config: ActorConfig, index: int, should_stop: Callable[[], bool]
) -> None:
  """Rolls out groups until it is told to stop.

  Args:
    config: of the run.
    index: of this actor, from 0.
    should_stop: asked several times a second.

  Raises:
    ValueError: something in the configuration can't be.
    TimeoutError: the queue, or all servers, stayed away.
    RuntimeError: environment workers can't be started.
    ConnectionError: the queue refuses signs of life.
  """
  allow_files(config.cluster.episodes + _OTHER_FILES)
  with Heartbeat(config.cluster, "actor", index) as signs:
    problem = make_problem(config)
    asyncio.run(_serve(config, index, problem, signs, should_stop))


async def _serve(
  config: ActorConfig,
  index: int,
  problem: Problem,
  signs: LifeSigns,
  should_stop: Callable[[], bool],
) -> None:
  cluster = config.cluster
  async with contextlib.AsyncExitStack() as stack:
    replicas = await stack.enter_async_context(
      Replicas(
        cluster.replica_urls,
        token=read_token(cluster.token_file),
        requests=cluster.episodes,
        patience=cluster.patience,
      )
    )
    queue: Queue = await stack.enter_async_context(actor_queue(cluster, index))
    environments: Environments
    if cluster.environment_workers:
      pool = EnvironmentPool(config, digests=problem.digests())
      environments, background = pool, [pool.run]
    else:
      environments, background = (
        LocalEnvironments(problem, call_seconds=cluster.call_seconds),
        [],
      )
    actor = Actor(config, problem, queue, replicas, environments, signs)
    await actor.run(should_stop, background)


class _Running:
  """A group that is rolled out, or waits to be taken.

  Attributes:
    undone: episodes that aren't done.
    work: that does it.
  """

  work: asyncio.Task[None]

  def __init__(self, lease: Lease, task: Task):
    self.lease, self.task = lease, task
    self.undone = lease.group_size


class Actor:
  """Leases tasks, rolls each out as a group, and delivers what came of it."""

  def __init__(
    self,
    config: ActorConfig,
    problem: Problem,
    queue: Queue,
    replicas: Replicas,
    environments: Environments,
    signs: LifeSigns,
  ):
    """Does nothing before `run`."""
    self._config, self._cluster = config, config.cluster
    self._renderer = problem.renderer
    self._tasks = {task.task_id: task for task in problem.train}
    self._queue, self._replicas = queue, replicas
    self._environments, self._signs = environments, signs
    self._slots = asyncio.Semaphore(self._cluster.episodes)
    self._running: set[_Running] = set()
    # Leases that end with this process, unless it gives them back.
    self._held: set[Lease] = set()
    self._room = asyncio.Event()

  async def run(
    self,
    should_stop: Callable[[], bool],
    background: Sequence[Callable[[], Any]] = (),
  ) -> None:
    """Works until `should_stop`; then leases are given back.

    Args:
      should_stop: asked several times a second.
      background: coroutine functions that must run meanwhile.

    Raises:
      Exception: what ended it otherwise.
    """
    try:
      async with asyncio.TaskGroup() as work:
        others = [work.create_task(serve()) for serve in background]
        others.append(work.create_task(self._renew()))
        leasing = work.create_task(self._lease(work))
        while not should_stop():
          await asyncio.sleep(_STOP_POLL)
        leasing.cancel()
        await self._end_groups()
        for task in others:
          task.cancel()
    except BaseExceptionGroup as group:
      raise _first(group) from group
    finally:
      await self._give_back()

  async def _end_groups(self) -> None:
    """Ends all groups; those that are done may still be taken."""
    for running in self._running:
      if running.undone:
        running.work.cancel()
    if groups := [running.work for running in self._running]:
      await asyncio.wait(groups, timeout=_LAST_SECONDS)
    for group in groups:
      group.cancel()

  async def _give_back(self) -> None:
    if not self._held:
      return
    try:
      async with asyncio.timeout(_LAST_SECONDS):
        await self._queue.give_back(list(self._held))
    except Exception as error:
      logging.warning("leases can't be given back and will expire: %r", error)

  # Leases.

  async def _lease(self, work: asyncio.TaskGroup) -> None:
    """Keeps as many groups going as there is room for."""
    size = 0
    while True:
      self._room.clear()
      undone = sum(running.undone for running in self._running)
      # The first answer tells how large groups are; one alone may be larger
      # than the room.
      most = (self._cluster.episodes - undone) // size if size else 1
      if not undone:
        most = max(most, 1)
      if most < 1:
        await self._room.wait()
        continue
      for lease in await self._queue.lease(min(most, _MOST_LEASES)):
        size = lease.group_size
        # A queue that was started anew doesn't know who is at work.
        if lease not in self._held:
          self._begin(lease, work)
          # One group after the other gets going: thousands of connections at
          # once would time out.
          await asyncio.sleep(0)
      # Having nothing to do is no stall.
      self._signs.progress()

  def _begin(self, lease: Lease, work: asyncio.TaskGroup) -> None:
    if (task := self._tasks.get(lease.task_id)) is None:
      raise ValueError(
        f"the queue hands out task {lease.task_id!r}, which the problem of this"
        " actor doesn't have; all processes of a run need the same problem"
      )
    running = _Running(lease, of_epoch(task, lease.epoch))
    self._held.add(lease)
    self._running.add(running)
    running.work = work.create_task(self._roll_out(running))
    running.work.add_done_callback(lambda _: self._forget(running))

  def _forget(self, running: _Running) -> None:
    self._running.discard(running)
    self._room.set()

  async def _renew(self) -> None:
    """Keeps leases, gives up those that were lost, and counts idle time."""
    looked, resent = time.monotonic(), 0
    while True:
      await asyncio.sleep(self._cluster.beat_seconds)
      now = time.monotonic()
      if not self._running:
        self._signs.count("idle_seconds", now - looked)
      looked = now
      self._signs.count("resent_requests", self._replicas.resent - resent)
      resent = self._replicas.resent
      if self._held:
        self._lose(await self._queue.renew(list(self._held)))

  def _lose(self, leases: Sequence[Lease]) -> None:
    self._held.difference_update(leases)
    for running in self._running:
      # A group that is done may be wanted nevertheless: the queue says.
      if running.lease in leases and running.undone:
        logging.warning("the lease of %s was lost", running.lease.group_id)
        running.work.cancel()

  # Groups.

  async def _roll_out(self, running: _Running) -> None:
    """Rolls out a group and delivers it."""
    lease, task = running.lease, running.task
    client = self._replicas.of_group(lease, self._count_sample)
    async with asyncio.TaskGroup() as group:
      work = [
        group.create_task(self._episode(running, i, client))
        for i in range(lease.group_size)
      ]
    episodes = tuple(e for t in work if (e := t.result()) is not None)
    made = Group(group_id=lease.group_id, task=task, episodes=episodes)
    await self._deliver(lease, made if len(episodes) >= 2 else None)
    self._held.discard(lease)

  async def _deliver(self, lease: Lease, group: Group | None) -> None:
    try:
      fate = await self._queue.deliver(lease, group)
    except ValueError:
      if group is None:
        raise
      logging.exception("group %s can't be delivered", lease.group_id)
      self._signs.count("infrastructure_failures")
      fate = await self._queue.deliver(lease, None)
    if fate != "ready":
      logging.info("group %s is dropped: %s", lease.group_id, fate)
    self._signs.count("groups")
    self._signs.progress()

  async def _episode(
    self, running: _Running, index: int, client: GroupClient
  ) -> Episode | None:
    """A scored episode; None if its infrastructure failed each time."""
    # Whoever ended a worker took others along; alone, it is itself to blame.
    alone = False
    async with self._slots:
      try:
        for tried in range(1, _TRIES + 1):
          if tried > 1:
            self._signs.count("retries")
          try:
            return await self._attempt(
              running.lease, running.task, index, client, alone=alone
            )
          except NoReplica:
            raise
          except Exception as error:
            alone = isinstance(error, WorkerDied)
            self._signs.count("infrastructure_failures")
            logging.warning(
              "episode %s/%d failed (try %d of %d): %r",
              *(running.lease.group_id, index, tried, _TRIES, error),
            )
        return None
      finally:
        running.undone -= 1
        self._room.set()

  async def _attempt(
    self,
    lease: Lease,
    task: Task,
    index: int,
    client: GroupClient,
    *,
    alone: bool,
  ) -> Episode:
    seed = derive_seed(self._config.seed, task.task_id, index, lease.version)
    began = time.monotonic()
    opened = self._environments.open(task, seed, alone=alone)
    async with opened as environment:
      episode = await run_episode(
        task,
        TimedEnvironment(
          environment,
          call_seconds=self._cluster.call_seconds,
          count=self._signs.count,
        ),
        client,
        self._renderer,
        self._config.agent,
        rollout_index=index,
        seed=seed,
        training=True,
      )
    rolled_out = time.monotonic()
    reward = await self._environments.score(task, episode)
    self._signs.count("reward_seconds", time.monotonic() - rolled_out)
    self._signs.count("episode_seconds", rolled_out - began)
    self._signs.count("episodes")
    return dataclasses.replace(episode, reward=reward)

  def _count_sample(self, sample: Sample) -> None:
    self._signs.count("turns")
    self._signs.count("sampled_tokens", len(sample.ids))
    self._signs.progress()


def allow_files(count: int) -> None:
  """Lets this process open `count` files: each connection is one.

  Raises:
    ValueError: the system's limit is lower.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY or soft >= count:
    return
  if hard != resource.RLIM_INFINITY and hard < count:
    raise ValueError(
      f"cluster.episodes needs {count} open files; the limit (ulimit -Hn) is"
      f" {hard}: raise it, or run more actors with fewer episodes each"
    )
  resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
  error = group.exceptions[0]
  return _first(error) if isinstance(error, BaseExceptionGroup) else error
