"""The processes of a learner that spans several hosts."""

from __future__ import annotations

import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from arl_jax.actors.jobs import Interrupted
from arl_jax.cluster.config import ClusterConfig
from arl_jax.queueing import messages
from arl_jax.queueing.group_queue import Batch
from arl_jax.records import from_json, to_json
from arl_jax.runtime import distributed_job
from arl_jax.runtime.distributed_job import JobHosts
from arl_jax.types import Episode

T = TypeVar("T")

# Seconds between two looks at whether the first process gets on, and between
# two of its notes that it does.
_LOOK_SECONDS = 1.0
# Bytes that are sent at once, at least and at most: each size is compiled.
_LEAST, _MOST = 1 << 12, 1 << 24
_ALIVE, _FAILED = "arl/alive", "arl/failed"
_KINDS: dict[str, type[Exception]] = {
  "interrupted": Interrupted,
  "ValueError": ValueError,
  "TimeoutError": TimeoutError,
  "OSError": OSError,
}


class Form(NamedTuple, Generic[T]):
  """How a value is sent: `read` is the inverse of `write`."""

  write: Callable[[T], bytes]
  read: Callable[[bytes], T]


def _write_batch(batch: Batch) -> bytes:
  header = messages.pack_json(messages.batch_to_json(batch))
  return header + b"".join(map(messages.pack_group, batch.groups))


def _read_batch(body: bytes) -> Batch:
  return messages.read_batch(messages.unpack(body, messages.MAX_GROUPS[1]))


def _write_episodes(episodes: Sequence[Episode]) -> bytes:
  return b"".join(messages.pack_json(to_json(e)) for e in episodes)


def _read_episodes(body: bytes) -> list[Episode]:
  found = []
  for line in messages.unpack(body, messages.MAX_GROUPS[1]):
    episode = from_json(json.loads(line))
    if not isinstance(episode, Episode):
      raise ValueError(f"a {type(episode).__name__}, not an Episode")
    found.append(episode)
  return found


JSON: Form[Any] = Form(lambda value: json.dumps(value).encode(), json.loads)
BATCH = Form(_write_batch, _read_batch)
EPISODES: Form[list[Episode]] = Form(_write_episodes, _read_episodes)
# For what only the first process needs.
NOTHING: Form[Any] = Form(lambda value: b"", lambda body: None)


class RunFolder(NamedTuple):
  """A run's folder, as a process sees that doesn't own it.

  Attributes:
    path: where all processes of the learner find it.
    resumed: whether the run goes on.
  """

  path: pathlib.Path
  resumed: bool


class LearnerHosts(JobHosts):
  """All processes of one learner: a `jax.distributed` job.

  They make the same calls in the same order, with the same experience. The
  first one alone talks to the queue, owns the run's folder and decides; the
  others hear from it. A context manager; with one process, which is what
  `LearnerHosts()` stands for, nothing is sent and nobody is waited for.

  A process that dies takes the job with it: the others are ended by
  `jax.distributed` within `cluster.lost_seconds`, or sooner by the supervisor.

  Attributes:
    index: of this process.
    count: of all.
  """

  def __init__(
    self,
    cluster: ClusterConfig | None = None,
    index: int = 0,
    *,
    on_wait: Callable[[], None] = lambda: None,
  ):
    """Connects to nothing yet.

    Args:
      cluster: with the job's size and coordinator; None for one process.
      index: of this process.
      on_wait: called at least every few seconds while the first process is
        waited for.

    Raises:
      ValueError: there is no such process, or no coordinator.
    """
    count = 1 if cluster is None else cluster.learners
    cluster = cluster or ClusterConfig()
    if not 0 <= index < count:
      raise ValueError(
        f"--index is {index}, but cluster.learners is {count}: the learner's"
        f" processes are 0 to {count - 1}"
      )
    if count > 1 and not cluster.coordinator:
      raise ValueError(
        f"cluster.coordinator is empty; {count} learner processes need an"
        " address of the first one's host, such as 10.0.0.7:7001"
      )
    member = distributed_job.Member(
      "the learner",
      "learner {}",
      index,
      count,
      "cluster.learners",
      cluster.coordinator,
      "cluster.coordinator",
    )
    super().__init__(member, cluster, "learner.mesh")
    self._on_wait = on_wait
    # Of what the first process has told so far.
    self._told = 0
    self._noted, self._notes = -math.inf, 0

  def _end(self, error: BaseException | None) -> None:
    if self.first and error is not None:
      self._board.put(_FAILED, str(error))
    distributed_job.leave()

  def progress(self) -> None:
    """Notes that the first process gets on, for those who wait for it."""
    now = time.monotonic()
    if self.count == 1 or not self.first or now < self._noted + _LOOK_SECONDS:
      return
    self._noted = now
    self._notes += 1
    self._board.put(_ALIVE, str(self._notes))

  def told(self, work: Callable[[], T], form: Form[T] = JSON) -> T:
    """What `work` gives in the first process; all must come here together.

    It is called there alone. It may take long, as long as it calls `progress`.

    Args:
      work: makes no collective operation.
      form: how the result is sent.

    Raises:
      Interrupted, ValueError, OSError, TimeoutError: as `work` did; elsewhere
        a RuntimeError stands for any other error of it.
      TimeoutError: the first process didn't get on in `cluster.stall_seconds`.
    """
    if self.count == 1:
      return work()
    key = f"arl/told/{self._told}"
    self._told += 1
    if not self.first:
      return self._hear(key, form)
    try:
      value = work()
      body = form.write(value)
      if len(body) > messages.MAX_GROUPS[0]:
        raise ValueError(
          f"{len(body)} bytes for the learner's other processes are above"
          f" {messages.MAX_GROUPS[0]}; take fewer groups a step"
        )
    except BaseException as error:
      self._tell(key, _kind(error), str(error).encode()[:_LEAST])
      raise
    self._tell(key, "value", body)
    return value

  def alone(self, work: Callable[[], T]) -> T | None:
    """As `told`, but where only the first process needs the result."""
    return self.told(work, NOTHING)

  def gathered(self, tree: Any) -> Any:
    """Arrays for the first process alone, from all processes together.

    Returns:
      The tree in the first process's memory, None in the others; as it is if
      there is one process.
    """
    if self.count == 1:
      return tree

    def gather(leaf: jax.Array) -> Any:
      whole = multihost_utils.process_allgather(leaf, tiled=True)
      return whole if self.first else None

    gathered = jax.tree.map(gather, tree)
    return gathered if self.first else None

  def _tell(self, key: str, kind: str, body: bytes) -> None:
    self._board.put(key, f"{kind} {len(body)}")
    self._broadcast(body, len(body))
    # All have read it: they took part in the broadcast.
    self._board.remove(key)

  def _hear(self, key: str, form: Form[T]) -> T:
    kind, _, size = self._await(key).partition(" ")
    body = self._broadcast(b"", int(size))
    if kind == "value":
      return form.read(body)
    message = body.decode("utf-8", errors="replace")
    if kind in _KINDS:
      raise _KINDS[kind](message)
    raise RuntimeError(f"the learner's first process failed: {message}")

  def _await(self, key: str) -> str:
    """The value of a key that the first process is about to set."""
    stall = self._cluster.stall_seconds
    limit, seen = time.monotonic() + stall, ""
    while True:
      self._on_wait()
      found = self._board.look(key, _LOOK_SECONDS)
      if found is not None:
        return found
      if (failure := self._board.look(_FAILED)) is not None:
        raise RuntimeError(f"the learner's first process failed: {failure}")
      alive = self._board.look(_ALIVE) or ""
      if alive != seen:
        limit, seen = time.monotonic() + stall, alive
      if time.monotonic() > limit:
        raise TimeoutError(
          f"waited {stall:.0f} s (cluster.stall_seconds) for the learner's"
          " first process, which doesn't get on"
        )

  def _broadcast(self, body: bytes, size: int) -> bytes:
    """The first process's `size` bytes, by way of the accelerators."""
    part = min(_MOST, max(_LEAST, 1 << max(size - 1, 0).bit_length()))
    found = bytearray()
    # At least once, even if there is nothing to send: see `_tell`.
    for start in range(0, max(size, 1), part):
      sent = np.zeros(part, np.uint8)
      piece = np.frombuffer(body[start : start + part], np.uint8)
      sent[: piece.size] = piece
      found += multihost_utils.broadcast_one_to_all(sent).tobytes()
    return bytes(found[:size])


def _kind(error: BaseException) -> str:
  """The nearest of `_KINDS`, or "error"."""
  for name, kind in _KINDS.items():
    if isinstance(error, kind):
      return name
  return "error"
