"""A server's side: takes in what a learner publishes."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from arl_jax.checkpoints.failure import DamagedError
from arl_jax.weights import delta, manifest, shards
from arl_jax.weights.chain import Loaded, Loader, widens
from arl_jax.weights.manifest import Manifest, Version
from arl_jax.weights.owner import newest_term
from arl_jax.weights.readers import Reader
from arl_jax.weights.storage import MissingError, Place, Storage

# Versions can go while they are read, each time for a newer one.
_TRIES = 3


class Fetched(NamedTuple):
  """Weights, verified.

  Attributes:
    version: their identity.
    params: in the structure of the subscriber's `like`: arrays on devices
      where that has shardings, otherwise numpy's, which can't be written.
    applied: versions read; 0 if it was held already.
    bytes: read of arrays.
    seconds: that it took.
  """

  version: Version
  params: Any
  applied: int
  bytes: int
  seconds: float


class Subscriber:
  """Follows the versions in a folder.

  It holds one version in host memory, the boxes that its own devices need, and
  gets to the next by the differences. What it holds is replaced as a whole,
  once all of the new is verified; whatever goes wrong before that leaves it as
  it was. Methods may be called from any thread.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    like: Any,
    *,
    lease_s: float = 60.0,
  ):
    """Reads nothing yet.

    Args:
      folder: local, or gs:// or s3://.
      like: a pytree of `jax.ShapeDtypeStruct` or arrays: what is wanted. Each
        process of a job gives the same tree, with shardings. Published floats
        are widened to its dtypes; any other difference is an error.
      lease_s: seconds for which what is being read stays in the folder if this
        process dies.
    """
    if not 0 < lease_s < float("inf"):
      raise ValueError(f"lease_s is {lease_s}, not a number of seconds > 0")
    self._storage = Storage(folder)
    self._like = like
    self._wanted = shards.named(like)
    self._reader = Reader(self._storage, lease_s)
    self._workers = ThreadPoolExecutor(
      min(16, os.cpu_count() or 1), "weights-worker"
    )
    self._background = ThreadPoolExecutor(1, "weights")
    self._loader = Loader(self._storage, self._wanted, self._workers)
    self._held: Loaded | None = None
    self._lock = threading.Lock()

  @property
  def held(self) -> Version | None:
    """What was fetched last, None before that."""
    return None if self._held is None else self._held.manifest.version

  def newest(self) -> Version | None:
    """The newest version of the run that publishes now.

    Until that run has published, it is the last one of the run before; but
    then one that is held isn't left for it any more.

    Returns:
      None if nothing is published.

    Raises:
      DamagedError, ValueError: its manifest can't be used.
      OSError: the storage's.
    """
    found = self._newest()
    return None if found is None else found[1].version

  def fetch(self, number: int | None = None) -> Fetched:
    """Reads a version, verifies it, places it, and holds it from then on.

    Only what isn't held is read: differences if they lead there from what is
    held, otherwise the nearest base and what follows.

    Args:
      number: of a version of the run that publishes now, by default its
        newest.

    Raises:
      MissingError: there is no such version, or what it needs isn't there.
      DamagedError: a file isn't as it was written.
      ValueError: the version doesn't fit `like`, or is another program's.
      OSError: the storage's.
    """
    began = time.monotonic()
    with self._lock:
      loaded, applied, read = self._load(number)
      params = self._placed(loaded)
      self._held = loaded
    seconds = time.monotonic() - began
    return Fetched(loaded.manifest.version, params, applied, read, seconds)

  def start_fetch(self, number: int | None = None) -> Future[Fetched]:
    """`fetch` in the background; one at a time."""
    return self._background.submit(self.fetch, number)

  def verify(self, params: Any) -> None:
    """Checks that arrays are, bit for bit, the version that is held.

    Args:
      params: as `like`, in the dtypes that were published or wider ones; on
        devices or not.

    Raises:
      ValueError: nothing is held, or a leaf is missing.
      DamagedError: names the first leaf that has other bits.
    """
    held = self._held
    if held is None:
      raise ValueError("no version is held that could be verified")
    self._loader.verify(held)
    leaves = shards.named(params)
    for name, parts in _arrays(held).items():
      if name not in leaves:
        raise ValueError(f"{name} is missing")
      dtype = manifest.dtype(held.manifest.tensors[name].dtype)
      for box, array in shards.held(leaves[name]).items():
        right = shards.assembled(box, parts, dtype)
        same = array.shape == right.shape and widens(dtype, array.dtype)
        right = right.astype(array.dtype, copy=False)
        if not same or (delta.words(array) != delta.words(right)).any():
          raise DamagedError(
            f"{name} isn't what version {held.manifest.version} has there"
          )

  def close(self) -> None:
    """Gives back threads and leases."""
    self._background.shutdown()
    self._workers.shutdown()
    self._reader.close()

  def _newest(self) -> tuple[Place, Manifest] | None:
    term = newest_term(self._storage)
    for place in reversed(self._storage.places()):
      if place.term < term and self._held is not None:
        # A run that was given up may still publish; what is held stays.
        return self._held.place, self._held.manifest
      try:
        return place, self._storage.manifest(place)
      except MissingError:
        continue  # Being written, or being removed.
    if self._held is not None:
      return self._held.place, self._held.manifest
    return None

  def _find(self, number: int | None) -> tuple[Place, Manifest]:
    if number is None:
      found = self._newest()
      if found is None:
        raise MissingError(f"{self._storage.path} holds no version")
      return found
    places = self._storage.places()
    last = max((p.term for p in places), default=0)
    place = Place(last, number)
    if place not in places:
      there = [str(p.number) for p in places if p.term == last]
      raise MissingError(
        f"{self._storage.path} holds no version {number}, only"
        f" {', '.join(there) or 'none'}"
      )
    return place, self._storage.manifest(place)

  def _load(self, number: int | None) -> tuple[Loaded, int, int]:
    """The version, how many were read for it, and how many bytes."""
    for tried in range(1, _TRIES + 1):
      place, found = self._find(number)
      if self._held is not None and found.version == self.held:
        return self._held, 0, 0
      try:
        return self._reached(place, found)
      except MissingError:
        if tried == _TRIES or self._find(number)[0] == place:
          raise
    raise AssertionError

  def _reached(self, place: Place, found: Manifest) -> tuple[Loaded, int, int]:
    self._loader.check_fits(found)
    held = self._held
    for start in [held, None] if held else [None]:
      try:
        chain = self._loader.chain(place, found, start)
        with self._reader.holding([p for p, _ in chain]):
          loaded, read = self._loader.load(chain, start)
      except (DamagedError, MissingError) as error:
        failed = error
        logging.warning("can't get to version %s: %s", found.version, error)
        continue
      self._reader.ask_for_base(None)
      return loaded, len(chain), read
    self._reader.ask_for_base(place)
    raise failed

  def _placed(self, loaded: Loaded) -> Any:
    arrays = _arrays(loaded)
    leaves = [
      shards.placed(
        leaf,
        arrays.get(name, {}),
        manifest.dtype(loaded.manifest.tensors[name].dtype),
      )
      for name, leaf in self._wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(self._like), leaves)


def _arrays(loaded: Loaded) -> dict[str, dict[shards.Box, np.ndarray]]:
  """Boxes of each tensor, in its dtype."""
  found: dict[str, dict[shards.Box, np.ndarray]] = {}
  for (name, box), words in loaded.words.items():
    dtype = manifest.dtype(loaded.manifest.tensors[name].dtype)
    shape = [b - a for a, b in zip(*box, strict=True)]
    found.setdefault(name, {})[box] = words.view(dtype).reshape(shape)
  return found
