"""Clients of rollout engines. Imports no jax: the engine is passed in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from arl_jax.rollout.request import Request, Sampling
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.types import Sample


class LocalClient:
  """Drives a scheduler in this process for many concurrent episodes.

  `async with` runs the driving task; leaving it cancels what still waits and
  closes the sessions that it served. The scheduler can be used again.
  """

  def __init__(self, scheduler: Scheduler):
    self._scheduler = scheduler
    self._futures: dict[Request, asyncio.Future[Sample]] = {}
    self._sessions: set[str] = set()
    self._wake: asyncio.Event | None = None
    self._driver: asyncio.Task | None = None

  @property
  def prefilled_tokens(self) -> int:
    return self._scheduler.prefilled_tokens

  @property
  def sampled_tokens(self) -> int:
    return self._scheduler.sampled_tokens

  @property
  def slots_in_use(self) -> int:
    return self._scheduler.slots_in_use

  async def __aenter__(self) -> LocalClient:
    if self._scheduler.driven:
      raise RuntimeError("another client drives this scheduler already")
    self._scheduler.driven = True
    # Belongs to the running event loop.
    self._wake = asyncio.Event()
    self._driver = asyncio.create_task(self._drive())
    return self

  async def __aexit__(self, *_: Any) -> None:
    assert self._driver is not None
    self._driver.cancel()
    await asyncio.gather(self._driver, return_exceptions=True)
    self._scheduler.driven = False
    for session in list(self._sessions):
      await self.close(session)

  async def sample(
    self,
    session: str,
    ids: Sequence[int],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    seed: int,
    temperature: float = 1.0,
    training: bool = True,
    timeout: float | None = None,
    version: int | None = None,
    **more: Any,
  ) -> Sample:
    """See `types.PolicyClient`, and `Scheduler.submit` for what else it takes.

    Args:
      session: whose cached prefix it may go on from.
      ids: the prompt.
      max_tokens: sampled tokens, at most.
      stop_ids: token ids that end it.
      seed: of its random numbers.
      temperature: of sampling.
      training: whether the tokens may be trained on.
      timeout: seconds.
      version: that computes all of it; the current one by default.
      **more: further fields of `Sampling`.

    Raises:
      ValueError: the request is empty, doesn't fit into a slot, or names
        another value that can't be.
      Overloaded: too many requests wait.
      RequestTimeout: it took too long.
      RequestFailed: the engine can't compute it.
    """
    if self._driver is None or self._driver.done():
      failed = self._driver and not self._driver.cancelled()
      raise RuntimeError(
        "LocalClient is used outside of its `async with`, or its driver failed"
      ) from (self._driver.exception() if self._driver and failed else None)
    sampling = Sampling(
      max_tokens=max_tokens,
      stop_ids=tuple(stop_ids),
      seed=seed,
      temperature=temperature,
      **more,
    )
    request = self._scheduler.submit(
      session,
      ids,
      sampling,
      training=training,
      timeout=timeout,
      version=version,
    )
    future = asyncio.get_running_loop().create_future()
    self._futures[request] = future
    self._sessions.add(session)
    self._awaken()
    try:
      return await future
    finally:
      self._futures.pop(request, None)
      self._scheduler.cancel(request)

  async def close(self, session: str) -> None:
    self._sessions.discard(session)
    for request in self._scheduler.close(session):
      future = self._futures.get(request)
      if future is not None:
        future.cancel()
    self._awaken()

  def _awaken(self) -> None:
    if self._wake is not None:
      self._wake.set()

  async def _drive(self) -> None:
    assert self._wake is not None
    try:
      while True:
        # Everything that can run without a token runs first, so that the next
        # call finds as many rows as possible.
        await asyncio.sleep(0)
        if self._scheduler.busy:
          self._settle(self._scheduler.step())
        else:
          self._wake.clear()
          await self._wake.wait()
    except Exception as error:
      # Not the engine: the scheduler answers for that. Nobody may hang.
      for future in self._futures.values():
        if not future.done():
          future.set_exception(error)
      raise

  def _settle(self, finished: list[Request]) -> None:
    for request in finished:
      future = self._futures.get(request)
      if future is None or future.done():
        continue
      if request.result is not None:
        future.set_result(request.result)
      else:
        future.set_exception(request.error or asyncio.CancelledError())
