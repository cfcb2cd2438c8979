"""Continuous batching: which request uses which slot, and when.

Synchronous, and without jax: one owner calls `Scheduler.step` as long as it is
`busy`. Each step lets waiting requests into slots, extends some caches by a
chunk, and samples in the slots that are ready.
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from arl_jax.rollout.guarded_engine import EngineFailure, GuardedEngine
from arl_jax.rollout.held_weights import HeldWeights
from arl_jax.rollout.prefill_queue import PrefillQueue
from arl_jax.rollout.request import (
  Overloaded,
  Phase,
  Request,
  Sampling,
  validate,
)
from arl_jax.rollout.scheduler_config import SchedulerConfig
from arl_jax.rollout.slots import Slot, Slots
from arl_jax.rollout.stop_strings import StopStrings


class Scheduler:
  """Serves many requests with the slots of one engine.

  A session keeps its slot, and with it the cached prefix, until it is closed;
  a request that finds no other slot takes that of the session that was away
  longest. Requests get slots in order of arrival.

  If the engine raises, the requests that took part are computed again from
  their tokens, one by one; only one that fails alone is given up.

  Attributes:
    prefilled_tokens: computed into caches, those computed again included.
    sampled_tokens: that requests got.
    reused_tokens: that were in a cache when a request needed them.
    cancelled: requests that were cancelled.
    timed_out: requests that took too long.
    failed: requests that the engine couldn't compute.
    evicted: times that a session lost its slot to another one's request.
    driven: whether a client calls `step`; there can be one only.
    lineage: of the weights, where they were published; "" elsewhere.
  """

  def __init__(
    self,
    engine: Any,
    params: Any,
    version: int,
    *,
    lineage: str = "",
    config: SchedulerConfig | None = None,
    detokenize: Callable[[list[int]], str] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Makes a scheduler with empty slots.

    Args:
      engine: an `engine.Engine`; nobody else drives its state.
      params: weights as the engine takes them.
      version: of these weights.
      lineage: of these weights.
      config: limits.
      detokenize: text of token ids; needed for stop strings.
      clock: seconds.
    """
    self.config = config or SchedulerConfig()
    self.config.validate()
    engine.check_placed(params)
    self.prefilled_tokens = self.sampled_tokens = self.reused_tokens = 0
    self.cancelled = self.timed_out = self.failed = self.evicted = 0
    self.driven, self.lineage = False, lineage
    self._limits, self._detokenize, self._clock = engine, detokenize, clock
    self._weights = HeldWeights(params, version)
    self._engine = GuardedEngine(engine)
    self._slots = Slots(engine)
    self._waiting: deque[Request] = deque()
    self._prefilling = PrefillQueue(engine, self._slots)
    self._finished: list[Request] = []
    self._held_back = 0

  # Gauges.

  @property
  def waiting(self) -> int:
    """Requests without a slot."""
    return len(self._waiting)

  @property
  def running(self) -> int:
    """Requests with a slot."""
    return sum(s.request is not None for s in self._slots)

  @property
  def slots_in_use(self) -> int:
    """Slots that belong to a session, whether anything runs in them or not."""
    return sum(s.session is not None for s in self._slots)

  @property
  def version(self) -> int:
    """Current policy version."""
    return self._weights.version

  @property
  def versions(self) -> tuple[int, ...]:
    """Policy versions whose weights are held, in order."""
    return self._weights.versions

  @property
  def busy(self) -> bool:
    """Whether `step` has anything to do."""
    return bool(self._waiting or self.running or self._finished)

  # What callers do.

  def submit(
    self,
    session: str,
    ids: Sequence[int],
    sampling: Sampling,
    *,
    training: bool = True,
    timeout: float | None = None,
    version: int | None = None,
  ) -> Request:
    """Takes a request; `step` returns it when it is done.

    Args:
      session: whose cached prefix it may go on from.
      ids: the prompt.
      sampling: how to continue it.
      training: whether its tokens may be trained on: refuses what would make
        their log-probs wrong.
      timeout: seconds it may take; the scheduler's by default.
      version: computes all of it with this version, whatever comes meanwhile.

    Raises:
      ValueError: names what can't be.
      Overloaded: too many wait.
    """
    if not isinstance(session, str):
      raise ValueError(f"session is {session!r}, not a text")
    try:
      ids = [operator.index(i) for i in ids]
    except TypeError as error:
      raise ValueError(f"ids must be token ids: {error}") from error
    validate(ids, sampling, self._limits)
    if sampling.stop_strings and self._detokenize is None:
      raise ValueError("stop_strings need a scheduler with detokenize")
    if training:
      sampling.refuse_filtered()
    timeout = self.config.timeout if timeout is None else timeout
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
      raise ValueError(f"timeout is {timeout!r}, not a number of seconds > 0")
    if version is not None and version not in self.versions:
      raise ValueError(
        f"version {version} isn't held any more, or not yet; held are"
        f" {list(self.versions)}"
      )
    if len(self._waiting) >= self.config.max_waiting + len(self._slots.idle()):
      raise Overloaded(
        f"{len(self._waiting)} requests wait for {self._limits.slots} slots;"
        f" max_waiting is {self.config.max_waiting}"
      )
    request = Request(
      session=session,
      ids=ids,
      sampling=sampling,
      timeout=timeout,
      deadline=self._clock() + timeout,
      version=self.version if version is None else version,
      pinned=version is not None,
    )
    if sampling.stop_strings and self._detokenize:
      request.stops = StopStrings(sampling.stop_strings, self._detokenize)
    self._waiting.append(request)
    return request

  def cancel(self, request: Request) -> None:
    """Stops a request; its session keeps the slot. Done ones stay as they are.

    `step` doesn't return it.
    """
    if request.phase is not Phase.DONE:
      request.cancelled = True
      self.cancelled += 1
      self._leave(request)

  def close(self, session: str) -> list[Request]:
    """Gives back what a session has; returns its requests, now cancelled."""
    gone = [r for r in self._unfinished() if r.session == session]
    for request in gone:
      self.cancel(request)
    for slot in self._slots:
      if slot.session == session:
        slot.session = None
    return gone

  def update_weights(
    self,
    params: Any,
    version: int,
    caches: Literal["recompute", "keep"] = "recompute",
  ) -> None:
    """Goes on with new weights; requests pinned to others aren't touched.

    Args:
      params: weights as the engine takes them.
      version: of these weights. The current one again means the same weights:
        caches stay worth what they were.
      caches: what running requests go on from: "recompute" computes their
        prompts and tokens again, "keep" leaves their caches as they are, of
        several versions (`Sample.cache_versions` tells). New requests never
        use a cache of other weights.

    Raises:
      ValueError: the version is older than the current one or no number,
        `caches` is unknown, or the weights aren't what the engine takes.
    """
    self._limits.check_placed(params)
    if caches not in ("recompute", "keep"):
      raise ValueError(f"caches is {caches!r}, not 'recompute' or 'keep'")
    if not self._weights.add(params, version):
      return
    for request in self._unfinished():
      if request.pinned:
        continue
      request.version = self.version
      if request.phase is Phase.WAITING:
        continue
      if caches == "keep" and request.cached and request.leader is None:
        self._slots[request.slot].version = None
        self._prefilling.orphan(request)
      else:
        self._restart(request)
    self._weights.drop_unused(self._unfinished())

  def adopt(self, params: Any, version: int) -> None:
    """Goes on with weights of another lineage, whatever their number.

    What the old ones computed is worth nothing: two lineages may give one
    number to different weights. Running requests are computed again; those
    pinned to a version fail.

    Args:
      params: weights as the engine takes them.
      version: of these weights.

    Raises:
      ValueError: the weights aren't what the engine takes.
    """
    self._limits.check_placed(params)
    for request in self._unfinished():
      if request.pinned:
        self._fail(request, f"version {request.version} was abandoned")
    self._weights.replace(params, version)
    for slot in self._slots:
      slot.keep(0, None)
      if slot.request is not None:
        self._restart(slot.request)
    for request in self._unfinished():
      request.version = version

  def step(self) -> list[Request]:
    """Does one piece of work: at most one prefill and one generate call.

    Returns:
      Requests that ended, with a result or an error.
    """
    self._end_late()
    try:
      if not self._engine.alive:
        self._renew()
      if self._engine.alive:
        self._work()
    except EngineFailure as failure:
      self._recover(failure)
    return self._take_finished()

  def expire(self) -> list[Request]:
    """A `step` that only ends requests whose time is over."""
    self._end_late()
    return self._take_finished()

  def _take_finished(self) -> list[Request]:
    finished, self._finished = self._finished, []
    return finished

  def _work(self) -> None:
    self._engine.stop_noted()
    suspect = next((r for r in self._unfinished() if r.suspect), None)
    if suspect is not None:
      self._try(suspect)
      return
    self._admit()
    if self._prefill_is_due():
      self._prefill(self._prefilling.batch())
    batch = self._weights.turn(self._decoding())
    if batch:
      self._generate(batch)

  # Requests come and go.

  def _unfinished(self) -> list[Request]:
    running = [s.request for s in self._slots if s.request is not None]
    return [*self._waiting, *running]

  def _end_late(self) -> None:
    now = self._clock()
    for request in self._unfinished():
      if now >= request.deadline:
        self.timed_out += 1
        request.error = request.timed_out()
        self._finish(request)

  def _fail(self, request: Request, why: Any) -> None:
    self.failed += 1
    request.error = request.failure(why)
    self._finish(request)

  def _finish(self, request: Request) -> None:
    self._leave(request)
    self._finished.append(request)

  def _leave(self, request: Request) -> None:
    """Takes a request out of every place where it is."""
    was, request.phase = request.phase, Phase.DONE
    if was is Phase.WAITING:
      self._waiting.remove(request)
    else:
      slot = self._slots[request.slot]
      slot.request = None
      self._slots.touch(slot)
      if was is Phase.PREFILL:
        self._prefilling.remove(request)
      elif request.result is None:
        self._engine.stop(slot.index)
      self._prefilling.orphan(request)
    if request.pinned:
      self._weights.drop_unused(self._unfinished())

  def _restart(self, request: Request) -> None:
    """Has a running request's cache computed from its tokens."""
    if request.phase is Phase.DECODING:
      self._engine.stop(request.slot)
      self._prefilling.add(request)
      request.phase = Phase.PREFILL
    self._slots[request.slot].keep(0, None)
    request.restart()
    self._prefilling.orphan(request)

  # Failures of the engine.

  def _recover(self, failure: EngineFailure) -> None:
    """Fails who failed alone; has all others computed again."""
    suspects = [r for r in failure.suspects if r.phase is not Phase.DONE]
    if len(suspects) == 1 and suspects[0].suspect:
      self._fail(suspects[0], failure.__cause__)
    for request in suspects:
      request.suspect = True
    self._renew()

  def _try(self, suspect: Request) -> None:
    """Works for one request alone, until it has sampled something."""
    if not suspect.placed:
      self._place(suspect)
    if suspect.phase is Phase.PREFILL:
      self._prefill([suspect])
    if suspect.phase is Phase.DECODING:
      self._generate([suspect])

  def _renew(self) -> None:
    for slot in self._slots:
      slot.keep(0, None)
      if slot.request is not None:
        self._restart(slot.request)
    try:
      self._engine.renew()
    except Exception as error:
      # Without slots nothing can go on; those that come later try again.
      for request in self._unfinished():
        self._fail(request, error)

  # Prefill.

  def _admit(self) -> None:
    for request in self._prefilling:
      if not request.placed:
        self._place(request)
    while self._waiting:
      request = self._waiting[0]
      slot = self._slots.find(request)
      if slot is None:
        return
      self._waiting.popleft()
      self.evicted += slot.session not in (None, request.session)
      slot.session, slot.request = request.session, request
      self._slots.touch(slot)
      request.slot, request.phase = slot.index, Phase.PREFILL
      self._prefilling.add(request)
      self._place(request)

  def _place(self, request: Request) -> None:
    copy = self._prefilling.place(request)
    if copy is not None:
      self._copy(request, *copy)
    elif request.leader is None:
      self.reused_tokens += request.cached

  def _copy(self, request: Request, source: Slot, length: int) -> None:
    if length > request.cached:
      self._engine.copy_prefix(request, source.index, length)
      self._slots[request.slot].copy(source, length)
      request.cached = length
    self.reused_tokens += request.cached

  def _prefill_is_due(self) -> bool:
    ready = len(self._prefilling.ready)
    full = ready >= self._limits.prefill_rows or not self._decoding()
    if ready and not full and self._held_back < self.config.prefill_patience:
      self._held_back += 1
      return False
    self._held_back = 0
    return bool(ready)

  def _prefill(self, batch: list[Request]) -> None:
    chunks = [self._prefilling.next_chunk(r) for r in batch]
    rows = {
      r.slot: (r.cached, chunk) for r, chunk in zip(batch, chunks, strict=True)
    }
    self._engine.extend(batch, self._weights.of(batch), rows)
    for request, chunk in zip(batch, chunks, strict=True):
      self._slots[request.slot].append(chunk)
      request.cached += len(chunk)
      self.prefilled_tokens += len(chunk)
    # Before any of them samples: layers with a window would forget.
    for copy in self._prefilling.served():
      self._copy(*copy)
    for request in batch:
      if request.cached == len(request.context):
        self._start(request)

  def _start(self, request: Request) -> None:
    self._engine.start(request)
    self._prefilling.remove(request)
    request.phase = Phase.DECODING

  # Decoding.

  def _decoding(self) -> list[Request]:
    running = (s.request for s in self._slots if s.request is not None)
    return [r for r in running if r.phase is Phase.DECODING]

  def _generate(self, batch: list[Request]) -> None:
    burst = self._engine.generate(batch, self._weights.of(batch))
    for request in batch:
      alone, request.suspect = request.suspect, False
      if burst.finite[request.slot]:
        self._absorb(request, burst)
      else:
        self._distrust(request, alone=alone)

  def _distrust(self, request: Request, *, alone: bool) -> None:
    """Logits weren't numbers: by this request, or by what its slot held."""
    slot = self._slots[request.slot]
    self._engine.clear(request)
    if alone:
      slot.keep(0, None)
      self._fail(request, "its logits aren't finite")
    else:
      self._restart(request)
      request.suspect = True

  def _absorb(self, request: Request, burst: Any) -> None:
    slot = self._slots[request.slot]
    before = len(request.context)
    try:
      kept, finish = request.absorb(burst)
    except Exception as error:  # The caller's detokenize may raise anything.
      slot.keep(0, None)
      self._fail(request, error)
      return
    slot.append(request.context[before:])
    slot.written = max(slot.written, before + int(burst.lengths[slot.index]))
    request.cached = len(request.context)
    self.sampled_tokens += kept
    if finish is not None:
      if burst.active[slot.index]:
        self._engine.stop(slot.index)
      request.result = request.sample(finish)
      self._finish(request)
