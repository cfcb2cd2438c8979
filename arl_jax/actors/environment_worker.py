"""A process that hosts environments and rewards for an actor.

  python -m arl_jax.actors.environment_worker

Its first message is the configuration; it answers with the problem's digests
and then serves calls (see `worker_messages`), many at a time, until its input
ends: as it does when the actor dies, however that happens. Imports no jax.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
import sys
import threading
import traceback
from typing import Any, BinaryIO

from absl import logging

from arl_jax import records
from arl_jax.actors import worker_messages as messages
from arl_jax.actors.config import ActorConfig, from_json
from arl_jax.actors.environments import LocalEnvironments
from arl_jax.problems.problem import Problem, make_problem
from arl_jax.types import Environment, Episode, Task, ToolCall

# Characters of an error that the actor is told.
_ERROR_CHARS = 2000


class _Worker:
  """Environments by number, and the calls that run in them."""

  def __init__(self, replies: BinaryIO):
    self._replies = replies
    self._problem: Problem | None = None
    self._environments: dict[int, Environment] = {}
    self._running: dict[int, asyncio.Task[None]] = {}
    # Never done, but for an error that ends the process.
    self.failed: asyncio.Future[None] = asyncio.Future()

  def take(self, message: dict[str, Any]) -> None:
    """Takes a message from the actor; in the loop's thread."""
    try:
      self._take(message)
    except Exception as error:
      if not self.failed.done():
        self.failed.set_exception(error)

  def _take(self, message: dict[str, Any]) -> None:
    match message:
      case {"config": config}:
        self._problem = make_problem(from_json(ActorConfig, config))
        # The actor has the time limits, and kills who exceeds them.
        self._local = LocalEnvironments(self._problem, call_seconds=math.inf)
        self._send({"digests": self._problem.digests()})
      case {"ping": number}:
        self._send({"pong": number})
      case {"cancel": number}:
        if (task := self._running.get(number)) is not None:
          task.cancel()
      case {"end": number}:
        self._environments.pop(number, None)
      case {"id": number}:
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._running[number] = task
        task.add_done_callback(functools.partial(self._done, number))
      case _:
        raise ValueError(f"unknown message {sorted(message)}")

  def _done(self, number: int, task: asyncio.Task[None]) -> None:
    del self._running[number]
    error = None if task.cancelled() else task.exception()
    if error is not None and not self.failed.done():
      self.failed.set_exception(error)

  async def _answer(self, message: dict[str, Any]) -> None:
    answer = {"id": message["id"]}
    try:
      frame = messages.pack(answer | {"value": await self._call(message)})
    except Exception as error:
      logging.warning("%s failed: %r", message.get("call"), error)
      text = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
      frame = messages.pack(answer | {"error": text})
    self._write(frame)

  async def _call(self, message: dict[str, Any]) -> Any:
    call = message["call"]
    if call == "score":
      return await self._score(message)
    if call == "start":
      return await self._start(message)
    environment = self._environments[message["environment"]]
    if call == "execute":
      calls = [ToolCall(name=n, argument=a) for n, a in message["calls"]]
      found = await environment.execute(calls, message["budget"])
      return [messages.observation_json(o) for o in found]
    if call == "finish":
      return await environment.finish(message["message"])
    if call == "outcome":
      return dict(await environment.outcome())
    raise ValueError(f"unknown call {call!r}")

  async def _start(self, message: dict[str, Any]) -> dict[str, Any]:
    task = records.from_json(message["task"])
    assert isinstance(task, Task)
    assert self._problem is not None
    environment = self._problem.environment(task, message["seed"])
    self._environments[message["environment"]] = environment
    opening = await environment.start(task)
    return {"opening": opening, "tool_names": list(environment.tool_names)}

  async def _score(self, message: dict[str, Any]) -> dict[str, Any]:
    task = records.from_json(message["task"])
    episode = records.from_json(message["episode"])
    assert isinstance(task, Task)
    assert isinstance(episode, Episode)
    reward = await self._local.score(task, episode)
    return {
      "total": float(reward.total),
      "parts": {k: float(v) for k, v in reward.parts.items()},
    }

  def _send(self, message: dict[str, Any]) -> None:
    self._write(messages.pack(message))

  def _write(self, frame: bytes) -> None:
    self._replies.write(frame)
    self._replies.flush()


async def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
  worker, loop = _Worker(replies), asyncio.get_running_loop()

  def read() -> None:
    # A thread of its own: it notices the actor's end whatever the loop does.
    try:
      while (message := messages.read_blocking(requests)) is not None:
        loop.call_soon_threadsafe(worker.take, message)
    finally:
      _end()

  threading.Thread(target=read, daemon=True).start()
  await worker.failed


def _end() -> None:
  """Ends this process, and what tools have started in its group."""
  with contextlib.suppress(OSError):
    if os.getpgid(0) == os.getpid():
      os.killpg(0, signal.SIGKILL)
  os._exit(0)


def main() -> None:
  # Pipes of our own: what environments print or read mustn't come between.
  requests = os.fdopen(os.dup(0), "rb")
  replies = os.fdopen(os.dup(1), "wb")
  with open(os.devnull, "rb") as nothing:
    os.dup2(nothing.fileno(), 0)
  os.dup2(2, 1)
  logging.use_absl_handler()
  try:
    asyncio.run(_serve(requests, replies))
  except Exception:
    traceback.print_exc()
    sys.stderr.flush()
    # No orderly end: the thread that reads can't be stopped.
    os._exit(1)


if __name__ == "__main__":
  main()
