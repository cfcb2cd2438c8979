"""Leases become groups, whatever dies meanwhile."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter

import pytest

from arl_jax.actors import role as actor_role
from arl_jax.actors.environments import LocalEnvironments
from arl_jax.actors.replicas import Replicas
from arl_jax.actors.role import Actor
from arl_jax.agents.harness import AgentConfig, derive_seed, run_episode
from arl_jax.queueing.client import LearnerQueue
from arl_jax.queueing.service import QueueService
from arl_jax.serving.client import RemoteClient
from arl_jax.types import StopReason
from tests.actors import echo_problem
from tests.actors.acting import (
  PROBLEM,
  RENDERER,
  SIZE,
  CoreQueue,
  Signs,
  acting,
  make_config,
  make_start,
  reply,
  until,
)
from tests.actors.policy_server import PolicyServer
from tests.actors.processes import gone, wait_until


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
