"""Hugging Face safetensors, of which tensors are read in parts."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from etils import epath

from arl_jax.checkpoints.safetensors_header import (
  INDEX,
  SINGLE,
  SUFFIX,
  exactly,
  read_header,
  read_index,
)
from arl_jax.checkpoints.source import Source, shown, spans

_NUMBERED = re.compile(r"(.*)-(\d{1,5})-of-(\d{1,5})\.safetensors")

# Bytes read or copied at once.
_CHUNK = 8 << 20
# Unwanted bytes between wanted ones are read and dropped up to this many; a
# seek, which is a request on an object store, costs more.
_GAP = 1 << 20


class SafetensorsFile(Source):
  """One safetensors file.

  It is opened anew for each read, so that readers in several threads don't
  wait for each other and a model of many shards needs no many open files.

  Attributes:
    metadata: the strings under `__metadata__`.
  """

  def __init__(self, path: epath.PathLike):
    """Reads and checks the header.

    Raises:
      ValueError: there is no such file, or it isn't a whole safetensors file.
    """
    self._path = epath.Path(path)
    self._closed = False
    with _opened(self._path) as file:
      header = read_header(str(self._path), file)
    self._starts = header.starts
    self.tensors = MappingProxyType(header.tensors)
    self.metadata = MappingProxyType(header.metadata)

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    if self._closed:
      raise ValueError(f"{self._path} is closed; open it again to read")
    if name not in self.tensors:
      raise ValueError(f"{self._path} has no tensor {shown(name)}")
    stored = self.tensors[name]
    part = spans(name, stored.shape, index)
    out = np.empty([stop - start for start, stop in part], stored.dtype)
    if out.size:
      with _opened(self._path) as file:
        # A scalar is read as a vector of one.
        self._fill(
          file,
          np.atleast_1d(out),
          stored.shape or (1,),
          part or ((0, 1),),
          self._starts[name],
          name,
        )
    return out

  def _fill(
    self,
    file: IO[Any],
    out: np.ndarray,
    shape: tuple[int, ...],
    part: tuple[tuple[int, int], ...],
    at: int,
    name: str,
  ) -> None:
    """Fills `out` with `part` of the array `shape` that starts at byte `at`."""
    (start, stop), rest = part[0], shape[1:]
    row = math.prod(rest) * out.itemsize
    whole_rows = all(
      span == (0, n) for span, n in zip(part[1:], rest, strict=True)
    )
    if row > _CHUNK or (row > _GAP and not whole_rows):
      for i in range(start, stop):
        self._fill(file, out[i - start], rest, part[1:], at + i * row, name)
      return
    inner = tuple(slice(*span) for span in part[1:])
    rows = max(1, _CHUNK // row)
    for i in range(start, stop, rows):
      n = min(rows, stop - i)
      file.seek(at + i * row)
      data = exactly(file, n * row, f"{self._path}, tensor {shown(name)}")
      if out.dtype == np.bool_ and (top := max(data)) > 1:
        raise ValueError(
          f"{self._path}, tensor {shown(name)}: byte {top} of a BOOL must be 0"
          " or 1"
        )
      values = np.frombuffer(data, out.dtype).reshape(n, *rest)
      out[i - start : i - start + n] = values[(slice(None), *inner)]
      del data, values  # Before the next come.

  def close(self) -> None:
    self._closed = True


class _Folder(Source):
  """Several safetensors files as one source."""

  def __init__(self, files: Mapping[str, SafetensorsFile]):
    """Args: files: the file of each tensor."""
    self._files = files
    self.tensors = MappingProxyType(
      {name: file.tensors[name] for name, file in files.items()}
    )

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    if name not in self._files:
      raise ValueError(f"the checkpoint has no tensor {shown(name)}")
    return self._files[name].read(name, index)

  def close(self) -> None:
    for file in self._files.values():
      file.close()


def open_folder(path: epath.PathLike) -> Source:
  """The checkpoint in a folder, local or such as `gs://bucket/folder`.

  That is `model.safetensors`, or the shards in the `weight_map` of
  `model.safetensors.index.json`, or else all `*.safetensors`.

  Raises:
    ValueError: there is no such checkpoint, a file is at fault, a shard is
      missing, or shards and index don't hold the same tensors.
  """
  folder = epath.Path(path)
  if not folder.is_dir():
    raise ValueError(f"checkpoint folder {folder} doesn't exist")
  names = sorted(entry.name for entry in folder.iterdir())
  if SINGLE in names:
    return SafetensorsFile(folder / SINGLE)
  if INDEX in names:
    return _indexed(folder)
  shards = [name for name in names if name.endswith(SUFFIX)]
  if not shards:
    raise ValueError(
      f"checkpoint folder {folder} must hold {SINGLE}, {INDEX} or other"
      f" *{SUFFIX}"
    )
  _check_all_there(folder, shards)
  files: dict[str, SafetensorsFile] = {}
  for shard in shards:
    file = SafetensorsFile(folder / shard)
    for name in file.tensors:
      if name in files:
        raise ValueError(
          f"{folder / shard}: tensor {shown(name)} is also in"
          f" {files[name]._path.name}; a tensor must be in one file only"
        )
      files[name] = file
  return _Folder(files)


def _check_all_there(folder: epath.Path, shards: list[str]) -> None:
  """Raises ValueError if, by their numbers, some shards are missing."""
  numbers: dict[tuple[str, str], set[int]] = {}
  for shard in shards:
    if match := _NUMBERED.fullmatch(shard):
      numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
  for (stem, total), there in numbers.items():
    if len(there) != int(total):
      raise ValueError(
        f"{folder} must hold {total} shards {stem}-*-of-{total}{SUFFIX}; it"
        f" holds {len(there)}"
      )


def _indexed(folder: epath.Path) -> Source:
  """The shards that an index lists."""
  where = str(folder / INDEX)
  with _opened(folder / INDEX) as file:
    listed = read_index(where, file)
  shards: dict[str, SafetensorsFile] = {}
  for name, shard in listed.items():
    if shard in shards:
      continue
    if re.search(r"[/\\\x00-\x1f]", shard) or not shard.endswith(SUFFIX):
      raise ValueError(
        f"{where}: shard {shown(shard)} of tensor {shown(name)} must be the"
        f" name of a *{SUFFIX} file of the same folder"
      )
    shards[shard] = SafetensorsFile(folder / shard)
  for name, shard in listed.items():
    if name not in shards[shard].tensors:
      raise ValueError(
        f"{where}: tensor {shown(name)} must be in {shard}, which lacks it"
      )
  for shard, opened in shards.items():
    for name in opened.tensors:
      if listed.get(name) != shard:
        raise ValueError(
          f"{where}: weight_map[{shown(name)}] must be {shard}, which holds"
          f" the tensor; it is {shown(listed.get(name))}"
        )
  return _Folder({name: shards[shard] for name, shard in listed.items()})


@contextlib.contextmanager
def _opened(path: epath.Path) -> Iterator[IO[Any]]:
  # Around the body too: some object stores look for a file when it is read.
  try:
    with path.open("rb") as file:
      yield file
  except (FileNotFoundError, NotADirectoryError):
    raise ValueError(f"{path} doesn't exist") from None
  except IsADirectoryError:
    raise ValueError(f"{path} must be a file; it is a folder") from None
