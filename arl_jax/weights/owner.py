"""Who publishes to a folder: one run at a time.

Each run that publishes claims the next term, in a file that only one can
create, and shows that it lives by counting in a second file. Another run is
refused as long as that count moves. It takes over where the owner has closed,
where the count stands still for as long as the owner's lease, or at once where
it goes on from a commit of the owner: whatever that one still does, it has been
given up, and its next publication is refused.

Clocks of different machines are never compared.
"""

from __future__ import annotations

import errno
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from arl_jax.checkpoints.failure import DamagedError
from arl_jax.weights import manifest
from arl_jax.weights.storage import MissingError, Storage

_KIND = "writers"
_CLAIM = re.compile(r"([0-9]{6})\.json")
# Beats in a lease: so many may be late before it ends.
_BEATS = 4
_RELEASED = "released"


class Owner:
  """The claim of one run on a folder.

  Attributes:
    term: place of this run's lineage among all.
  """

  def __init__(
    self,
    storage: Storage,
    lineage: Sequence[str],
    lease_s: float,
    *,
    at_beat: Callable[[], None] = lambda: None,
  ):
    """Claims the folder.

    Args:
      storage: of the folder.
      lineage: ids of the runs that led to this one, oldest first, its own last.
      lease_s: seconds without a sign of life after which others may take over.
      at_beat: called whenever life is shown; in another thread.

    Raises:
      OSError: another run publishes there (EBUSY), or the storage's own.
    """
    self._storage, self._lease_s = storage, lease_s
    self._at_beat = at_beat
    self._id = lineage[-1]
    self.term = self._claim(lineage)
    self._count = 0
    self._closed = threading.Event()
    self._beat()
    self._thread = threading.Thread(
      target=self._live, name="weights-owner", daemon=True
    )
    self._thread.start()

  def check(self) -> None:
    """Raises OSError (ESTALE) if another run has taken over."""
    newest = newest_term(self._storage)
    if newest > self.term:
      raise OSError(
        errno.ESTALE,
        f"lineage {self._id} was given up: {self._describe(newest)} publishes"
        f" to {self._storage.path} now",
      )

  def release(self) -> None:
    """Lets another run take over at once."""
    self._closed.set()
    self._thread.join()
    self._storage.write(self._file("beat"), _RELEASED)

  def _claim(self, lineage: Sequence[str]) -> int:
    term = newest_term(self._storage)
    if term:
      owner = _claimed(self._storage, term)
      if owner == self._id:
        raise OSError(
          errno.EBUSY,
          f"lineage {self._id} published to {self._storage.path} before; a run"
          " that goes on has a lineage of its own",
        )
      if owner not in lineage:
        self._wait_for(term)
    text = json.dumps({"lineage": self._id})
    path = self._storage.note(_KIND, f"{term + 1:06d}.json")
    if not self._storage.create(path, text):
      self._refuse(term + 1)
    return term + 1

  def _wait_for(self, term: int) -> None:
    """Returns when the owner of a term is gone. Raises OSError if it lives."""
    first = _beat_of(self._storage, term)
    if first == _RELEASED:
      return
    logging.warning(
      "%s hasn't released %s; waiting %.0f s to see whether it lives",
      self._describe(term),
      self._storage.path,
      self._lease_s,
    )
    until = time.monotonic() + self._lease_s
    while time.monotonic() < until:
      time.sleep(min(1.0, self._lease_s / (2 * _BEATS)))
      now = _beat_of(self._storage, term)
      if now == _RELEASED:
        return
      if now != first:
        self._refuse(term)

  def _refuse(self, term: int) -> None:
    raise OSError(
      errno.EBUSY,
      f"{self._describe(term)} publishes to {self._storage.path}; give this run"
      " another folder, or stop that one",
    )

  def _describe(self, term: int) -> str:
    return f"lineage {_claimed(self._storage, term) or 'unknown'} (term {term})"

  def _live(self) -> None:
    while not self._closed.wait(self._lease_s / _BEATS):
      try:
        self._beat()
        self._at_beat()
      except Exception:
        logging.exception("can't show life in %s", self._storage.path)

  def _beat(self) -> None:
    self._count += 1
    self._storage.write(self._file("beat"), str(self._count))

  def _file(self, ending: str) -> Any:
    return self._storage.note(_KIND, f"{self.term:06d}.{ending}")


def newest_term(storage: Storage) -> int:
  """Of the last run that claimed the folder, 0 if none did."""
  found = map(_CLAIM.fullmatch, storage.notes(_KIND))
  return max((int(m[1]) for m in found if m), default=0)


def _claimed(storage: Storage, term: int) -> str | None:
  """Lineage that has a term, None if its claim can't be read."""
  try:
    text = storage.read(storage.note(_KIND, f"{term:06d}.json"))
    return manifest.check_lineage(json.loads(text)["lineage"])
  except (ValueError, TypeError, KeyError, RecursionError):
    return None


def _beat_of(storage: Storage, term: int) -> str | None:
  try:
    return storage.read(storage.note(_KIND, f"{term:06d}.beat"))
  except (MissingError, DamagedError):
    return None
