"""Recorded conversations by name, bounded in number, size and time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from arl_jax.rollout.request import Overloaded
from arl_jax.serving.body import Body, Malformed
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.recorder import Recording
from arl_jax.types import Episode, Reward, StopReason


class UnknownSession(KeyError):
  """No session has this name, or not any more."""

  def __str__(self) -> str:
    return f"session {self.args[0]!r} isn't there, or not any more"


class Sessions:
  """Recordings of the conversations that harnesses have open.

  Attributes:
    opened: sessions since the start.
    expired: of them, those that were idle for too long.
  """

  def __init__(
    self,
    config: ServingConfig,
    on_close: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    """Args: on_close: gives back what the engine keeps for a session."""
    self._config, self._on_close, self._clock = config, on_close, clock
    # Least recently used first.
    self._open: dict[str, tuple[Recording, float]] = {}
    self.opened = self.expired = 0

  def __len__(self) -> int:
    return len(self._open)

  def use(self, name: str) -> Recording:
    """The session's recording, a new one if there is none.

    Raises:
      Malformed: the recording is as long as it may be.
      Overloaded: too many sessions are open.
    """
    self.expire()
    if name not in self._open and len(self._open) >= self._config.max_sessions:
      raise Overloaded(
        f"{len(self._open)} sessions are open, and serving.max_sessions is"
        f" {self._config.max_sessions}; finish some"
      )
    if name not in self._open:
      self.opened += 1
    recording, _ = self._open.pop(name, (Recording(), 0.0))
    self._open[name] = recording, self._clock()
    limit = self._config.max_session_tokens
    if recording.tokens > limit:
      raise Malformed(
        "session", f"has {recording.tokens} tokens, of {limit} at most"
      )
    return recording

  def get(self, name: str) -> Recording:
    """Raises `UnknownSession` if there is none."""
    if name not in self._open:
      raise UnknownSession(name)
    return self._open[name][0]

  def close(self, name: str) -> Recording:
    """Forgets a session. Raises `UnknownSession` if there is none."""
    recording = self.get(name)
    del self._open[name]
    self._on_close(name)
    return recording

  def expire(self) -> None:
    """Forgets sessions that nobody has used for long."""
    limit = self._clock() - self._config.session_seconds
    idle: list[str] = []
    for name, (recording, used) in self._open.items():
      if used > limit:
        break
      if not recording.running:
        idle.append(name)
    for name in idle:
      self.expired += 1
      self.close(name)


def episode(
  name: str, recording: Recording, fields: Mapping[str, Any]
) -> Episode:
  """The record of a conversation.

  Args:
    name: of the session; the task's id if `fields` has none.
    recording: of it.
    fields: JSON of what the harness says of it: task_id, rollout_index,
      stop_reason, outcome, reward {total, parts}.

  Raises:
    Malformed: names the field that can't be.
  """
  body = Body(dict(fields))
  reasons = [r.value for r in StopReason]
  reason = body.take(
    "stop_reason", lambda x: x in reasons, f"one of {reasons}", "answered"
  )
  outcome = body.take("outcome", lambda x: type(x) is dict, "an object", {})
  reward = body.take("reward", _is_reward, _REWARD)
  task_id = body.text("task_id", name)
  index = body.integer("rollout_index", 0)
  body.finish()
  return Episode(
    task_id=task_id,
    rollout_index=index,
    segments=recording.segments(),
    events=(),
    stop_reason=StopReason(reason),
    outcome=outcome,
    turns=recording.turns,
    reward=None if reward is None else Reward(**reward),
  )


_REWARD = 'an object {"total": number, "parts": {name: number}}'
_LARGEST = sys.float_info.max


def _is_reward(x: Any) -> bool:
  if type(x) is not dict or not {"total"} <= x.keys() <= {"total", "parts"}:
    return False
  parts = x.get("parts", {})
  if type(parts) is not dict:
    return False
  return all(
    type(v) in (int, float) and -_LARGEST <= v <= _LARGEST
    for v in (x["total"], *parts.values())
  )
