"""Files of several arrays, written once and read through the page cache."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np
import xxhash

# Sections begin at multiples of it, so that arrays are aligned.
_ALIGN = 64
_KIND = "arl_jax search index"
# Raised when files of an older version can't be read any more.
FORMAT = 1
_MAX_SEALED = 2**28
_READ_BYTES = 2**20


def write_sections(
  path: pathlib.Path, sections: Mapping[str, Iterable[Any]]
) -> dict[str, Any]:
  """Writes a file; it is on the disk, whole, before it has its name.

  Args:
    path: of the file.
    sections: buffers of each, in order.

  Returns:
    Its layout, for JSON: bytes, digest, and where each section lies.
  """
  hashed = xxhash.xxh3_128()
  layout: dict[str, list[int]] = {}
  at = 0
  with _replacing(path) as file:

    def write(data: Any) -> int:
      view = memoryview(data).cast("B") if len(data) else memoryview(b"")
      hashed.update(view)
      file.write(view)
      return len(view)

    for name, buffers in sections.items():
      at += write(bytes(-at % _ALIGN))
      start = at
      for buffer in buffers:
        at += write(buffer)
      layout[name] = [start, at - start]
  return {"bytes": at, "digest": hashed.hexdigest(), "sections": layout}


class Sections:
  """A file that `write_sections` wrote; read as pages are touched."""

  def __init__(self, path: pathlib.Path, layout: Mapping[str, Any]):
    """Maps the file.

    Raises:
      ValueError: it isn't there or has another length than was written.
    """
    self._path, self._layout = path, layout["sections"]
    check_size(path, layout["bytes"])
    self._map: Any = b""
    if layout["bytes"]:
      with path.open("rb") as file:
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
      if len(self._map) < layout["bytes"]:
        raise ValueError(f"{path} is damaged: it was cut short")

  def raw(self, name: str) -> memoryview:
    """Bytes of a section."""
    start, size = self._layout[name]
    return memoryview(self._map)[start : start + size]

  def array(self, name: str, dtype: Any, *shape: int) -> np.ndarray:
    """A section as an array that can't be written; [n] without a shape.

    Raises:
      ValueError: it has another size.
    """
    raw = self.raw(name)
    found = np.frombuffer(raw, dtype) if len(raw) else np.empty(0, dtype)
    if not shape:
      return found
    if found.size != np.prod(shape):
      raise ValueError(
        f"{self._path} is damaged: {name} has {found.size} numbers, not"
        f" {list(shape)}"
      )
    return found.reshape(shape)


def check_size(path: pathlib.Path, size: int) -> None:
  """Raises ValueError if a file isn't there, or isn't as long as it was."""
  try:
    found = path.stat().st_size
  except FileNotFoundError:
    raise ValueError(f"{path} is missing") from None
  if found != size:
    raise ValueError(f"{path} is damaged: it has {found} bytes, not {size}")


def check_digest(path: pathlib.Path, digest: str) -> None:
  """Raises ValueError if a file's bytes aren't those that were written."""
  hashed = xxhash.xxh3_128()
  with path.open("rb") as file:
    while data := file.read(_READ_BYTES):
      hashed.update(data)
  if hashed.hexdigest() != digest:
    raise ValueError(f"{path} is damaged: it has other bytes than were written")


def write_sealed(path: pathlib.Path, body: Any) -> None:
  """Writes JSON that shows damage; others see the old file or the new one."""
  text = json.dumps(body).encode()
  head = {
    "kind": _KIND,
    "format": FORMAT,
    "digest": xxhash.xxh3_128_hexdigest(text),
  }
  with _replacing(path) as file:
    file.write(json.dumps(head).encode() + b"\n" + text + b"\n")


def read_sealed(path: pathlib.Path) -> Any:
  """What `write_sealed` wrote.

  Raises:
    FileNotFoundError: it isn't there.
    ForeignError: another program or version wrote it.
    ValueError: it is damaged.
  """
  with path.open("rb") as file:
    data = file.read(_MAX_SEALED + 1)
  head, _, text = data.partition(b"\n")
  try:
    found = json.loads(head)
    kind, version, digest = found["kind"], found["format"], found["digest"]
  except (ValueError, KeyError, TypeError, RecursionError):
    raise ForeignError(f"{path} isn't a file of {_KIND}") from None
  if kind != _KIND:
    raise ForeignError(f"{path} is of kind {kind!r:.80}, must be {_KIND!r}")
  if version != FORMAT:
    raise ForeignError(
      f"{path} has format {version!r:.80}, this program reads {FORMAT}; make"
      " the index again in another folder"
    )
  text = text.removesuffix(b"\n")
  if xxhash.xxh3_128_hexdigest(text) != digest:
    raise ValueError(f"{path} is damaged: it has other bytes than were written")
  return json.loads(text)


class ForeignError(ValueError):
  """A file isn't one of this program's, or of another version of it."""


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """A file that takes its name once it is whole and on the disk."""
  partial = path.with_name(path.name + ".partial")
  try:
    with partial.open("wb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise
  flush_folder(path.parent)


def flush_folder(folder: pathlib.Path) -> None:
  """Brings a folder's names to the disk."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
