"""The folder or bucket that versions lie in.

  <folder>/versions/<term>-<number>/shard-*.bin, version.json
  <folder>/writers/<term>.json, <term>.beat     see `owner`
  <folder>/readers/<id>.json                    see `readers`

A term is the place of a lineage among those that published here: 1, 2, 3 …
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

from etils import epath

from arl_jax.checkpoints.failure import DamagedError
from arl_jax.weights import manifest
from arl_jax.weights.manifest import Manifest

_NAME = re.compile(r"([0-9]{6})-([0-9]{10})")
# Of a claim, a beat or a lease.
_NOTE_BYTES = 1 << 20
# In a bucket, what two write under one name at once is the last one's from
# then on. Who waits this long after writing sees whose it is.
_SETTLE_S = 1.0


class MissingError(ValueError):
  """What was asked for isn't there, or isn't there any more."""


class Place(NamedTuple):
  """Where a version lies; later ones are greater."""

  term: int
  number: int

  def __str__(self) -> str:
    return f"{self.term:06d}-{self.number:010d}"


class Storage:
  """Reads and writes whole files, and removes versions.

  Attributes:
    path: of the folder.
    local: whether it is one of this machine's file systems.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    path = epath.Path(folder).expanduser()
    self.local = "://" not in os.fspath(path)
    self.path = path.absolute() if self.local else path

  def version(self, place: Place) -> Any:
    """Path of a version's folder."""
    return self.path / "versions" / str(place)

  def note(self, kind: str, name: str) -> Any:
    """Path of a small file beside the versions."""
    return self.path / kind / name

  # Listings.

  def places(self) -> list[Place]:
    """Of all versions, oldest first; some may have no manifest yet."""
    found = map(_NAME.fullmatch, self.listed(self.path / "versions"))
    return sorted(Place(int(m[1]), int(m[2])) for m in found if m)

  def listed(self, path: Any) -> list[str]:
    """Names in a folder; none if it isn't there."""
    if not self.local:
      # Its library would remember what it listed before.
      import fsspec

      scheme = os.fspath(path).partition("://")[0]
      fsspec.filesystem(scheme).invalidate_cache()
    try:
      return sorted(p.name for p in path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
      return []

  def notes(self, kind: str) -> list[str]:
    """Names of the small files of a kind."""
    return self.listed(self.path / kind)

  # Reading.

  def manifest(self, place: Place) -> Manifest:
    """The manifest of a version, checked.

    Raises:
      MissingError: there is none.
      DamagedError, ForeignError, ValueError: see `manifest.from_text`.
    """
    path = self.version(place) / manifest.NAME
    try:
      found = manifest.from_text(self.read(path, manifest.MAX_BYTES))
    except DamagedError as error:
      raise DamagedError(
        f"{self.version(place)} is damaged: {error}"
      ) from error
    if found.version.number != place.number:
      raise DamagedError(f"{path} says that it is version {found.version}")
    return found

  def has_manifest(self, place: Place) -> bool:
    return (self.version(place) / manifest.NAME).exists()

  def read(self, path: Any, limit: int = _NOTE_BYTES) -> str:
    """A text file.

    Raises:
      MissingError: it isn't there.
      DamagedError: it is too long, or no text.
    """
    try:
      with path.open("rb") as file:
        data = file.read(limit + 1)
      if len(data) > limit:
        raise DamagedError(f"{path} has more than {limit} bytes")
      return data.decode()
    except FileNotFoundError as error:
      raise MissingError(f"{path} isn't there (any more)") from error
    except UnicodeDecodeError as error:
      raise DamagedError(f"{path} is no text: {error}") from error

  # Writing.

  def write(self, path: Any, text: str) -> None:
    """Writes or replaces a file at once: nobody sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not self.local:
      path.write_bytes(text.encode())
      return
    temporary = _beside(path)
    try:
      self.write_parts(temporary, [text.encode()])
      os.replace(temporary, path)
    except BaseException:
      temporary.unlink(missing_ok=True)
      raise
    _flush(path.parent)

  def create(self, path: Any, text: str) -> bool:
    """Whether this process, and no other, made the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not self.local:
      if path.exists():
        return False
      path.write_bytes(text.encode())
      time.sleep(_SETTLE_S)
      return self.read(path) == text
    temporary = _beside(path)
    self.write_parts(temporary, [text.encode()])
    try:
      os.link(temporary, path)
    except FileExistsError:
      return False
    finally:
      temporary.unlink(missing_ok=True)
    _flush(path.parent)
    return True

  def write_parts(self, path: Any, parts: Iterable[Any]) -> None:
    """Writes a file of buffers; it is on the disk before this returns."""
    with path.open("wb") as file:
      for part in parts:
        file.write(part)
      if self.local:
        file.flush()
        os.fsync(file.fileno())

  def remove(self, place: Place) -> None:
    """Deletes a version, which nobody takes for whole meanwhile."""
    folder = self.version(place)
    (folder / manifest.NAME).unlink(missing_ok=True)
    folder.rmtree(missing_ok=True)

  def size(self, place: Place) -> int:
    """Bytes of a version's files."""
    return sum(
      self._bytes(self.version(place) / name)
      for name in self.listed(self.version(place))
    )

  def _bytes(self, path: Any) -> int:
    try:
      return path.stat().length
    except FileNotFoundError:
      return 0


def _beside(path: Any) -> Any:
  return path.parent / f".{path.name}.{uuid.uuid4().hex}"


def _flush(folder: Any) -> None:
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def read_range(file: Any, path: Any, offset: int, buffer: Any) -> None:
  """Fills a buffer from an open file. Raises DamagedError if it is cut."""
  file.seek(offset)
  view = memoryview(buffer).cast("B")
  while view:
    count = file.readinto(view)
    if not count:
      raise DamagedError(f"{path} is cut short")
    view = view[count:]
