"""Which versions go, when nobody needs them or the room is short."""

from __future__ import annotations

import errno
from collections.abc import Collection

from arl_jax.weights.readers import Readers
from arl_jax.weights.storage import Place, Storage


class Collector:
  """Removes versions for the run that publishes."""

  def __init__(self, storage: Storage, readers: Readers, quota: int | None):
    """Knows the limits.

    Args:
      storage: of the folder.
      readers: who may need versions.
      quota: bytes that all versions may take, None for no limit.
    """
    self._storage, self._readers, self._quota = storage, readers, quota
    self._sizes: dict[Place, int] = {}

  def sweep(self, term: int) -> None:
    """Removes what runs that were killed left half written.

    Args:
      term: of the run that publishes now.
    """
    for place in self._storage.places():
      if place.term < term and not self._storage.has_manifest(place):
        self._storage.remove(place)

  def make_room(
    self, place: Place, needed: int, staying: Collection[Place]
  ) -> None:
    """Removes the oldest versions as far as the quota asks for it.

    Args:
      place: of the version to come.
      needed: bytes that it takes.
      staying: the newest chain, which never goes.

    Raises:
      OSError: there can't be enough room (EDQUOT). Nothing is removed then.
    """
    if self._quota is None:
      return
    sizes = self._measured(place)
    surplus = sum(sizes.values()) + needed - self._quota
    going = [p for p in sorted(sizes) if p not in staying]
    if surplus > sum(sizes[p] for p in going):
      raise OSError(
        errno.EDQUOT,
        f"it needs {needed} bytes, but the quota is {self._quota} bytes, and"
        f" {sum(sizes[p] for p in staying if p in sizes)} of them are taken by"
        " the version that is served now and what it is made from",
      )
    # Those that a reader holds last.
    held = self._held()
    for old in sorted(going, key=lambda p: (str(p) in held, p)):
      if surplus <= 0:
        return
      surplus -= sizes[old]
      self.remove(old)

  def collect(self, staying: Collection[Place]) -> None:
    """Removes versions that aren't `staying` and that no reader holds."""
    held = self._held()
    for place in self._storage.places():
      if place not in staying and str(place) not in held:
        self.remove(place)

  def _held(self) -> set[str]:
    return {name for note in self._readers.notes() for name in note.needs}

  def _measured(self, but: Place) -> dict[Place, int]:
    """Bytes of each version that is there, but for one."""
    self._sizes = {
      p: self._sizes[p] if p in self._sizes else self._storage.size(p)
      for p in self._storage.places()
      if p != but
    }
    return dict(self._sizes)

  def remove(self, place: Place) -> None:
    """Deletes a version."""
    self._sizes.pop(place, None)
    self._storage.remove(place)
