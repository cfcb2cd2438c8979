"""An actor at work, with the queue's core and servers that script a policy."""

import asyncio
import contextlib
import time
from collections import Counter

from arl_jax.actors.config import ActorConfig
from arl_jax.actors.environment_pool import EnvironmentPool
from arl_jax.actors.environments import LocalEnvironments
from arl_jax.actors.replicas import Replicas
from arl_jax.actors.role import Actor
from arl_jax.agents.harness import AgentConfig
from arl_jax.cluster.config import ClusterConfig
from arl_jax.problems.search_config import CorpusConfig
from arl_jax.queueing.group_queue import GroupQueue, Start
from arl_jax.queueing.task_source import Source
from arl_jax.types import ToolCall
from tests.actors import echo_problem

SIZE = 4


def make_config(**cluster) -> ActorConfig:
  cluster = {"episodes": 8, "beat_seconds": 0.1, "patience": 20.0, **cluster}
  cluster = {"lost_seconds": 2.0, "call_seconds": 10.0, **cluster}
  return ActorConfig(
    seed=7,
    problem="tests.actors.echo_problem:Problem",
    corpus=CorpusConfig(path="p"),
    agent=AgentConfig(token_budget=320),
    cluster=ClusterConfig(**cluster),
  )


PROBLEM = echo_problem.Problem(make_config())
RENDERER = PROBLEM.renderer


def reply(*calls: str):
  """A policy that makes these calls, one a turn, and ends with "fox"."""

  def answer(ids, seed):
    del seed
    turn = ids.count(RENDERER.open_turn()[0]) - 1
    if turn < len(calls):
      call = ToolCall(name="run", argument=calls[turn])
      return [*RENDERER.call(call), RENDERER.end]
    return [*RENDERER.text("fox"), RENDERER.end]

  return answer


def make_start(**changes) -> Start:
  ids = tuple(t.task_id for t in PROBLEM.train)
  fields = {
    "lineage": "a",
    "version": 0,
    "seed": 1,
    "epochs": 1,
    "group_size": SIZE,
    "groups_per_step": 4,
    "max_staleness": 2,
    "tries": 2,
    "skip_below": float("-inf"),
    "skip_above": float("inf"),
    "sources": (Source(name="train", weight=1.0, task_ids=ids),),
  }
  return Start(**{**fields, **changes})


class CoreQueue:
  """The queue itself as an actor sees it, without HTTP; may be away.

  Attributes:
    fates: of what was delivered.
    lost: leases that are lost at the next renewal.
  """

  def __init__(self, **start):
    self.core = GroupQueue(lease_seconds=2.0)
    self.core.begin(make_start(**start))
    self.there = asyncio.Event()
    self.there.set()
    self.fates: list[str] = []
    self.delivered: list = []
    self.lost: list = []
    self.given_back: list = []
    self.leased: list = []
    self.asked: list[int] = []

  async def lease(self, most):
    await self.there.wait()
    self.asked.append(most)
    found = self.core.lease("me", most)
    self.leased += found
    if not found:
      await asyncio.sleep(0.05)
    return found

  async def renew(self, leases):
    await self.there.wait()
    lost, self.lost = self.lost, []
    return [*self.core.renew("me", leases), *lost]

  async def give_back(self, leases):
    self.given_back += leases
    self.core.give_back("me", leases)

  async def deliver(self, lease, group):
    await self.there.wait()
    self.delivered.append(group)
    self.fates.append(self.core.deliver("me", lease, group))
    return self.fates[-1]


class Signs:
  def __init__(self):
    self.counts: Counter[str] = Counter()
    self.progressed = 0

  def progress(self):
    self.progressed += 1

  def count(self, name, amount=1.0):
    self.counts[name] += amount


async def until(condition, seconds: float = 20.0) -> None:
  limit = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < limit, f"not so within {seconds} s"
    await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def acting(queue, *servers, problem=PROBLEM, config=None, **options):
  """An actor at work; leaving stops it, and raises what ended it."""
  config = config or make_config()
  stop = asyncio.Event()
  signs = Signs()
  options = {"patience": config.cluster.patience, **options}
  async with Replicas([s.url for s in servers], **options) as replicas:
    background = []
    if config.cluster.environment_workers:
      environments = EnvironmentPool(config, digests=problem.digests())
      background = [environments.run]
    else:
      environments = LocalEnvironments(problem, call_seconds=10)
    actor = Actor(config, problem, queue, replicas, environments, signs)
    running = asyncio.create_task(actor.run(stop.is_set, background))
    try:
      yield signs
    finally:
      stop.set()
      began = time.monotonic()
      await running
      assert time.monotonic() - began < 8
