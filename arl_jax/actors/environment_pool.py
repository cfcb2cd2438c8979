"""Environments and rewards in processes of their own. Imports no jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from absl import logging

from arl_jax.actors import worker_messages as messages
from arl_jax.actors.config import ActorConfig
from arl_jax.actors.environments import within
from arl_jax.records import to_json
from arl_jax.types import (
  Environment,
  Episode,
  Observation,
  Reward,
  Task,
  ToolCall,
)

# Failed starts of a worker in a row, after which the pool gives up.
_STARTS = 3
# Seconds that a killed process may take to be gone.
_KILL_SECONDS = 10.0


class WorkerDied(RuntimeError):
  """The process that an environment lived in has ended."""


class CallFailed(RuntimeError):
  """An environment or a reward raised an exception in its process."""


class EnvironmentPool:
  """`Environments` of `cluster.environment_workers` processes.

  Each worker hosts many environments. One that dies takes its environments
  along and is replaced; so is one that no longer answers, or whose reward
  doesn't end. Whose fault it was shows in a worker of one's own. Nothing is
  ready, nor replaced, but while `run` runs.

  Attributes:
    replaced: workers that were.
  """

  def __init__(self, config: ActorConfig, *, digests: Mapping[str, str]):
    """Knows how to start workers.

    Args:
      config: that they make their problem from.
      digests: of the actor's problem, which theirs must be.
    """
    self._config, self._digests = config, dict(digests)
    self._cluster = config.cluster
    self._ready: list[_Worker] = []
    self._changed = asyncio.Event()
    self._numbers = itertools.count()
    # At most as many again host one environment or reward each.
    self._lone = asyncio.Semaphore(max(1, config.cluster.environment_workers))
    self.replaced = 0

  async def run(self) -> None:
    """Keeps the workers alive until it is cancelled, then kills them.

    Raises:
      RuntimeError: a worker can't be started.
      ValueError: a worker's problem is another one.
    """
    async with asyncio.TaskGroup() as group:
      for _ in range(self._cluster.environment_workers):
        group.create_task(self._keep())

  @contextlib.asynccontextmanager
  async def open(
    self, task: Task, seed: int, *, alone: bool = False
  ) -> AsyncIterator[Environment]:
    """See `Environments`. Raises TimeoutError if no worker comes."""
    if alone:
      async with self._worker_alone() as worker:
        yield _RemoteEnvironment(worker, next(self._numbers), seed)
      return
    worker = await self._least_busy()
    environment = _RemoteEnvironment(worker, next(self._numbers), seed)
    worker.held += 1
    try:
      yield environment
    finally:
      worker.held -= 1
      worker.tell({"end": environment.number})

  async def score(self, task: Task, episode: Episode) -> Reward:
    """See `Environments`.

    Raises:
      TimeoutError: it took too long, or no worker comes.
      CallFailed: the reward failed.
      WorkerDied: its process did.
      ValueError: what came isn't a reward.
    """
    fields = {
      "task": to_json(task),
      "episode": to_json(messages.for_reward(episode)),
    }
    worker = await self._least_busy()
    try:
      return await self._scored(worker, task, fields)
    except WorkerDied:
      # Of something else in it, perhaps.
      async with self._worker_alone() as worker:
        return await self._scored(worker, task, fields)

  async def _scored(
    self, worker: _Worker, task: Task, fields: Mapping[str, Any]
  ) -> Reward:
    what = f"the reward of {task.task_id}"
    try:
      value = await within(
        self._cluster.call_seconds, what, worker.call("score", **fields)
      )
    except TimeoutError:
      # It runs in a thread, which ends only with its process.
      worker.kill(f"{what} doesn't end")
      raise
    return _reward(value)

  @contextlib.asynccontextmanager
  async def _worker_alone(self) -> AsyncIterator[_Worker]:
    """A worker for one environment or reward, which ends with it."""

    async def serve() -> None:
      try:
        await worker.watch()
      finally:
        await worker.end()

    async with self._lone:
      worker = _Worker(self._cluster.beat_seconds, self._cluster.lost_seconds)
      served: asyncio.Task[None] | None = None
      try:
        start = worker.start(dataclasses.asdict(self._config))
        await within(self._cluster.patience, "a worker's start", start)
        served = asyncio.create_task(serve())
        yield worker
      finally:
        worker.kill()
        if served is not None:
          served.cancel()
          await asyncio.wait([served])
        await worker.end()

  async def _least_busy(self) -> _Worker:
    async def ready() -> None:
      while not self._usable():
        self._changed.clear()
        await self._changed.wait()

    if not self._usable():
      await within(self._cluster.patience, "an environment worker", ready())
    return min(self._usable(), key=lambda w: w.held)

  def _usable(self) -> list[_Worker]:
    return [worker for worker in self._ready if not worker.killed]

  async def _keep(self) -> None:
    """Starts a worker, and another one whenever it has ended."""
    failures = 0
    while True:
      worker = _Worker(self._cluster.beat_seconds, self._cluster.lost_seconds)
      try:
        config = dataclasses.asdict(self._config)
        digests = await within(
          self._cluster.patience, "a worker's start", worker.start(config)
        )
        if digests != self._digests:
          raise ValueError(
            f"an environment worker's problem has digests {digests}, the"
            f" actor's {self._digests}; both must be made from the same data"
          )
        failures = 0
        self._ready.append(worker)
        self._changed.set()
        reason = await worker.watch()
      except (OSError, TimeoutError, WorkerDied) as error:
        failures += 1
        reason = f"it can't be started (try {failures} of {_STARTS}): {error}"
        if failures >= _STARTS:
          raise RuntimeError(f"an environment worker: {reason}") from error
      finally:
        if worker in self._ready:
          self._ready.remove(worker)
        await worker.end()
      logging.warning("an environment worker is replaced: %s", reason)
      self.replaced += 1


class _Worker:
  """One process, as its actor sees it."""

  def __init__(self, beat_seconds: float, lost_seconds: float):
    self._beat = beat_seconds
    # Counted in beats, so that an actor that was stopped blames nobody.
    self._missed_beats = math.ceil(lost_seconds / beat_seconds)
    self._pending: dict[int, asyncio.Future[Any]] = {}
    self._numbers = itertools.count()
    self._process: asyncio.subprocess.Process | None = None
    self._writing = asyncio.Lock()
    self._pinged = self._ponged = 0
    self._why = ""
    self._ended = False
    self.held = 0

  async def start(self, config: Mapping[str, Any]) -> Any:
    """Starts the process; returns its problem's digests.

    Raises:
      WorkerDied: it ended, which its standard error explains.
    """
    self._process = await asyncio.create_subprocess_exec(
      sys.executable,
      *("-m", "arl_jax.actors.environment_worker"),
      stdin=asyncio.subprocess.PIPE,
      stdout=asyncio.subprocess.PIPE,
      # A group of its own: what its tools start ends with it.
      start_new_session=True,
    )
    await self._send({"config": config})
    message = await self._read()
    if message is None or "digests" not in message:
      raise WorkerDied("the worker ended while it made its problem")
    return message["digests"]

  async def watch(self) -> str:
    """Takes in answers until the worker is gone or hangs; returns why."""
    work = [
      asyncio.create_task(self._receive()),
      asyncio.create_task(self._ping()),
    ]
    try:
      done, _ = await asyncio.wait(work, return_when="FIRST_COMPLETED")
      return self._why or next(iter(done)).result()
    finally:
      for task in work:
        task.cancel()
      await asyncio.wait(work)

  async def call(self, call: str, **fields: Any) -> Any:
    """What a call returns; giving up on it cancels it over there.

    Raises:
      WorkerDied: the process has ended, or ends meanwhile.
      CallFailed: the call raised an exception.
      ValueError: the call can't be sent.
    """
    number = next(self._numbers)
    future = asyncio.get_running_loop().create_future()
    self._pending[number] = future
    try:
      await self._send({"id": number, "call": call, **fields})
      return await future
    except asyncio.CancelledError:
      self.tell({"cancel": number})
      raise
    finally:
      del self._pending[number]

  def tell(self, message: Mapping[str, Any]) -> None:
    """Sends what is short and needs no answer."""
    if not self._ended and self._process is not None:
      assert self._process.stdin is not None
      self._process.stdin.write(messages.pack(message))

  @property
  def killed(self) -> bool:
    """Whether it ends, though it may not be gone yet."""
    return bool(self._why)

  def kill(self, why: str = "it isn't needed any more") -> None:
    """Kills the process, and what it has started."""
    self._why = self._why or why
    if self._process is not None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._process.pid, signal.SIGKILL)

  async def end(self) -> None:
    """Kills the process, fails what waits for it, and frees its pipes."""
    self._ended = True
    self.kill()
    for future in self._pending.values():
      if not future.done():
        future.set_exception(WorkerDied("an environment worker died"))
    if self._process is not None:
      assert self._process.stdin is not None
      self._process.stdin.close()
      await within(_KILL_SECONDS, "a killed worker's end", self._process.wait())

  async def _send(self, message: Mapping[str, Any]) -> None:
    frame = messages.pack(message)
    process = self._process
    if self._ended or process is None:
      raise WorkerDied("the environment worker has died")
    assert process.stdin is not None
    try:
      async with self._writing:
        process.stdin.write(frame)
        await process.stdin.drain()
    except ConnectionError as error:
      raise WorkerDied("the environment worker has died") from error

  async def _read(self) -> dict[str, Any] | None:
    assert self._process is not None
    assert self._process.stdout is not None
    return await messages.read(self._process.stdout)

  async def _receive(self) -> str:
    try:
      while (message := await self._read()) is not None:
        self._take(message)
    except (ValueError, KeyError) as error:
      return f"it sent what can't be: {error!r}"
    assert self._process is not None
    return f"it ended (pid {self._process.pid})"

  def _take(self, message: Mapping[str, Any]) -> None:
    if "pong" in message:
      self._ponged = max(self._ponged, int(message["pong"]))
      return
    future = self._pending.get(message["id"])
    if future is None or future.done():
      return
    if "error" in message:
      future.set_exception(CallFailed(messages.string(message["error"])))
    else:
      future.set_result(message["value"])

  async def _ping(self) -> str:
    while True:
      self._pinged += 1
      self.tell({"ping": self._pinged})
      await asyncio.sleep(self._beat)
      if (missed := self._pinged - self._ponged) >= self._missed_beats:
        return f"it hasn't answered for {missed * self._beat:.0f} s"


class _RemoteEnvironment:
  """An environment of a worker; meets `types.Environment`."""

  def __init__(self, worker: _Worker, number: int, seed: int):
    self.number = number
    self._worker, self._seed = worker, seed
    self._tool_names: tuple[str, ...] | None = None

  @property
  def tool_names(self) -> tuple[str, ...]:
    """Raises RuntimeError before `start`."""
    if self._tool_names is None:
      raise RuntimeError("an environment's tool_names were read before start")
    return self._tool_names

  async def start(self, task: Task) -> str:
    value = await self._call("start", task=to_json(task), seed=self._seed)
    self._tool_names = tuple(messages.string(n) for n in value["tool_names"])
    return messages.string(value["opening"])

  async def execute(
    self, calls: Sequence[ToolCall], token_budget: int
  ) -> list[Observation]:
    sent = [[call.name, call.argument] for call in calls]
    value = await self._call("execute", calls=sent, budget=token_budget)
    return [messages.observation(o) for o in value]

  async def finish(self, message: str) -> str | None:
    value = await self._call("finish", message=message)
    return None if value is None else messages.string(value)

  async def outcome(self) -> Mapping[str, Any]:
    return dict(await self._call("outcome"))

  async def _call(self, call: str, **fields: Any) -> Any:
    return await self._worker.call(call, environment=self.number, **fields)


def _reward(value: Any) -> Reward:
  try:
    total, parts = float(value["total"]), dict(value["parts"])
    reward = Reward(
      total=total, parts={str(k): float(v) for k, v in parts.items()}
    )
  except (TypeError, KeyError) as error:
    raise ValueError(f"malformed reward: {error!r}") from error
  return reward
