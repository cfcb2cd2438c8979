"""Leases become groups, whatever dies meanwhile."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest

from arl_jax.actors import role as actor_role
from arl_jax.actors.config import ActorConfig
from arl_jax.actors.environment_pool import EnvironmentPool
from arl_jax.actors.environments import LocalEnvironments
from arl_jax.actors.replicas import NoReplica, Replicas
from arl_jax.actors.role import Actor
from arl_jax.agents.harness import AgentConfig, derive_seed, run_episode
from arl_jax.cluster.config import ClusterConfig
from arl_jax.problems.search_config import CorpusConfig
from arl_jax.queueing.client import LearnerQueue
from arl_jax.queueing.group_queue import GroupQueue, Start
from arl_jax.queueing.service import QueueService
from arl_jax.queueing.task_source import Source
from arl_jax.serving.client import RemoteClient
from arl_jax.types import StopReason, ToolCall
from tests.actors import echo_problem
from tests.actors.policy_server import PolicyServer
from tests.actors.processes import gone, wait_until

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


def test_groups_are_what_a_run_in_one_process_makes():
  async def work():
    queue = CoreQueue()
    async with PolicyServer(reply("look")).serving() as server:
      async with acting(queue, server) as signs:
        await until(lambda: len(queue.fates) == 12)
      assert not server.open
      assert server.most <= 8
    assert queue.fates == ["ready"] * 12
    batch = queue.core.take(1, 0)
    assert [g.task.task_id for g in batch.groups] == [
      lease.task_id for lease in queue.leased[:4]
    ]
    tokens = 0
    epochs = {lease.task_id: lease.epoch for lease in queue.leased}
    for group in queue.delivered:
      assert group.task.provenance["epoch"] == epochs[group.task.task_id]
      assert [e.rollout_index for e in group.episodes] == [*range(SIZE)]
      for i, e in enumerate(group.episodes):
        assert e.seed == derive_seed(7, group.task.task_id, i, 0)
        assert e.stop_reason is StopReason.ANSWERED
        # The reward of task t3 is 3; a call and an answer are two turns.
        assert e.reward.total == float(group.task.task_id[1:])
        assert e.reward.parts == {"turns": 2.0}
        tokens += e.trained_tokens
    counts = signs.counts
    assert counts["groups"] == 12
    assert counts["episodes"] == counts["tool_calls"] == 48
    assert counts["turns"] == 96
    assert counts["sampled_tokens"] == tokens > 0
    assert counts["retries"] == counts["infrastructure_failures"] == 0
    assert counts["episode_seconds"] > counts["tool_seconds"] > 0
    assert counts["reward_seconds"] > 0
    # The first lease tells that two groups of four fit into eight episodes.
    assert queue.asked[:2] == [1, 1]
    assert max(queue.asked) <= 2
    return server.asked

  asked = asyncio.run(work())
  # A request per turn, with the seed that the harness derives from the job's.
  assert sorted(body["seed"] for body in asked) == sorted(
    derive_seed(derive_seed(7, t.task_id, i, 0), turn)
    for t in PROBLEM.train
    for i in range(SIZE)
    for turn in range(2)
  )
  assert {(b["lineage"], b["min_version"]) for b in asked} == {("a", 0)}


class Flaky(echo_problem.Problem):
  """Environments that fail as often as `failures` says, by task."""

  def __init__(self, failures):
    super().__init__(make_config())
    self.failures = Counter(failures)

  def environment(self, task, seed):
    if self.failures[task.task_id] > 0:
      self.failures[task.task_id] -= 1
      raise ConnectionError("no sandbox")
    return super().environment(task, seed)


def test_infrastructure_is_tried_again_then_left_out_and_never_scored():
  # One episode of t0 once; one of t1 twice; of t2 all but one, of t3 all:
  # each fails twice in a row, for as long as failures are left.
  problem = Flaky({"t0": 1})

  class Bad(echo_problem.Environment):
    def __init__(self, seed, bad):
      super().__init__(seed)
      self._bad = bad

    async def start(self, task):
      if self._bad:
        raise ConnectionError("sandbox died")
      return await super().start(task)

  bad = {
    derive_seed(7, task, i, 0)
    for task, n in (("t1", 1), ("t2", 3), ("t3", 4))
    for i in range(n)
  }
  make = problem.environment
  problem.environment = lambda task, seed: (
    Bad(seed, True) if seed in bad else make(task, seed)
  )

  async def work():
    queue = CoreQueue(tries=1)
    server = PolicyServer(reply())
    async with (
      server.serving(),
      acting(queue, server, problem=problem) as signs,
    ):
      await until(lambda: len(queue.fates) == 12)
    made = {g.task.task_id: g for g in queue.delivered if g is not None}
    assert len(made) == 10
    assert not {"t2", "t3"} & set(made)
    assert [e.rollout_index for e in made["t1"].episodes] == [1, 2, 3]
    assert len(made["t0"].episodes) == 4
    assert queue.fates.count("infrastructure") == 2
    # A retry each for t0's and the eight that fail again.
    assert signs.counts["retries"] == 9
    assert signs.counts["infrastructure_failures"] == 1 + 2 * 8
    assert queue.core.status()["drops"] == {
      "infrastructure": 2,
      "task_given_up": 2,
      "episode_infrastructure": 1,
    }

  asyncio.run(work())


def test_stopping_gives_everything_back_at_once():
  async def work():
    queue = CoreQueue()
    async with PolicyServer(reply()).serving() as server:
      server.gate.clear()
      async with acting(queue, server):
        await until(lambda: server.running == 8)
      await until(lambda: not server.open)
    assert queue.fates == []
    assert set(queue.given_back) == set(queue.leased)
    assert len(queue.leased) == 2
    assert queue.core.status()["leased"] == 0

  asyncio.run(work())


def test_a_lost_lease_ends_its_episodes_and_their_sessions():
  async def work():
    queue = CoreQueue()
    async with PolicyServer(reply()).serving() as server:
      server.gate.clear()
      async with acting(queue, server):
        await until(lambda: len(server.open) == 8)
        first, kept = queue.leased
        ours = set(server.open)
        queue.lost = [first]
        # Its place is taken by the next one.
        await until(lambda: len(queue.leased) == 3)
        await until(lambda: len(ours & server.open) == SIZE)
        await until(lambda: server.running == 8)
        server.gate.set()
        await until(lambda: len(queue.fates) == 11)
    tasks = [g.task.task_id for g in queue.delivered]
    assert kept.task_id in tasks
    assert first.task_id not in tasks
    assert first not in queue.given_back

  asyncio.run(work())


def test_groups_wait_for_a_queue_that_is_away():
  async def work():
    queue = CoreQueue()
    async with PolicyServer(reply()).serving() as server:
      server.gate.clear()
      async with acting(queue, server):
        await until(lambda: server.running == 8)
        queue.there.clear()
        server.gate.set()
        await until(lambda: not server.open)
        await asyncio.sleep(0.3)
        assert queue.fates == []
        queue.there.set()
        await until(lambda: len(queue.fates) == 12)
    assert queue.fates == ["ready"] * 12

  asyncio.run(work())


def test_a_queue_that_hands_out_the_same_again_gets_one_group():
  async def work():
    queue = CoreQueue()
    async with PolicyServer(reply()).serving() as server:
      server.gate.clear()
      async with acting(queue, server) as signs:
        await until(lambda: server.running == 8)
        # As if it was started anew: it has forgotten who is at work.
        queue.core.give_back("me", queue.leased)
        (held, _) = queue.leased
        queue.lost = [queue.leased[1]]
        await until(lambda: queue.leased.count(held) == 2)
        server.gate.set()
        await until(lambda: len(queue.fates) == 12)
    assert queue.fates == ["ready"] * 12
    assert signs.counts["groups"] == 12

  asyncio.run(work())


def test_what_fails_in_the_background_ends_the_actor():
  class Away(CoreQueue):
    async def renew(self, leases):
      raise TimeoutError("the group queue didn't renew leases in 600 s")

  class Refused(CoreQueue):
    async def deliver(self, lease, group):
      raise ValueError("no such lease")

  class Elsewhere(CoreQueue):
    async def lease(self, most):
      found = await super().lease(most)
      return [dataclasses.replace(x, task_id="else") for x in found]

  async def alone(queue, error, match):
    """An actor that nobody stops."""
    async with (
      PolicyServer(reply()).serving() as server,
      Replicas([server.url]) as replicas,
    ):
      local = LocalEnvironments(PROBLEM, call_seconds=10)
      made = Actor(make_config(), PROBLEM, queue, replicas, local, Signs())
      with pytest.raises(error, match=match):
        await asyncio.wait_for(made.run(lambda: False), 20)

  for cls, error, match in (
    (Away, TimeoutError, "didn't renew leases"),
    (Refused, ValueError, "no such lease"),
    (Elsewhere, ValueError, "'else', which the problem of this actor"),
  ):
    asyncio.run(alone(cls(), error, match))


def test_a_group_that_can_t_be_sent_is_infrastructure():
  class Picky(CoreQueue):
    async def deliver(self, lease, group):
      if group is not None and group.task.task_id == "t5":
        raise ValueError("no JSON")
      return await super().deliver(lease, group)

  async def work():
    queue = Picky(tries=1)
    server = PolicyServer(reply())
    async with server.serving(), acting(queue, server):
      await until(lambda: len(queue.fates) == 12)
    assert sorted(queue.fates) == ["infrastructure"] + ["ready"] * 11

  asyncio.run(work())


def free_port() -> int:
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


class TestReplicas:
  def test_a_group_stays_with_one_replica(self):
    async def work():
      queue = CoreQueue()
      one, two = PolicyServer(reply("look")), PolicyServer(reply("look"))
      async with one.serving(), two.serving(), acting(queue, one, two):
        await until(lambda: len(queue.fates) == 12)
      return one, two

    one, two = asyncio.run(work())
    # Sessions begin with what all episodes of a group have alike.
    groups = [{b["session"].split("/")[0] for b in s.asked} for s in (one, two)]
    homes = Counter(derive_seed("replica", n) % 2 for n in range(12))
    assert [len(found) for found in groups] == [homes[0], homes[1]]
    assert min(homes.values()) > 0
    assert not groups[0] & groups[1]

  def test_episodes_go_on_at_another_when_one_dies_amid_them(self):
    async def work():
      queue = CoreQueue()
      one, two = PolicyServer(reply("look")), PolicyServer(reply("look"))
      one.gate.clear()
      two.gate.clear()
      async with two.serving(), contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(one.serving())
        async with acting(queue, one, two, leave_seconds=0.3) as signs:
          # Group 0 is at home at the first one, group 1 at the second.
          await until(lambda: one.running == two.running == SIZE)
          await stack.aclose()
          two.gate.set()
          await until(lambda: len(queue.fates) == 12)
          assert signs.counts["retries"] == 0
      return queue

    queue = asyncio.run(work())
    assert queue.fates == ["ready"] * 12
    for group in queue.delivered:
      assert len(group.episodes) == SIZE

  def test_other_weights_are_waited_for(self):
    async def work():
      queue = CoreQueue(version=3)
      server = PolicyServer(reply(), version=2)
      async with server.serving(), acting(queue, server, leave_seconds=0.2):
        await asyncio.sleep(1.0)
        assert not server.asked
        server.version = 3
        await until(lambda: len(queue.fates) == 12)
      for group in queue.delivered:
        assert {e.oldest_version for e in group.episodes} == {3}

    asyncio.run(work())

  def test_none_within_patience_ends_the_actor(self):
    async def work():
      server = PolicyServer(reply(), lineage="b")
      queue = CoreQueue()
      async with (
        server.serving(),
        Replicas([server.url], patience=0.5) as replicas,
      ):
        local = LocalEnvironments(PROBLEM, call_seconds=10)
        made = Actor(make_config(), PROBLEM, queue, replicas, local, Signs())
        with pytest.raises(NoReplica, match=r"version 0 .* lineage a in"):
          await asyncio.wait_for(made.run(lambda: False), 20)
      # What it held is handed out again.
      assert set(queue.given_back) == set(queue.leased)
      assert queue.core.status()["leased"] == 0

    asyncio.run(work())

  def test_an_older_version_is_not_taken(self):
    async def work():
      queue = CoreQueue(version=3, tries=1)
      server = PolicyServer(reply(), version=3)
      sample = server.reply

      def older(ids, seed):
        server.version = 2
        return sample(ids, seed)

      server.reply = older
      async with server.serving(), acting(queue, server, leave_seconds=0.1):
        await until(lambda: server.asked)
        await asyncio.sleep(0.2)
      assert not queue.delivered

    asyncio.run(work())

  def test_there_must_be_one(self):
    with pytest.raises(ValueError, match=r"cluster.replicas is empty"):
      Replicas(())


def test_environments_in_workers_that_are_killed():
  async def work():
    queue = CoreQueue()
    config = make_config(environment_workers=2, lost_seconds=10.0)
    server = PolicyServer(reply("pid", "sleep"))
    async with server.serving(), acting(queue, server, config=config) as signs:
      await until(lambda: signs.counts["tool_calls"] == 16)
      pids = {p for b in server.asked if (p := _pid(b["prompt"])) is not None}
      # The first groups may have come before the second worker.
      assert 1 <= len(pids) <= 2
      server.reply = reply("pid")
      for pid in pids:
        os.kill(pid, signal.SIGKILL)
      await until(lambda: len(queue.fates) == 12, seconds=40)
      assert signs.counts["retries"] == 8
    assert queue.fates == ["ready"] * 12
    assert all(len(g.episodes) == SIZE for g in queue.delivered)
    return pids

  for pid in asyncio.run(work()):
    assert gone(pid)


def _pid(ids) -> int | None:
  """What the tool "pid" said in a context."""
  words = RENDERER.tokenizer.decode(ids).split()
  numbers = [int(w) for w in words if w.isdigit()]
  return numbers[0] if numbers else None


@pytest.mark.slow
def test_a_role_process_from_lease_to_delivery(tmp_path):
  """The program against the real queue service; then it is killed."""
  port = free_port()

  async def work():
    server = PolicyServer(reply("look"))
    async with server.serving():
      config = make_config(
        queue=f"http://127.0.0.1:{port}",
        replicas=server.url,
        environment_workers=1,
        lost_seconds=1.0,
      )
      path = tmp_path / "config.json"
      path.write_text(json.dumps(dataclasses.asdict(config)))
      stop = asyncio.Event()
      service = QueueService(config.cluster)
      serving = asyncio.create_task(service.run("127.0.0.1", port, stop.is_set))
      learner = LearnerQueue(config.cluster)
      with learner:
        await _as_learner(learner, server, path)
      stop.set()
      await serving

  asyncio.run(work())


async def _as_learner(learner, server, path):
  command = [sys.executable, "-m", "launch.role", "--role=actor"]
  command += ["--index=3", f"--config_json={path}"]
  call = asyncio.to_thread
  # An actor may be there first.
  actor = subprocess.Popen(command)
  await call(learner.begin, make_start(epochs=0))
  batch = await call(learner.take, 1, 0, 40.0)
  assert batch is not None
  assert [len(g.episodes) for g in batch.groups] == [SIZE] * 4
  group = batch.groups[0]
  job = {"rollout_index": 2, "seed": derive_seed(7, group.task.task_id, 2, 0)}
  async with RemoteClient(server.url) as client:
    alone = await run_episode(
      group.task,
      echo_problem.Environment(job["seed"]),
      _Lineage(client),
      RENDERER,
      AgentConfig(token_budget=320),
      **job,
    )
  assert group.episodes[2].segments[0].ids.tolist() == (
    alone.segments[0].ids.tolist()
  )
  assert group.episodes[2].outcome == alone.outcome

  (role,) = [r for r in await call(learner.roles) if r["role"] == "actor"]
  assert (role["index"], role["pid"]) == (3, actor.pid)
  workers = _children(actor.pid)
  assert len(workers) == 1
  server.gate.clear()
  await until(lambda: server.running > 0)
  actor.kill()
  actor.wait()
  wait_until(lambda: all(gone(w) for w in workers))
  # Another one takes over what the first held.
  server.version = 1
  server.gate.set()
  actor = subprocess.Popen(command)
  batch = await call(learner.take, 2, 1, 40.0)
  assert batch is not None
  assert len(batch.groups) == 4
  workers = _children(actor.pid)
  actor.send_signal(signal.SIGTERM)
  assert await call(actor.wait, 15) == 0
  wait_until(lambda: all(gone(w) for w in workers))


class _Lineage:
  """A client of any group's, with what a lease would say."""

  def __init__(self, client):
    self._client = client

  async def sample(self, session, ids, **how):
    return await self._client.sample(
      session, ids, lineage="a", min_version=0, **how
    )

  async def close(self, session):
    await self._client.close(session)


def _children(pid: int) -> list[int]:
  found = []
  for thread in os.listdir(f"/proc/{pid}/task"):
    with open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file:
      found += [int(child) for child in file.read().split()]
  return found


def test_more_episodes_than_files_are_refused(monkeypatch):
  monkeypatch.setattr(
    actor_role.resource, "getrlimit", lambda which: (1024, 4096)
  )
  limits = []
  monkeypatch.setattr(
    actor_role.resource, "setrlimit", lambda which, both: limits.append(both)
  )
  actor_role.allow_files(512)
  assert limits == []
  actor_role.allow_files(2000)
  assert limits == [(2000, 4096)]
  with pytest.raises(ValueError, match=r"cluster.episodes needs 5000 .* 4096"):
    actor_role.allow_files(5000)
