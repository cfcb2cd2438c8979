"""A small search run whose tools sleep, for `async_overlap`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from arl_jax.problems.search import SearchProblem
from arl_jax.runtime.config import Config
from arl_jax.types import Environment, Observation, Task, ToolCall

_SECONDS = (0.2, 2.0)


class _Slow:
  """An environment whose tools answer a turn after a while.

  The seed says how long, so that all runs wait alike.
  """

  def __init__(self, environment: Environment, seed: int):
    self._environment, self._random = environment, random.Random(seed)
    self.start = environment.start
    self.finish, self.outcome = environment.finish, environment.outcome

  @property
  def tool_names(self) -> tuple[str, ...]:
    return self._environment.tool_names

  async def execute(
    self, calls: Sequence[ToolCall], token_budget: int
  ) -> list[Observation]:
    await asyncio.sleep(self._random.uniform(*_SECONDS))
    return await self._environment.execute(calls, token_budget)


class SlowSearch(SearchProblem):
  """The search problem with tools that take 0.2 to 2 seconds a turn."""

  def environment(self, task: Task, seed: int) -> Any:
    return _Slow(super().environment(task, seed), seed)


def get_config() -> Config:
  """Updates that move nothing, so that all runs have episodes alike."""
  config = Config(problem="benchmarks.slow_tools:SlowSearch")
  config.tasks.train, config.tasks.heldout = 400, 1
  warm = config.warm_start
  warm.opening_steps, warm.steps, warm.episodes = 30, 100, 400
  config.rl.tasks_per_step, config.rl.group_size = 8, 8
  config.rl.optimizer.learning_rate = 1e-12
  config.cluster.episodes = 256
  config.checkpoint_every = 1000
  config.weights.dtype = "float32"
  return config
