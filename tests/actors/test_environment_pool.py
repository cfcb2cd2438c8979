"""Environments of other processes: the same answers, and every way to die."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from arl_jax.actors.config import ActorConfig
from arl_jax.actors.environment_pool import (
  CallFailed,
  EnvironmentPool,
  WorkerDied,
)
from arl_jax.actors.environments import LocalEnvironments, TimedEnvironment
from arl_jax.cluster.config import ClusterConfig
from arl_jax.problems.search_config import CorpusConfig
from arl_jax.types import (
  Block,
  Episode,
  Observation,
  Reward,
  Segment,
  StopReason,
  Task,
  ToolCall,
)
from tests.actors import echo_problem
from tests.actors.processes import gone, wait_until

TASK = Task(task_id="t", prompt="fox", truth={"reward": 0.1 + 0.2})


def config(path="p", **cluster) -> ActorConfig:
  cluster = {"environment_workers": 1, "patience": 30.0, **cluster}
  return ActorConfig(
    problem="tests.actors.echo_problem:Problem",
    corpus=CorpusConfig(path=path),
    cluster=ClusterConfig(**cluster),
  )


def with_pool(work, made=None, digests=None):
  made = made or config()

  async def main():
    pool = EnvironmentPool(made, digests=digests or {"corpus": "p"})
    running = asyncio.create_task(pool.run())
    try:
      return await asyncio.wait_for(work(pool), 60)
    finally:
      running.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await running

  return asyncio.run(main())


async def tell(environment, *what: str) -> list[Observation]:
  calls = [ToolCall(name="run", argument=w) for w in what]
  return await environment.execute(calls, 7)


async def pid_of(environment) -> int:
  (found,) = await tell(environment, "pid")
  return int(found.blocks[0].text)


def episode(**changes) -> Episode:
  length = 3
  segment = Segment(
    ids=np.arange(length, dtype=np.int32),
    roles=np.ones(length, np.uint8),
    sampled=np.ones(length, np.bool_),
    behaviour_logp=np.zeros(length, np.float32),
    policy_version=np.zeros(length, np.int32),
    experts=np.zeros((length, 2, 2), np.int32),
  )
  made = Episode(
    task_id="t",
    rollout_index=0,
    segments=(segment,),
    events=(),
    stop_reason=StopReason.ANSWERED,
    outcome={},
    turns=4,
  )
  return dataclasses.replace(made, **changes)


async def play(environments) -> list:
  async with environments.open(TASK, 5) as environment:
    found = [await environment.start(TASK), environment.tool_names]
    found += await tell(environment, "look", "bad", "print")
    found += [await environment.finish(m) for m in ("a fox", "a cat")]
    found.append(await environment.outcome())
  return [*found, await environments.score(TASK, episode())]


def test_answers_are_those_of_an_environment_in_this_process():
  made = config(environment_workers=2)
  problem = echo_problem.Problem(made)
  local = LocalEnvironments(problem, call_seconds=9)
  near = asyncio.run(play(local))
  assert near == [
    "fox",
    ("run", "look"),
    *(
      Observation(
        blocks=(Block(text=text, key="k"), Block(text="dog")),
        remove=("old",),
        error="bad" if text == "bad" else None,
        data={"budget": 7, "seed": 5},
      )
      for text in ("look", "bad", "print")
    ),
    *(None, "no fox"),
    {"done": ["look", "bad", "print"]},
    Reward(total=0.1 + 0.2, parts={"turns": 4.0}),
  ]

  async def work(pool):
    # Environments that are open at a time are spread over the workers.
    async with contextlib.AsyncExitStack() as stack:
      held = [
        await stack.enter_async_context(pool.open(TASK, i)) for i in range(4)
      ]
      with pytest.raises(RuntimeError, match="before start"):
        _ = held[0].tool_names
      for environment in held:
        await environment.start(TASK)
      pids = [await pid_of(e) for e in held]
    assert os.getpid() not in pids
    far = await asyncio.gather(*(play(pool) for _ in range(50)))
    return far, pids

  far, pids = with_pool(work, made)
  assert all(f == near for f in far)
  # The second worker may be ready later than the first four are open.
  assert 1 <= len(set(pids)) <= 2
  for pid in pids:
    wait_until(lambda pid=pid: gone(pid))


def test_failures_stay_with_who_caused_them():
  async def work(pool):
    async with pool.open(TASK, 0) as environment, pool.open(TASK, 0) as other:
      for e in (environment, other):
        await e.start(TASK)
      pid = await pid_of(environment)
      for what, error in (
        ("raise", "ConnectionError: sandbox died"),
        ("nan", "ValueError: a message isn't of JSON values"),
        ("huge", "ValueError: a message has"),
      ):
        with pytest.raises(CallFailed, match=error):
          await tell(environment, what)
      for wanted, error in (("raise", "judge"), ("nan", "must be finite")):
        task = dataclasses.replace(TASK, truth={"reward": wanted})
        with pytest.raises(CallFailed, match=error):
          await pool.score(task, episode())
      counted = []
      timed = TimedEnvironment(
        environment,
        call_seconds=0.3,
        count=lambda name, n: counted.append((name, n)),
      )
      with pytest.raises(TimeoutError, match=r"execute of .* than 0.3 s"):
        await tell(timed, "sleep", "look")
      assert counted[0] == ("tool_calls", 2)
      assert counted[1][0] == "tool_seconds"
      assert 0.3 <= counted[1][1] < 5
      # None of it has touched the process.
      assert await pid_of(environment) == await pid_of(other) == pid
      assert pool.replaced == 0

  with_pool(work)


def test_a_killed_worker_fails_its_episodes_and_is_replaced():
  async def work(pool):
    async with pool.open(TASK, 0) as environment:
      await environment.start(TASK)
      pid = await pid_of(environment)
      (seen,) = await tell(environment, "child")
      child = int(seen.blocks[0].text)
      waiting = asyncio.create_task(tell(environment, "sleep"))
      scoring = asyncio.create_task(
        pool.score(
          dataclasses.replace(TASK, truth={"reward": "hang"}), episode()
        )
      )
      await asyncio.sleep(0.2)
      os.kill(pid, signal.SIGKILL)
      with pytest.raises(WorkerDied):
        await waiting
      # Its own worker is still being made.
      scoring.cancel()
      with pytest.raises(WorkerDied):
        await environment.outcome()
    async with pool.open(TASK, 0) as environment:
      assert await environment.start(TASK) == "fox"
      assert await pid_of(environment) != pid
    assert pool.replaced == 1
    return child

  child = with_pool(work)
  wait_until(lambda: gone(child))


def test_alone_nothing_takes_others_along():
  async def work(pool):
    async with pool.open(TASK, 0) as environment:
      await environment.start(TASK)
      pid = await pid_of(environment)
      async with pool.open(TASK, 0, alone=True) as other:
        await other.start(TASK)
        own = await pid_of(other)
        assert own != pid
        with pytest.raises(WorkerDied):
          await tell(other, "die")
      async with pool.open(TASK, 0, alone=True) as other:
        await other.start(TASK)
        last = await pid_of(other)
      assert gone(last)
      assert await pid_of(environment) == pid
    assert pool.replaced == 0

  with_pool(work)


def test_a_reward_is_tried_again_where_nobody_disturbs_it():
  async def work(pool):
    async with pool.open(TASK, 0) as environment:
      await environment.start(TASK)
      scoring = asyncio.create_task(pool.score(TASK, episode()))
      with pytest.raises(WorkerDied):
        await tell(environment, "die")
      assert (await scoring).total == 0.1 + 0.2

  with_pool(work)


def test_a_worker_that_hangs_is_replaced():
  async def work(pool):
    async with pool.open(TASK, 0) as environment:
      await environment.start(TASK)
      pid = await pid_of(environment)
      began = time.monotonic()
      with pytest.raises(WorkerDied):
        await tell(environment, "hang")
      assert time.monotonic() - began < 10
      # So does a reward, in its own thread, which only the limit ends.
      task = dataclasses.replace(TASK, truth={"reward": "hang"})
      with pytest.raises(TimeoutError, match=r"reward of t took more than 1.5"):
        await pool.score(task, episode())
    async with pool.open(TASK, 0) as environment:
      await environment.start(TASK)
      assert await pid_of(environment) != pid
    assert pool.replaced == 2

  with_pool(work, config(beat_seconds=0.2, lost_seconds=1.0, call_seconds=1.5))


def test_a_problem_that_can_t_be_made_ends_the_pool():
  async def run():
    made = config("broken")
    await EnvironmentPool(made, digests={"corpus": "p"}).run()

  with pytest.raises(ExceptionGroup) as error:
    asyncio.run(run())
  (cause,) = error.value.exceptions
  assert "can't be started (try 3 of 3)" in str(cause)


def test_another_problem_ends_the_pool():
  async def run():
    await EnvironmentPool(config("other"), digests={"corpus": "p"}).run()

  with pytest.raises(ExceptionGroup) as error:
    asyncio.run(run())
  (cause,) = error.value.exceptions
  assert isinstance(cause, ValueError)
  assert "{'corpus': 'other'}, the actor's {'corpus': 'p'}" in str(cause)


def test_no_worker_in_time():
  async def run():
    # Nothing runs it.
    pool = EnvironmentPool(config(patience=0.1), digests={})
    async with pool.open(TASK, 0):
      pass

  with pytest.raises(TimeoutError, match=r"an environment worker .* 0.1 s"):
    asyncio.run(run())


ACTOR = """
import asyncio, json, sys
from arl_jax.actors.config import ActorConfig, from_json
from arl_jax.actors.environment_pool import EnvironmentPool
from arl_jax.types import Task, ToolCall

async def main():
  config = from_json(ActorConfig, json.loads(sys.argv[1]))
  pool = EnvironmentPool(config, digests={"corpus": "p"})
  running = asyncio.create_task(pool.run())
  task = Task(task_id="t", prompt="fox", truth={})
  async with pool.open(task, 0) as environment:
    await environment.start(task)
    for what in ("pid", "child"):
      calls = [ToolCall(name="run", argument=what)]
      (seen,) = await environment.execute(calls, 7)
      print(seen.blocks[0].text, flush=True)
    await environment.execute([ToolCall(name="run", argument="hang")], 7)

asyncio.run(main())
"""


def test_workers_end_with_their_actor_even_amid_a_hang():
  with subprocess.Popen(
    [sys.executable, "-c", ACTOR, json.dumps(dataclasses.asdict(config()))],
    stdout=subprocess.PIPE,
    text=True,
  ) as actor:
    assert actor.stdout is not None
    worker, child = (int(actor.stdout.readline()) for _ in range(2))
    time.sleep(0.2)
    assert not gone(worker)
    assert not gone(child)
    actor.kill()
    wait_until(lambda: gone(worker) and gone(child), seconds=10)


class TestLocalEnvironments:
  def score(self, wanted, **options):
    problem = echo_problem.Problem(config())
    local = LocalEnvironments(problem, **{"call_seconds": 9, **options})
    task = dataclasses.replace(TASK, truth={"reward": wanted})
    return asyncio.run(local.score(task, episode()))

  def test_a_reward_that_does_not_end_holds_up_nobody(self):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"reward of t took more than 0.2 s"):
      self.score("hang", call_seconds=0.2)
    # The loop has ended as well, though the thread hasn't.
    assert time.monotonic() - began < 5

  def test_a_reward_that_fails_says_why(self):
    with pytest.raises(RuntimeError, match="reward of t failed: KeyError"):
      self.score("raise")
