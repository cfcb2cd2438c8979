"""From a base or a version that is held to a later one, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np

from arl_jax.checkpoints.failure import DamagedError
from arl_jax.weights import delta, manifest, shards
from arl_jax.weights.manifest import Manifest, Part
from arl_jax.weights.storage import (
  MissingError,
  Place,
  Storage,
  read_range,
)
from arl_jax.weights.version_files import Key

# Of decoded bytes that one worker reads before another takes over.
_TURN_BYTES = 32 << 20

Chain = Sequence[tuple[Place, Manifest]]


class Loaded(NamedTuple):
  """A version in host memory, verified.

  Attributes:
    place: where it came from.
    manifest: its own.
    words: [n] of each box that was wanted; they can't be written.
  """

  place: Place
  manifest: Manifest
  words: Mapping[Key, np.ndarray]


class Loader:
  """Reads the boxes that one process needs."""

  def __init__(
    self, storage: Storage, wanted: Mapping[str, Any], workers: Executor
  ):
    """Reads nothing yet.

    Args:
      storage: of the folder.
      wanted: leaves with shape, dtype and maybe sharding by name.
      workers: threads that read and decode.
    """
    self._storage, self._workers = storage, workers
    self._wanted = wanted
    self._boxes = {name: shards.needed(leaf) for name, leaf in wanted.items()}

  def check_fits(self, found: Manifest) -> None:
    """Raises ValueError naming the first leaf that a version can't fill."""
    for name, leaf in self._wanted.items():
      if name not in found.tensors:
        raise ValueError(f"version {found.version} has no tensor {name}")
      tensor = found.tensors[name]
      there = f"{tensor.dtype}{list(tensor.shape)}"
      here = f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
      if tensor.shape != tuple(leaf.shape) or not widens(
        manifest.dtype(tensor.dtype), np.dtype(leaf.dtype)
      ):
        raise ValueError(
          f"{name} of version {found.version} is {there}, {here} is wanted"
        )
    if surplus := sorted(found.tensors.keys() - self._wanted.keys()):
      raise ValueError(
        f"version {found.version} has a tensor {surplus[0]}, which isn't wanted"
      )

  def chain(self, place: Place, found: Manifest, start: Loaded | None) -> Chain:
    """What has to be read to get to a version, in order.

    Args:
      place: of the version.
      found: its manifest.
      start: what is held; None if the chain must begin with a base.

    Raises:
      MissingError: a version that the chain needs isn't there, or another one
        is in its place.
      DamagedError, ValueError: a manifest can't be used.
    """
    chain = [(place, found)]
    while (base := found.base) is not None:
      if start is not None and start.manifest.version == base:
        break
      needing, place = found, Place(place.term, base.number)
      try:
        found = self._storage.manifest(place)
      except MissingError as error:
        raise MissingError(
          f"version {needing.version} needs {base}, which isn't there: {error}"
        ) from error
      if found.version != base:
        raise MissingError(
          f"version {needing.version} needs {base}, but there is"
          f" {found.version}"
        )
      self.check_fits(found)
      chain.append((place, found))
    return chain[::-1]

  def load(self, chain: Chain, start: Loaded | None) -> tuple[Loaded, int]:
    """Reads a chain and verifies where it leads.

    Args:
      chain: from `chain`.
      start: as given there; left as it is.

    Returns:
      The version at the chain's end, and how many bytes were read.

    Raises:
      MissingError: a file isn't there any more.
      DamagedError: a file, or what it makes, isn't what was published.
    """
    words: dict[Key, np.ndarray] = {}
    if chain[0][1].base is not None:
      assert start is not None
      words.update(start.words)
    read = 0
    own: set[Key] = set()  # Boxes that aren't `start`'s.
    for place, step in chain:
      turns = [
        self._workers.submit(self._apply, place, turn, words, own)
        for turn in _turns(self._needed(step))
      ]
      # All end before anything is raised: they work on the same arrays.
      errors = [turn.exception() for turn in turns]
      for error in errors:
        if error is not None:
          raise error
      for turn in turns:
        changed, size = turn.result()
        words.update(changed)
        own.update(changed)
        read += size
    place, last = chain[-1]
    kept = {key: _old(key, words, place) for key, _ in self._needed(last)}
    for line in kept.values():
      line.flags.writeable = False
    loaded = Loaded(place, last, kept)
    self.verify(loaded)
    return loaded, read

  def _needed(self, step: Manifest) -> list[tuple[Key, Part]]:
    """Parts that share elements with what is wanted, as they lie in files."""
    found = [
      ((name, (part.start, part.stop)), part)
      for name, boxes in self._boxes.items()
      for part in step.tensors[name].parts
      if any(shards.meets((part.start, part.stop), box) for box in boxes)
    ]
    return sorted(found, key=lambda item: (item[1].file, item[1].offset))

  def _apply(
    self,
    place: Place,
    turn: Sequence[tuple[Key, Part]],
    words: Mapping[Key, np.ndarray],
    own: set[Key],
  ) -> tuple[dict[Key, np.ndarray], int]:
    """New words of some boxes of one file, and how many bytes were read."""
    path = self._storage.version(place) / turn[0][1].file
    changed: dict[Key, np.ndarray] = {}
    try:
      with path.open("rb") as file:
        for key, part in turn:
          data = np.empty(part.bytes, np.uint8)
          read_range(file, path, part.offset, data)
          if manifest.checksum(data) != part.payload:
            raise DamagedError(
              f"{path} has other bytes than were written, in {key[0]}"
            )
          if part.encoding == delta.WHOLE:
            changed[key] = delta.words(data)
          else:
            line = _old(key, words, path)
            line = line if key in own else line.copy()
            delta.apply(line, part.encoding, part.entries, data)
            changed[key] = line
    except FileNotFoundError as error:
      raise MissingError(f"{path} isn't there (any more)") from error
    return changed, sum(part.bytes for _, part in turn)

  def verify(self, loaded: Loaded) -> None:
    """Raises DamagedError unless each box is what was published."""
    needed = self._needed(loaded.manifest)
    sums = self._workers.map(
      lambda item: manifest.checksum(loaded.words[item[0]]), needed
    )
    for ((name, _), part), found in zip(needed, sums, strict=True):
      if found != part.content:
        raise DamagedError(
          f"{name} of version {loaded.manifest.version} has checksum {found}"
          f" here, {part.content} was published"
        )


def _old(key: Key, words: Mapping[Key, np.ndarray], where: Any) -> np.ndarray:
  if key not in words:
    raise DamagedError(f"{where} changes a box of {key[0]} that its base lacks")
  return words[key]


def _turns(
  needed: Sequence[tuple[Key, Part]],
) -> Iterator[list[tuple[Key, Part]]]:
  """Neighbours in one file, so many that a worker is busy for a while."""
  turn: list[tuple[Key, Part]] = []
  size = 0
  for key, part in needed:
    if part.encoding == delta.SAME:
      continue
    if turn and (part.file != turn[0][1].file or size >= _TURN_BYTES):
      yield turn
      turn, size = [], 0
    turn.append((key, part))
    size += part.bytes
  if turn:
    yield turn


def widens(published: np.dtype, wanted: np.dtype) -> bool:
  """Whether each value of a dtype has its equal in another."""
  if published == wanted:
    return True
  narrow = published.name in ("bfloat16", "float16")
  return narrow and wanted == np.dtype(np.float32)
