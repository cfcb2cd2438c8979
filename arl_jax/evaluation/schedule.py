"""Which of the published versions is to be scored next."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from arl_jax.evaluation.scores import ScoreLog
from arl_jax.weights.manifest import Version
from arl_jax.weights.storage import MissingError, Place, Storage


class Published(NamedTuple):
  """What the run that publishes now has in its folder.

  Attributes:
    lineage: of that run.
    since: first version that was seen of it. The first that it published is a
      whole one, which stays until the next whole one, so that is it, unless
      nobody looked all that time.
    places: of its versions, oldest first.
  """

  lineage: str
  since: int
  places: tuple[Place, ...]


class Schedule:
  """Scores are due for each n-th version."""

  def __init__(self, folder: str | os.PathLike[str], every: int):
    """Reads nothing yet.

    Args:
      folder: of the published versions.
      every: versions from one that is scored to the next.
    """
    self._storage, self._every = Storage(folder), every
    # Of a term: its lineage and the first version seen.
    self._terms: dict[int, tuple[str, int]] = {}
    self._versions: dict[Place, Version] = {}

  def look(self) -> Published | None:
    """What is there; None before anything is published.

    Raises:
      DamagedError, OSError: see `Storage.manifest`.
    """
    places = self._storage.places()
    for term in sorted({p.term for p in places}, reverse=True):
      own = tuple(p for p in places if p.term == term)
      if term not in self._terms:
        first = next((v for p in own if (v := self._version(p))), None)
        if first is None:
          continue  # Its first version is being written.
        self._terms[term] = first.lineage, first.number
      return Published(*self._terms[term], own)
    return None

  def due(
    self,
    published: Published,
    log: ScoreLog,
    given_up: Collection[Version] = (),
  ) -> Version | None:
    """The newest version that is to be scored, None if there is none.

    Those that were due before it and have no scores are left out: an evaluator
    that falls behind doesn't stay behind.

    Args:
      published: from `look`.
      log: what is scored, with the lineage that publishes now.
      given_up: not to be tried again.

    Raises:
      DamagedError, OSError: see `Storage.manifest`.
    """
    done = max(
      (e.version for e in log.evaluations if not e.abandoned), default=-1
    )
    for place in reversed(published.places):
      if place.number < done:
        break
      if place.number % self._every:
        continue
      version = self._version(place)
      if version is None:
        continue  # Being written, or being removed.
      if version in given_up or log.has(*version):
        break
      return version
    return None

  def _version(self, place: Place) -> Version | None:
    if place not in self._versions:
      try:
        self._versions[place] = self._storage.manifest(place).version
      except MissingError:
        return None
    return self._versions[place]
