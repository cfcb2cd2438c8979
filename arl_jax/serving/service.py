"""One engine in a thread of its own, used by many callers at a time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from arl_jax.rollout.request import (
  Overloaded,
  Request,
  Sampling,
  validate,
)
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.stream import Aborted, Stream, Unavailable
from arl_jax.types import Sample

# How long the thread sleeps at most while nothing may run; requests whose time
# is over are ended then.
_IDLE_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
  """What a service has to do.

  Attributes:
    state: "starting", "serving", "paused", "draining", "drained", "failed" or
      "stopped".
    version: current policy version.
    requests: that were taken and aren't done, at this moment.
    running: requests with a slot, as of the last step, as all that follows.
    waiting: requests without one.
    slots: of the engine.
    slots_in_use: that belong to a session, whether anything runs or not.
    max_requests: that it takes at a time.
    sampled_tokens: since the start, as are those that follow.
    prefilled_tokens: computed into caches.
    reused_tokens: found in a cache.
    steps: of the scheduler.
  """

  state: str
  version: int
  requests: int = 0
  running: int = 0
  waiting: int = 0
  slots: int = 0
  slots_in_use: int = 0
  max_requests: int = 0
  sampled_tokens: int = 0
  prefilled_tokens: int = 0
  reused_tokens: int = 0
  steps: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class _Open:
  """A request that isn't done, and what its caller has of it."""

  stream: Stream
  own_session: bool
  request: Request | None = None
  sent: int = 0


class Service:
  """Serves a scheduler to callers on any event loop.

  The scheduler belongs to the service's thread; what others want of it is put
  into a queue and done between two steps.

  Attributes:
    tokenizer: of the model.
    config: limits.
    engine: what the scheduler drives; its limits may be read.
  """

  def __init__(
    self,
    make_scheduler: Callable[[], Scheduler],
    engine: Any,
    tokenizer: Any,
    config: ServingConfig,
  ):
    """Makes a service; `start` has it serve.

    Args:
      make_scheduler: called in the thread; may take long (compile, load).
      engine: what that scheduler drives.
      tokenizer: with `encode`, `decode` and `eos_ids`.
      config: limits.
    """
    self.engine, self.tokenizer, self.config = engine, tokenizer, config
    self._make_scheduler = make_scheduler
    self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._opened: dict[str, _Open] = {}
    self._by_request: dict[Request, _Open] = {}
    self._paused = self._draining = self._stopping = False
    self._failure: BaseException | None = None
    self._steps = 0
    self._load = Load(state="starting", version=-1)
    self._thread = threading.Thread(
      target=self._run, name="engine", daemon=True
    )

  # What callers do, on any thread.

  def start(self) -> None:
    self._thread.start()

  def stop(self, seconds: float) -> bool:
    """Ends the thread; requests that aren't done fail as `Unavailable`.

    Args:
      seconds: that a step, or the start, may still take.

    Returns:
      Whether it ended.
    """
    self._stopping = True
    self._commands.put(lambda: None)
    if self._thread.is_alive():
      self._thread.join(seconds)
    return not self._thread.is_alive()

  def load(self) -> Load:
    """What there is to do."""
    return dataclasses.replace(self._load, requests=len(self._opened))

  def open(
    self,
    ids: Sequence[int],
    sampling: Sampling,
    *,
    session: str | None = None,
    training: bool = False,
    timeout: float | None = None,
    version: int | None = None,
    lineage: str | None = None,
    min_version: int = 0,
    request_id: str | None = None,
  ) -> Stream:
    """Takes a request, on an event loop.

    Args:
      ids: the prompt.
      sampling: how to continue it.
      session: whose cached prefix it may go on from; it keeps a slot until
        `close_session`. None gives everything back at the end.
      training: refuses what would make log-probs wrong to train on.
      timeout: seconds; the configured ones by default.
      version: computes all of it with this one.
      lineage: of the weights that may compute it; any by default.
      min_version: the oldest version that may begin it. The stream ends as
        `Unavailable` while the service has none such, or another lineage.
      request_id: to abort it by.

    Raises:
      ValueError: names what can't be.
      Overloaded: too many requests wait.
      Unavailable: the server is starting, draining, stopped or broken.
    """
    self._check_open()
    validate(ids, sampling, self.engine)
    if training:
      sampling.refuse_filtered()
    stream = Stream(request_id, self._cancel)
    opened = _Open(stream, own_session=session is None)
    with self._lock:
      if len(self._opened) >= self.config.max_requests:
        raise Overloaded(
          f"{len(self._opened)} requests are served or wait; serving."
          f"max_requests is {self.config.max_requests}"
        )
      if stream.request_id in self._opened:
        raise ValueError(f"request_id {request_id!r} is in use")
      self._opened[stream.request_id] = opened
    submit = functools.partial(
      self._submit,
      opened,
      session or f"\0{stream.request_id}",
      ids,
      sampling,
      lineage,
      min_version,
      training=training,
      timeout=self.config.timeout if timeout is None else timeout,
      version=version,
    )
    self._commands.put(submit)
    return stream

  def abort(self, request_id: str) -> bool:
    """Ends a request for its caller; whether there was one."""
    opened = self._opened.get(request_id)
    if opened is None:
      return False
    why = Aborted("the request was aborted")
    self._commands.put(functools.partial(self._end, opened.stream, why))
    return True

  def close_session(self, session: str) -> None:
    """Gives back what a session has; its requests end."""
    self._commands.put(functools.partial(self._close_session, session))

  async def update_weights(
    self,
    params: Any,
    version: int,
    *,
    abandon: bool = False,
    lineage: str = "",
  ) -> None:
    """Goes on with new weights between two steps.

    Args:
      params: from `Engine.place`.
      version: of these weights.
      abandon: they follow others than those that are held: see
        `Scheduler.adopt`.
      lineage: of these weights.

    Raises:
      ValueError: as `Scheduler.update_weights`.
      Unavailable: the service isn't running.
    """

    def update() -> None:
      if abandon:
        self._scheduler.adopt(params, version)
      else:
        caches: Any = self.config.caches
        self._scheduler.update_weights(params, version, caches)
      self._scheduler.lineage = lineage

    await self._ask(update)

  def pause(self) -> None:
    """Computes nothing until `resume`; requests wait, their time goes on."""
    self._paused = True
    self._commands.put(self._publish_load)

  def drain(self) -> None:
    """Takes no new requests until `resume`; those that run go on."""
    self._draining = True
    self._commands.put(self._publish_load)

  def resume(self) -> None:
    self._paused = self._draining = False
    self._commands.put(self._publish_load)

  async def drained(self, seconds: float) -> bool:
    """Whether every request ended within so many seconds."""
    limit = time.monotonic() + seconds
    while self._opened and time.monotonic() < limit:
      await asyncio.sleep(0.02)
    return not self._opened

  # On any thread, for the above.

  async def _ask(self, work: Callable[[], Any]) -> Any:
    self._check_alive()
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
      try:
        answer.set_result(work())
      except Exception as error:
        answer.set_exception(error)

    self._commands.put(run)
    while not answer.done():
      await asyncio.wait({asyncio.wrap_future(answer)}, timeout=1.0)
      if not answer.done():
        self._check_alive()
    return answer.result()

  def _check_open(self) -> None:
    self._check_alive()
    state = self._load.state
    if state == "starting":
      raise Unavailable("the server is starting; try again in a while")
    if self._draining:
      raise Unavailable("the server is draining; try another replica")

  def _check_alive(self) -> None:
    if self._failure is not None:
      raise Unavailable(f"the server failed: {_brief(self._failure)}")
    if self._stopping or not self._thread.is_alive():
      raise Unavailable("the server is stopped")

  # In the service's thread; all that touches the scheduler.

  def _run(self) -> None:
    try:
      self._scheduler = self._make_scheduler()
      self._scheduler.driven = True
      self._publish_load("serving")
      while not self._stopping:
        self._turn()
    except BaseException as error:
      logging.exception("the engine's thread failed")
      self._failure = error
    finally:
      self._give_up()

  def _turn(self) -> None:
    scheduler = self._scheduler
    idle = self._paused or not scheduler.busy
    self._obey(_IDLE_SECONDS if idle else 0)
    if self._stopping:
      return
    if not self._paused and scheduler.busy:
      finished = scheduler.step()
      self._steps += 1
    else:
      finished = scheduler.expire()
    self._deliver(finished)
    self._publish_load()

  def _obey(self, seconds: float) -> None:
    """Does what was asked for; waits for the first if there is time."""
    try:
      command = self._commands.get(timeout=seconds) if seconds else None
      while True:
        if command is not None:
          command()
        command = self._commands.get_nowait()
    except queue.Empty:
      pass

  def _submit(
    self,
    opened: _Open,
    session: str,
    ids: Sequence[int],
    sampling: Sampling,
    lineage: str | None,
    min_version: int,
    **how: Any,
  ) -> None:
    if opened.stream.request_id not in self._opened:
      return
    try:
      self._check_weights(lineage, min_version)
      request = self._scheduler.submit(session, ids, sampling, **how)
    except Exception as error:
      self._end(opened.stream, error)
      return
    opened.request = request
    self._by_request[request] = opened

  def _check_weights(self, lineage: str | None, min_version: int) -> None:
    scheduler = self._scheduler
    if lineage is not None and scheduler.lineage != lineage:
      raise Unavailable(
        f"the server has weights of lineage {scheduler.lineage!r}, not of"
        f" {lineage!r} yet"
      )
    if scheduler.version < min_version:
      raise Unavailable(
        f"the server has version {scheduler.version}, not {min_version} yet"
      )

  def _cancel(self, stream: Stream) -> None:
    """On any thread."""
    self._commands.put(functools.partial(self._end, stream, None))

  def _end(self, stream: Stream, error: Exception | None) -> None:
    """Forgets a request, and tells its caller why if there is a reason."""
    with self._lock:
      opened = self._opened.pop(stream.request_id, None)
    if opened is None:
      return
    if opened.request is not None:
      del self._by_request[opened.request]
      self._scheduler.cancel(opened.request)
      if opened.own_session:
        self._scheduler.close(opened.request.session)
    if error is not None:
      _post(stream.loop, stream.put, error)

  def _close_session(self, session: str) -> None:
    for request in self._scheduler.close(session):
      if (opened := self._by_request.get(request)) is not None:
        self._end(opened.stream, Aborted("the session was closed"))

  def _deliver(self, finished: list[Request]) -> None:
    """Hands every stream what is new, in one call an event loop."""
    parts: dict[Any, list[tuple[Stream, Sample | Exception]]] = {}
    for request, opened in self._by_request.items():
      if request.sampled > opened.sent and request.result is None:
        part = request.sample(None, opened.sent)
        parts.setdefault(opened.stream.loop, []).append((opened.stream, part))
        opened.sent = request.sampled
    for request in finished:
      if request not in self._by_request:
        continue
      opened = self._by_request[request]
      last: Sample | Exception
      if request.result is not None:
        last = request.sample(request.result.finish, opened.sent)
      else:
        last = request.error or Aborted("the request was cancelled")
      parts.setdefault(opened.stream.loop, []).append((opened.stream, last))
      self._end(opened.stream, None)
    for loop, items in parts.items():
      _post(loop, _put_all, items)

  def _give_up(self) -> None:
    with self._lock:
      left, self._opened = list(self._opened.values()), {}
    for opened in left:
      stream = opened.stream
      _post(stream.loop, stream.put, Unavailable("the server stopped"))
    self._by_request.clear()
    self._publish_load("stopped" if self._failure is None else "failed")

  def _publish_load(self, state: str | None = None) -> None:
    scheduler = getattr(self, "_scheduler", None)
    if scheduler is None:
      self._load = Load(state=state or "starting", version=-1)
      return
    self._load = Load(
      state=state or self._state(),
      version=scheduler.version,
      running=scheduler.running,
      waiting=scheduler.waiting,
      slots=self.engine.slots,
      slots_in_use=scheduler.slots_in_use,
      max_requests=self.config.max_requests,
      sampled_tokens=scheduler.sampled_tokens,
      prefilled_tokens=scheduler.prefilled_tokens,
      reused_tokens=scheduler.reused_tokens,
      steps=self._steps,
    )

  def _state(self) -> str:
    if self._draining:
      return "draining" if self._opened else "drained"
    return "paused" if self._paused else "serving"


def _put_all(items: list[tuple[Stream, Sample | Exception]]) -> None:
  for stream, part in items:
    stream.put(part)


def _post(
  loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any
) -> None:
  # A closed loop has nobody who waits.
  with contextlib.suppress(RuntimeError):
    loop.call_soon_threadsafe(function, *args)


def _brief(error: BaseException) -> str:
  return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
