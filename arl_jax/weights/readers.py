"""What servers tell the publisher through small files of their own.

A reader lists the versions that it is about to read, so that they stay, and
asks for a whole version where it found a chain damaged. It counts in its file
as long as it reads; a file that stands still is one of a dead reader.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import logging

from arl_jax.checkpoints.failure import DamagedError
from arl_jax.weights.storage import MissingError, Storage

_KIND = "readers"
_BEATS = 4
_LONGEST_LEASE_S = 3600.0


class Note(NamedTuple):
  """What one reader says.

  Attributes:
    needs: names of versions that must stay.
    damaged: name of a version that it couldn't get to, "" if there is none.
    lease_s: seconds for which that holds if the reader shows no life.
  """

  needs: tuple[str, ...]
  damaged: str
  lease_s: float


class Reader:
  """A reader's side."""

  def __init__(self, storage: Storage, lease_s: float):
    """Says nothing yet.

    Args:
      storage: of the folder.
      lease_s: seconds for which versions stay if this process dies.
    """
    self._storage, self._lease_s = storage, lease_s
    self._path = storage.note(_KIND, f"{uuid.uuid4().hex}.json")
    self._note = Note((), "", lease_s)
    self._count = 0
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def holding(self, needs: Sequence[Any]) -> Iterator[None]:
    """Has versions stay while they are read."""
    self._say(self._note._replace(needs=tuple(map(str, needs))))
    done = threading.Event()
    thread = threading.Thread(
      target=self._live, args=(done,), name="weights-reader", daemon=True
    )
    thread.start()
    try:
      yield
    finally:
      done.set()
      thread.join()
      self._say(self._note._replace(needs=()))

  def ask_for_base(self, damaged: Any) -> None:
    """Asks for a whole version after `damaged`; None takes it back."""
    self._say(self._note._replace(damaged=str(damaged or "")))

  def close(self) -> None:
    with contextlib.suppress(OSError):
      self._path.unlink(missing_ok=True)

  def _say(self, note: Note) -> None:
    with self._lock:
      self._note = note
      self._count += 1
      if not (note.needs or note.damaged):
        self.close()
        return
      body = {**note._asdict(), "count": self._count}
      try:
        self._storage.write(self._path, json.dumps(body))
      except OSError as error:
        # Reading works on storage that can't be written, too.
        logging.log_every_n_seconds(
          logging.WARNING, "can't write %s: %s", 600, self._path, error
        )

  def _live(self, done: threading.Event) -> None:
    while not done.wait(self._lease_s / _BEATS):
      self._say(self._note)


class Readers:
  """The publisher's side: the notes of all readers that live."""

  def __init__(
    self, storage: Storage, clock: Callable[[], float] = time.monotonic
  ):
    self._storage, self._clock = storage, clock
    # By file: what it says, and since when.
    self._seen: dict[str, tuple[str, float]] = {}

  def notes(self) -> list[Note]:
    """Of readers that show life; files of others are deleted."""
    found = []
    seen: dict[str, tuple[str, float]] = {}
    for name in self._storage.notes(_KIND):
      path = self._storage.note(_KIND, name)
      try:
        text = self._storage.read(path)
      except MissingError:
        continue
      except DamagedError:
        text = ""
      old, since = self._seen.get(name, (None, 0.0))
      since = since if old == text else self._clock()
      note = _parsed(text)
      if self._clock() - since > note.lease_s:
        path.unlink(missing_ok=True)
        continue
      seen[name] = text, since
      found.append(note)
    self._seen = seen
    return found


def _parsed(text: str) -> Note:
  """A note; one that can't be understood says nothing."""
  try:
    body = json.loads(text)
    needs, damaged = body["needs"], body["damaged"]
    lease_s = min(max(float(body["lease_s"]), 0.0), _LONGEST_LEASE_S)
    if not isinstance(damaged, str) or not all(
      isinstance(name, str) for name in needs
    ):
      raise TypeError("names are texts")
    return Note(tuple(needs), damaged, lease_s)
  except (ValueError, TypeError, KeyError, RecursionError):
    return Note((), "", _LONGEST_LEASE_S)
