"""An engine with its decode state; failures say which requests took part."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from arl_jax.rollout.request import Request


class EngineFailure(Exception):
  """The engine raised (the cause); its decode state may be gone.

  Attributes:
    suspects: requests that may have caused it.
  """

  def __init__(self, suspects: Sequence[Request]):
    super().__init__("the engine failed")
    self.suspects = suspects


class GuardedEngine:
  """Calls an engine with the one decode state that there is."""

  def __init__(self, engine: Any):
    self._engine = engine
    # None while the engine has it, and after a call that didn't return.
    self._state: Any = engine.init_decode_state()
    self._to_stop: set[int] = set()
    # Devices work asynchronously: a call may raise what an earlier one did,
    # back to the last generate call, which waits for its result.
    self._unproven: list[Request] = []

  @property
  def alive(self) -> bool:
    return self._state is not None

  def renew(self) -> None:
    """Empties all slots; raises what the engine raises."""
    self._state = None
    self._unproven.clear()
    self._state = self._engine.init_decode_state()

  def stop(self, slot: int) -> None:
    """Notes that a slot stops sampling; `stop_noted` does it."""
    self._to_stop.add(slot)

  def stop_noted(self) -> None:
    while self._to_stop:
      slot = self._to_stop.pop()
      with self._blaming([]):
        self._state = self._engine.free_resource(slot, self._take())

  def extend(
    self,
    batch: Sequence[Request],
    params: Any,
    rows: Mapping[int, tuple[int, Sequence[int]]],
  ) -> None:
    with self._blaming(batch):
      self._state = self._engine.extend(params, self._take(), rows)

  def copy_prefix(self, request: Request, source: int, length: int) -> None:
    with self._blaming([request]):
      self._state = self._engine.copy_prefix(
        self._take(), source, request.slot, length
      )

  def clear(self, request: Request) -> None:
    with self._blaming([request]):
      self._state = self._engine.clear(self._take(), request.slot)

  def start(self, request: Request) -> None:
    with self._blaming([request]):
      self._state = self._engine.start(
        self._take(), request.slot, request.sampling, sampled=request.sampled
      )

  def generate(self, batch: Sequence[Request], params: Any) -> Any:
    """Returns the engine's ResultTokens."""
    with self._blaming(batch):
      self._state, burst = self._engine.generate(
        params, self._take(), [r.slot for r in batch]
      )
    self._unproven.clear()
    return burst

  def _take(self) -> Any:
    """The state, for a call that gives it back."""
    state, self._state = self._state, None
    return state

  @contextlib.contextmanager
  def _blaming(self, batch: Sequence[Request]) -> Iterator[None]:
    self._unproven += batch
    try:
      yield
    except Exception as error:
      # Its frames would keep the old state's memory.
      traceback.clear_frames(error.__traceback__)
      raise EngineFailure(list(dict.fromkeys(self._unproven))) from error
