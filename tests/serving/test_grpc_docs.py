"""The program that docs/grpc.md shows."""

import asyncio
import pathlib
import re

from arl_jax.rollout.request import Sampling
from tests.rollout.fake_engine import alone
from tests.serving.grpc_serving import served

_TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "grpc.md").read_text()


def test_the_program_shown_gets_ids_and_log_probs():
  (code,) = re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL)

  async def main():
    async with served() as (service, _):
      names = {"address": f"127.0.0.1:{service.grpc_port}"}
      await asyncio.to_thread(exec, code, names)
      return names

  names = asyncio.run(main())
  assert names["ids"] == alone([3, 1, 4], Sampling(max_tokens=8, seed=1))
  # The fake engine's log-prob is minus the oldest version in the cache.
  assert names["logp"] == [0] * 8
