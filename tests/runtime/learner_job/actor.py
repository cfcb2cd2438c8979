"""An actor that makes up groups; the same ones for the same lease."""

import asyncio

from arl_jax.queueing.client import ActorQueue
from tests.queueing import leased_groups


def run(config, index, should_stop) -> None:
  asyncio.run(_run(config, index, should_stop))


async def _run(config, index, should_stop) -> None:
  async with ActorQueue(config.cluster, index) as queue:
    while not should_stop():
      for lease in await queue.lease(2):
        # Each task has a text of its own length.
        tokens = 3 + int(lease.task_id.removeprefix("t"))
        group = leased_groups.group(lease, tokens=tokens)
        await queue.deliver(lease, group)
