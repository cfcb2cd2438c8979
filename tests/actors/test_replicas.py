"""Groups stay with a replica, and go on at another."""

import asyncio
import contextlib
from collections import Counter

import pytest

from arl_jax.actors.environments import LocalEnvironments
from arl_jax.actors.replicas import NoReplica, Replicas
from arl_jax.actors.role import Actor
from arl_jax.agents.harness import derive_seed
from tests.actors.acting import (
  PROBLEM,
  SIZE,
  CoreQueue,
  Signs,
  acting,
  make_config,
  reply,
  until,
)
from tests.actors.policy_server import PolicyServer


def test_a_group_stays_with_one_replica():
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


def test_episodes_go_on_at_another_when_one_dies_amid_them():
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


def test_other_weights_are_waited_for():
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


def test_none_within_patience_ends_the_actor():
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


def test_an_older_version_is_not_taken():
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


def test_there_must_be_one():
  with pytest.raises(ValueError, match=r"cluster.replicas is empty"):
    Replicas(())
