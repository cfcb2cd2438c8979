"""Where episodes get environments and rewards from. Imports no jax."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from arl_jax.problems.problem import Problem
from arl_jax.types import (
  Environment,
  Episode,
  Observation,
  Reward,
  RewardFn,
  Task,
  ToolCall,
)


class Environments(Protocol):
  """Environments and rewards, of this process or of others."""

  def open(
    self, task: Task, seed: int, *, alone: bool = False
  ) -> AbstractAsyncContextManager[Environment]:
    """A fresh environment, given back at the end of `async with`.

    Args:
      task: its task.
      seed: of the episode.
      alone: where no other one can take it along.
    """

  async def score(self, task: Task, episode: Episode) -> Reward:
    """An episode's reward, within the time that a call may take."""


class LocalEnvironments:
  """Environments of this process.

  A reward that doesn't end keeps its thread: nothing can end it. Where that may
  happen, let other processes score (`EnvironmentPool`).
  """

  def __init__(self, problem: Problem, *, call_seconds: float):
    """Makes environments of a problem, whose rewards get `call_seconds`."""
    self._problem, self._seconds = problem, call_seconds

  @contextlib.asynccontextmanager
  async def open(
    self, task: Task, seed: int, *, alone: bool = False
  ) -> AsyncIterator[Environment]:
    """See `Environments`; what ends this process ends all of them."""
    yield self._problem.environment(task, seed)

  async def score(self, task: Task, episode: Episode) -> Reward:
    """See `Environments`.

    Raises:
      TimeoutError: it took too long.
      RuntimeError: the reward failed.
    """
    future: asyncio.Future[Reward] = asyncio.Future()
    loop = asyncio.get_running_loop()

    def settle(reward: Reward | None, error: Exception | None) -> None:
      if future.done():
        return
      if reward is not None:
        future.set_result(reward)
      else:
        failed = RuntimeError(f"the reward of {task.task_id} failed: {error!r}")
        failed.__cause__ = error
        future.set_exception(failed)

    def work() -> None:
      reward: Reward | None = None
      failure: Exception | None = None
      try:
        reward = scored(self._problem.reward, task, episode)
      except Exception as error:
        failure = error
      # The process may have gone on without it.
      with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle, reward, failure)

    # No thread of a pool: those are waited for when the process ends.
    threading.Thread(target=work, name="reward", daemon=True).start()
    return await within(self._seconds, f"the reward of {task.task_id}", future)


class TimedEnvironment:
  """An environment whose calls have a time limit, and are counted."""

  def __init__(
    self,
    environment: Environment,
    *,
    call_seconds: float,
    count: Callable[[str, float], None],
  ):
    """Wraps an environment.

    Args:
      environment: that does the work.
      call_seconds: that each call may take.
      count: takes "tool_calls" and "tool_seconds" as they come.
    """
    self._environment, self._seconds = environment, call_seconds
    self._count = count
    self._name = "an environment"

  @property
  def tool_names(self) -> tuple[str, ...]:
    return self._environment.tool_names

  async def start(self, task: Task) -> str:
    self._name = f"the environment of {task.task_id}"
    return await self._within("start", self._environment.start(task))

  async def execute(
    self, calls: Sequence[ToolCall], token_budget: int
  ) -> list[Observation]:
    began = time.monotonic()
    self._count("tool_calls", len(calls))
    try:
      return await self._within(
        "execute", self._environment.execute(calls, token_budget)
      )
    finally:
      self._count("tool_seconds", time.monotonic() - began)

  async def finish(self, message: str) -> str | None:
    return await self._within("finish", self._environment.finish(message))

  async def outcome(self) -> Mapping[str, Any]:
    return await self._within("outcome", self._environment.outcome())

  async def _within(self, call: str, work: Any) -> Any:
    return await within(self._seconds, f"{call} of {self._name}", work)


def scored(reward: RewardFn, task: Task, episode: Episode) -> Reward:
  """An episode's reward, as numbers that can be sent and trained on.

  Raises:
    ValueError: what came isn't a `Reward`, or not finite.
    Exception: whatever the reward raises.
  """
  found: Any = reward(task, episode)
  if not isinstance(found, Reward):
    raise ValueError(
      f"the reward of {task.task_id:.100} is a {type(found).__name__}, no"
      " Reward"
    )
  try:
    total = float(found.total)
    parts = {str(name): float(value) for name, value in found.parts.items()}
  except (TypeError, AttributeError, OverflowError) as error:
    raise ValueError(
      f"the reward of {task.task_id:.100} isn't of numbers: {error}"
    ) from error
  for name, value in {**parts, "total": total}.items():
    if not math.isfinite(value):
      raise ValueError(
        f"the reward of {task.task_id:.100} has {name} {value}; it must be"
        " finite"
      )
  return Reward(total=total, parts=parts)


async def within(seconds: float, what: str, work: Any) -> Any:
  """Awaits `work`; raises TimeoutError saying what took too long."""
  try:
    async with asyncio.timeout(seconds) as limit:
      return await work
  except TimeoutError as error:
    if not limit.expired():
      raise
    raise TimeoutError(f"{what} took more than {seconds} s") from error
