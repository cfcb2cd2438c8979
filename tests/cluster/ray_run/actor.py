"""Makes up large groups for the tasks it leases."""

import asyncio
import sys

import numpy as np

from arl_jax.cluster.heartbeat import Heartbeat
from arl_jax.queueing.transport import actor_queue
from arl_jax.types import Episode, Group, Reward, Segment, StopReason, Task
from tests.cluster.ray_run import world

TOKENS = 1_000_000


def run(config, index, should_stop) -> None:
  world.started(config, f"actor-{index}", f"jax={'jax' in sys.modules}")
  asyncio.run(_work(config, index, should_stop))


async def _work(config, index, should_stop) -> None:
  with Heartbeat(config.cluster, "actor", index) as heart:
    async with actor_queue(config.cluster, index) as queue:
      while not should_stop():
        for lease in await queue.lease(1):
          assert await queue.renew([lease]) == []
          fate = await queue.deliver(lease, make_group(lease))
          world.started(config, f"delivered-{lease.number}", fate)
        heart.progress()


def make_group(lease) -> Group:
  """Two rollouts of 17 MB, whose ids are the number of the draw."""
  ids = np.full(TOKENS, lease.number, np.int32)
  segment = Segment(
    ids=ids,
    roles=np.zeros(TOKENS, np.uint8),
    sampled=np.ones(TOKENS, bool),
    behaviour_logp=np.full(TOKENS, -1.0, np.float32),
    policy_version=np.full(TOKENS, lease.version, np.int32),
  )
  episodes = tuple(
    Episode(
      task_id=lease.task_id,
      rollout_index=i,
      segments=(segment,),
      events=(),
      stop_reason=StopReason.ANSWERED,
      outcome={},
      turns=1,
      reward=Reward(total=float(i)),
    )
    for i in range(2)
  )
  task = Task(task_id=lease.task_id, prompt="long " * 100, truth={"x": 1})
  return Group(group_id=lease.group_id, task=task, episodes=episodes)
