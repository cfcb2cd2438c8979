"""Clients of rollout engines. Imports no jax: the engine is passed in."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from arl_jax.types import Sample


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
  """One call of `sample` on its way."""

  session: str
  ids: list[int]
  limit: int
  stop_ids: Sequence[int]
  seed: int
  temperature: float
  done: asyncio.Future
  slot: int = -1
  # Tokens of `ids` that the slot's cache holds, computed by `version`.
  cached: int = 0
  version: int = -1
  tokens: list[int] = dataclasses.field(default_factory=list)
  logp: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)


class LocalClient:
  """Drives an engine in this process for many concurrent episodes.

  A session keeps its slot, and with it the cached prefix, until it is closed.
  Requests wait for a free slot in order of arrival. `async with` runs the
  driving task; if the engine fails, every waiting request gets the exception.
  """

  def __init__(self, engine: Any):
    self._engine = engine
    self._free = deque(range(engine.config.max_concurrent_decodes))
    self._slots: dict[str, int] = {}
    # Token ids in each slot's cache, and the version that computed them.
    self._held: dict[int, list[int]] = {}
    self._held_version: dict[int, int] = {}
    self._waiting: deque[_Request] = deque()
    self._prefilling: deque[_Request] = deque()
    self._decoding: dict[int, _Request] = {}
    self._wake = asyncio.Event()
    self._driver: asyncio.Task | None = None
    self.prefilled_tokens = 0
    self.sampled_tokens = 0

  @property
  def slots_in_use(self) -> int:
    return len(self._slots)

  async def __aenter__(self) -> LocalClient:
    self._driver = asyncio.create_task(self._drive())
    return self

  async def __aexit__(self, *_: Any) -> None:
    assert self._driver is not None
    self._driver.cancel()
    await asyncio.gather(self._driver, return_exceptions=True)
    self._fail(asyncio.CancelledError())

  async def sample(
    self,
    session: str,
    ids: Sequence[int],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    seed: int,
    temperature: float = 1.0,
  ) -> Sample:
    """See `types.PolicyClient`.

    Raises:
      ValueError: the request is empty, doesn't fit into a slot, or names
        another value that can't be.
    """
    room = self._engine.max_length - len(ids)
    if not ids or not 1 <= max_tokens <= room:
      raise ValueError(
        f"request of {len(ids)} ids with max_tokens {max_tokens} needs at"
        f" least one id and must fit into {self._engine.max_length} tokens"
      )
    # Checked here: inside the driver it would fail everybody's requests.
    if len(stop_ids) > self._engine.max_stop_ids:
      raise ValueError(
        f"{len(stop_ids)} stop ids; a request may have"
        f" {self._engine.max_stop_ids}"
      )
    if not 0 <= seed < 2**31:
      raise ValueError(f"seed {seed} is not in 0..2**31 - 1")
    if not 0 < temperature < float("inf"):
      raise ValueError(f"temperature {temperature} is not > 0")
    if self._driver is None or self._driver.done():
      raise RuntimeError("LocalClient is used outside of its `async with`")
    request = _Request(
      session,
      list(ids),
      max_tokens,
      stop_ids,
      seed,
      temperature,
      asyncio.get_running_loop().create_future(),
    )
    self._waiting.append(request)
    self._wake.set()
    try:
      return await request.done
    finally:
      if not request.done.done() or request.done.cancelled():
        self._forget(request)

  async def close(self, session: str) -> None:
    slot = self._slots.pop(session, None)
    if slot is not None:
      running = self._decoding.pop(slot, None)
      if running is not None:
        self._engine.free_resource(slot)
        running.done.cancel()
      self._held.pop(slot, None)
      self._free.append(slot)
      self._wake.set()

  def _forget(self, request: _Request) -> None:
    """A cancelled request stops; its session still owns the slot."""
    for queue in (self._waiting, self._prefilling):
      if request in queue:
        queue.remove(request)
    if self._decoding.get(request.slot) is request:
      del self._decoding[request.slot]
      self._engine.free_resource(request.slot)
      self._held.pop(request.slot, None)

  def _fail(self, error: BaseException) -> None:
    for request in (
      *self._waiting,
      *self._prefilling,
      *self._decoding.values(),
    ):
      if not request.done.done():
        if isinstance(error, asyncio.CancelledError):
          request.done.cancel()
        else:
          request.done.set_exception(error)
    self._waiting.clear()
    self._prefilling.clear()
    self._decoding.clear()

  async def _drive(self) -> None:
    try:
      while True:
        # Everything that can run without a token runs first, so that the next
        # call finds as many rows as possible.
        await asyncio.sleep(0)
        self._admit()
        if not self._prefilling and not self._decoding:
          self._wake.clear()
          await self._wake.wait()
          continue
        full = len(self._prefilling) >= self._engine.config.prefill_rows
        if self._prefilling and (full or not self._decoding):
          self._prefill()
        else:
          self._generate()
    except asyncio.CancelledError:
      raise
    except Exception as error:
      self._fail(error)
      raise

  def _admit(self) -> None:
    for _ in range(len(self._waiting)):
      request = self._waiting.popleft()
      slot = self._slots.get(request.session)
      if slot is None:
        if not self._free:
          self._waiting.append(request)
          continue
        slot = self._slots[request.session] = self._free.popleft()
      request.slot = slot
      request.cached = self._common_prefix(slot, request.ids)
      request.version = self._engine.version
      self._prefilling.append(request)

  def _common_prefix(self, slot: int, ids: list[int]) -> int:
    """Tokens of `ids` whose keys and values the slot already has.

    Caches of another policy version don't count. At least one token is left to
    compute, since sampling starts from a hidden state.
    """
    held = self._held.get(slot, [])
    if self._held_version.get(slot) != self._engine.version:
      return 0
    n = min(len(held), len(ids) - 1)
    same = np.equal(held[:n], ids[:n])
    return n if same.all() else int(same.argmin())

  def _prefill(self) -> None:
    config = self._engine.config
    # They leave the queue only when they decode: a failure finds them there.
    batch = list(self._prefilling)[: config.prefill_rows]
    rows = {}
    for request in batch:
      if request.version != self._engine.version:
        # New weights in between: a cache is of one version, or of none.
        request.cached, request.version = 0, self._engine.version
      self._hold(request)
      end = request.cached + config.prefill_chunk
      rows[request.slot] = (request.cached, request.ids[request.cached : end])
    self._engine.prefill(rows)
    for request in batch:
      self.prefilled_tokens += len(rows[request.slot][1])
      request.cached += len(rows[request.slot][1])
      self._hold(request)
      if request.cached < len(request.ids):
        continue
      self._engine.insert(
        request.slot,
        limit=request.limit,
        stop_ids=request.stop_ids,
        seed=request.seed,
        temperature=request.temperature,
      )
      self._decoding[request.slot] = request
      self._prefilling.remove(request)

  def _hold(self, request: _Request) -> None:
    """Records what the slot's cache holds, so that a cancelled prefill leaves
    no false claim.
    """
    self._held[request.slot] = request.ids[: request.cached]
    self._held_version[request.slot] = request.version

  def _generate(self) -> None:
    result = self._engine.generate()
    for slot, request in list(self._decoding.items()):
      n = int(result.lengths[slot])
      self.sampled_tokens += n
      request.tokens += result.tokens[slot, :n].tolist()
      request.logp += result.log_prob[slot, :n].tolist()
      request.versions += [result.version] * n
      if result.active[slot]:
        continue
      del self._decoding[slot]
      self._held[slot] = request.ids + request.tokens
      if not request.done.done():
        request.done.set_result(
          Sample(
            ids=np.array(request.tokens, np.int32),
            logp=np.array(request.logp, np.float32),
            versions=np.array(request.versions, np.int32),
            stopped=bool(result.stopped[slot]),
          )
        )
