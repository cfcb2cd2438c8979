"""What one request samples, as it comes."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from arl_jax.types import Sample


class Unavailable(RuntimeError):
  """The server takes no requests now; another time, or another replica."""


class Aborted(RuntimeError):
  """Somebody else ended the request."""


class Stream:
  """One request's tokens, an async iterator of `Sample`s.

  Each holds the tokens that came since the last one; `finish` is None in all
  but the last. Leaving `async with` gives up what isn't done.

  Attributes:
    request_id: to abort it by.
  """

  def __init__(self, request_id: str | None, cancel: Callable[[Stream], None]):
    self.request_id = request_id or uuid.uuid4().hex
    self._cancel = cancel
    self._loop = asyncio.get_running_loop()
    # Bounded by the request's max_tokens.
    self._parts: asyncio.Queue[Sample | Exception] = asyncio.Queue()
    self._done = False

  @property
  def loop(self) -> asyncio.AbstractEventLoop:
    """Whose callbacks may `put`."""
    return self._loop

  def put(self, part: Sample | Exception) -> None:
    """Called on the stream's loop."""
    self._parts.put_nowait(part)

  async def __aenter__(self) -> Stream:
    return self

  async def __aexit__(self, *_: Any) -> None:
    self.close()

  def __aiter__(self) -> Stream:
    return self

  async def __anext__(self) -> Sample:
    """The next tokens.

    Raises:
      ValueError, Overloaded: the scheduler didn't take it.
      RequestTimeout, RequestFailed: as the scheduler says.
      Aborted: somebody ended it.
      Unavailable: the server stops.
    """
    if self._done:
      raise StopAsyncIteration
    part = await self._parts.get()
    if isinstance(part, Exception):
      self._done = True
      raise part
    self._done = part.finish is not None
    return part

  def close(self) -> None:
    """Gives up the request if it isn't done."""
    if not self._done:
      self._done = True
      self._cancel(self)

  async def result(self) -> Sample:
    """All of it at once."""
    return joined([part async for part in self])


def joined(parts: list[Sample]) -> Sample:
  """One sample of consecutive ones, at least one."""
  last = parts[-1]
  if len(parts) == 1:
    return last
  experts = None
  if last.experts is not None:
    # A part without tokens may have none.
    found = [p.experts for p in parts if p.experts is not None]
    experts = np.concatenate(found)

  def all_of(name: str) -> np.ndarray:
    return np.concatenate([getattr(p, name) for p in parts])

  return dataclasses.replace(
    last,
    ids=all_of("ids"),
    logp=all_of("logp"),
    versions=all_of("versions"),
    sampled_logp=all_of("sampled_logp"),
    cache_versions=all_of("cache_versions"),
    experts=experts,
  )
