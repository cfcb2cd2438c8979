"""Hugging Face safetensors, whose tensors are written as they come."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from etils import epath

from arl_jax.checkpoints.safetensors_header import (
  DTYPES,
  INDEX,
  MAX_HEADER,
  SINGLE,
  SUFFIX,
)
from arl_jax.checkpoints.source import Stored, shown

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Bytes copied at once.
_CHUNK = 8 << 20


@dataclasses.dataclass(slots=True)
class _Shard:
  """A planned file: its header, and where in the file each tensor goes."""

  name: str
  header: bytes
  starts: dict[str, int]
  size: int
  missing: set[str]


class Writer:
  """Writes tensors, in any order, as a checkpoint that appears at the end.

  Everything goes under temporary names (`*.tmp`), which `close` replaces, the
  index last. On an object store, where files are written in one go, a shard is
  put together in local temporary space and sent once it is whole.

  As a context manager, it closes at the end and aborts on an exception.
  """

  def __init__(
    self,
    folder: epath.PathLike,
    tensors: Mapping[str, Stored],
    shard_bytes: float = 5e9,
  ):
    """Plans the shards and writes their headers.

    Args:
      folder: created if needed.
      tensors: all that will be written. Shards are filled in this order.
      shard_bytes: data a shard has at most, except that of a larger tensor.

    Raises:
      ValueError: `folder` holds safetensors already, `shard_bytes` isn't
        positive, or a tensor has a name or dtype that can't be stored.
      OSError: a file can't be written.
    """
    if not shard_bytes > 0:
      raise ValueError(f"shard_bytes {shard_bytes!r} must be positive")
    self._stored = dict(tensors)
    self._shards = _plan(self._stored, shard_bytes)
    self._shard_of = {n: shard for shard in self._shards for n in shard.starts}
    self._folder = epath.Path(folder)
    self._folder.mkdir(parents=True, exist_ok=True)
    for entry in list(self._folder.iterdir()):
      if entry.name.endswith(SUFFIX) or entry.name == INDEX:
        raise ValueError(
          f"{self._folder} holds {entry.name}; a checkpoint must be written"
          " into a folder without one"
        )
      if entry.name.endswith((f"{SUFFIX}.tmp", f"{INDEX}.tmp")):
        entry.unlink()  # Left by an interrupted save.
    self._local = "://" not in os.fspath(self._folder)
    self._work = pathlib.Path(
      os.fspath(self._folder) if self._local else tempfile.mkdtemp()
    )
    self._ended = False
    try:
      for shard in self._shards:
        with self._draft(shard).open("wb") as file:
          file.write(shard.header)
          file.truncate(shard.size)
    except BaseException:
      self.abort()
      raise

  def write(self, name: str, value: np.ndarray) -> None:
    """Writes one tensor.

    Raises:
      ValueError: the tensor isn't planned with this shape and dtype, or was
        written before, or the writer is closed.
      OSError: it can't be written, such as on a full disk.
    """
    if self._ended:
      raise ValueError(f"tensor {shown(name)} comes after the writer's end")
    if name not in self._stored:
      raise ValueError(f"tensor {shown(name)} isn't among those planned")
    stored, shard = self._stored[name], self._shard_of[name]
    if (value.shape, value.dtype) != (stored.shape, stored.dtype):
      raise ValueError(
        f"tensor {shown(name)} is {value.dtype}{list(value.shape)}; planned"
        f" was {stored.dtype}{list(stored.shape)}"
      )
    if name not in shard.missing:
      raise ValueError(f"tensor {shown(name)} must be written once only")
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    with self._draft(shard).open("r+b") as file:
      file.seek(shard.starts[name])
      file.write(data.data)
      shard.missing.remove(name)
      if not shard.missing:
        file.flush()
        os.fsync(file.fileno())
    if not shard.missing:
      self._send(shard)

  def close(self) -> None:
    """Makes the checkpoint appear; a second call does nothing.

    Raises:
      ValueError: a tensor wasn't written; then nothing appears.
      OSError: a file can't be written.
    """
    if self._ended:
      return
    missing = [n for n, shard in self._shard_of.items() if n in shard.missing]
    if missing:
      self.abort()
      raise ValueError(
        f"tensor {shown(missing[0])} and {len(missing) - 1} others weren't"
        f" written to {self._folder}; all planned ones must be"
      )
    index = {
      "metadata": {"total_size": sum(s.nbytes for s in self._stored.values())},
      "weight_map": {n: self._shard_of[n].name for n in sorted(self._stored)},
    }
    try:
      for shard in self._shards:
        if not shard.starts:
          self._send(shard)
      names = [shard.name for shard in self._shards]
      if len(names) > 1:
        text = json.dumps(index, indent=2) + "\n"
        self._final(INDEX).write_text(text)
        names.append(INDEX)
      for name in names:
        self._final(name).replace(self._folder / name)
    except BaseException:
      self.abort()
      raise
    self._end()

  def abort(self) -> None:
    """Takes away what was written, unless the checkpoint is complete."""
    if self._ended:
      return
    self._end()
    for name in [*(shard.name for shard in self._shards), INDEX]:
      self._final(name).unlink(missing_ok=True)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    if kind is None:
      self.close()
    else:
      self.abort()

  def _end(self) -> None:
    self._ended = True
    if not self._local:
      shutil.rmtree(self._work, ignore_errors=True)

  def _draft(self, shard: _Shard) -> pathlib.Path:
    return self._work / f"{shard.name}.tmp"

  def _final(self, name: str) -> epath.Path:
    return self._folder / f"{name}.tmp"

  def _send(self, shard: _Shard) -> None:
    """Brings a whole shard into the folder, under its temporary name."""
    if self._local:
      return
    with (
      self._draft(shard).open("rb") as draft,
      self._final(shard.name).open("wb") as file,
    ):
      shutil.copyfileobj(draft, file, _CHUNK)
    self._draft(shard).unlink()


def _plan(tensors: Mapping[str, Stored], shard_bytes: float) -> list[_Shard]:
  groups: list[dict[str, Stored]] = [{}]
  size = 0
  for name, stored in tensors.items():
    if name == "__metadata__" or not _encodes(name):
      raise ValueError(f"tensor name {shown(name)} can't be stored")
    if stored.dtype not in _NAMES:
      raise ValueError(
        f"dtype {stored.dtype} of tensor {shown(name)} must be one of"
        f" {', '.join(str(d) for d in _NAMES)}"
      )
    if groups[-1] and size + stored.nbytes > shard_bytes:
      groups.append({})
      size = 0
    groups[-1][name] = stored
    size += stored.nbytes
  names = [
    f"model-{i:05d}-of-{len(groups):05d}{SUFFIX}"
    for i in range(1, len(groups) + 1)
  ]
  if len(groups) == 1:
    names = [SINGLE]
  return [_shard(*pair) for pair in zip(names, groups, strict=True)]


def _shard(name: str, tensors: Mapping[str, Stored]) -> _Shard:
  """Lays a file out as the reference writer does."""
  # By falling item size, so that every tensor is aligned to its own.
  order = sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n))
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  starts, end = {}, 0
  for tensor in order:
    stored = tensors[tensor]
    starts[tensor] = end
    end += stored.nbytes
    header[tensor] = {
      "dtype": _NAMES[stored.dtype],
      "shape": list(stored.shape),
      "data_offsets": [starts[tensor], end],
    }
  text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  if len(text) > MAX_HEADER:
    raise ValueError(
      f"{name} would have a header of {len(text)} bytes, at most {MAX_HEADER}"
      " may be; lower shard_bytes"
    )
  data = 8 + len(text)
  return _Shard(
    name,
    len(text).to_bytes(8, "little") + text,
    {tensor: data + start for tensor, start in starts.items()},
    data + end,
    set(order),
  )


def _encodes(name: str) -> bool:
  try:
    name.encode()
  except UnicodeEncodeError:
    return False
  return True
