"""The header of a GGUF file: metadata and where its tensors lie.

A file comes from strangers, so every count is held against the bytes that are
there before anything is allocated or skipped.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import struct
from typing import Any, TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_AXES = 4
_STRING, _ARRAY, _FLOAT32, _BOOL = 8, 9, 6, 7
# Value type in the file -> numpy's letter, little-endian.
_SCALARS = {
  0: "u1",
  1: "i1",
  2: "u2",
  3: "i2",
  4: "u4",
  5: "i4",
  _FLOAT32: "f4",
  _BOOL: "u1",
  10: "u8",
  11: "i8",
  12: "f8",
}
# Bytes of the shortest field (name, type, value) and tensor entry.
_LEAST_FIELD = 8 + 4 + 1
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
  """Where one tensor lies.

  `shape` is numpy's, the last axis contiguous; `offset` and `nbytes` are bytes,
  the first from the start of the file.
  """

  name: str
  shape: tuple[int, ...]
  kind: GGMLQuantizationType
  offset: int
  nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Header:
  """Fields by name (scalars, strings, lists of strings, arrays) and tensors.

  A float32 reads as the shortest decimal that names it: 1e-05.
  """

  path: str
  fields: dict[str, Any]
  tensors: dict[str, Tensor]

  def get(self, name: str, kind: type[T], default: T | None = None) -> T:
    """A field of the type `kind`.

    Raises:
      ValueError: it has another type, or it is absent without a default.
    """
    value = self.fields.get(name, default)
    if kind is float and type(value) is int:
      value = float(value)
    # A bool is an int to Python, but never a count.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
      found = "absent" if value is None else f"a {type(value).__name__}"
      raise ValueError(
        f"{self.path}: field {name!r} is {found}, must be a {kind.__name__}"
      )
    return value

  def positive(self, name: str, default: int | None = None) -> int:
    """A field that counts something; ValueError unless 1 to 2**31 - 1."""
    value = self.get(name, int, default)
    if not 0 < value < 1 << 31:
      raise ValueError(
        f"{self.path}: field {name!r} is {value}, must be 1 to 2**31 - 1"
      )
    return value


def read_header(path: str | os.PathLike[str]) -> Header:
  """Reads fields and tensor entries, not the tensors.

  Raises:
    ValueError: not a GGUF file of version 2 or 3, cut short, or inconsistent;
      the text names the file and the field or tensor.
    OSError: it can't be opened.
  """
  name = os.fspath(path)
  with open(path, "rb") as file:
    size = os.fstat(file.fileno()).st_size
    if size < 24 or file.read(4) != _MAGIC:
      raise ValueError(f"{name}: not a GGUF file")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      return _Parser(name, data, size).header()


class _Parser:
  """Reads forward through the bytes of one file."""

  def __init__(self, path: str, data: mmap.mmap, size: int):
    self._path, self._data, self._size = path, data, size
    self._at = len(_MAGIC)

  def header(self) -> Header:
    version = self._number("I")
    if version not in _VERSIONS:
      raise self._wrong(f"GGUF version {version}, must be one of {_VERSIONS}")
    tensor_count = self._count(_LEAST_TENSOR, "the file")
    field_count = self._count(_LEAST_FIELD, "the file")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
      name = self._text("a field's name")
      if name in fields:
        raise self._wrong(f"field {name[:80]!r} is there twice")
      fields[name] = self._value(f"field {name[:80]!r}")
    entries = [self._entry() for _ in range(tensor_count)]
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment.bit_count() != 1:
      raise self._wrong(
        f"field 'general.alignment' is {str(alignment)[:80]}, must be a power"
        " of two"
      )
    start = -(-self._at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, number, offset in entries:
      if name in tensors:
        raise self._wrong(f"tensor {name!r} is there twice")
      tensors[name] = self._tensor(name, shape, number, start + offset)
    return Header(path=self._path, fields=fields, tensors=tensors)

  def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
    name = self._text("a tensor's name")[:200]
    axes = self._number("I")
    if not 1 <= axes <= _MAX_AXES:
      raise self._wrong(f"tensor {name!r} has {axes} axes, must be 1 to 4")
    # The file names the contiguous axis first.
    shape = tuple(self._number("Q") for _ in range(axes))[::-1]
    return name, shape, self._number("I"), self._number("Q")

  def _tensor(
    self, name: str, shape: tuple[int, ...], number: int, offset: int
  ) -> Tensor:
    try:
      kind = GGMLQuantizationType(number)
    except ValueError:
      raise self._wrong(f"tensor {name!r} has unknown type {number}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
      raise self._wrong(
        f"tensor {name!r} has shape {shape}; axes must be positive and the last"
        f" a multiple of {block} for {kind.name}"
      )
    nbytes = math.prod(shape) // block * block_bytes
    if offset + nbytes > self._size:
      raise self._wrong(
        f"tensor {name!r} ends at byte {offset + nbytes}, the file at"
        f" {self._size}: it is cut short"
      )
    return Tensor(
      name=name, shape=shape, kind=kind, offset=offset, nbytes=nbytes
    )

  def _value(self, what: str) -> Any:
    kind = self._number("I")
    if kind == _STRING:
      return self._text(what)
    if kind == _ARRAY:
      return self._array(what)
    value = self._scalars(kind, 1, what)[0]
    # The shortest decimal, not the float64 that lies nearest.
    return float(str(value)) if kind == _FLOAT32 else value.item()

  def _array(self, what: str) -> list[str] | np.ndarray:
    kind = self._number("I")
    if kind == _STRING:
      return [self._text(what) for _ in range(self._count(8, what))]
    return self._scalars(kind, self._count(1, what), what)

  def _scalars(self, kind: int, count: int, what: str) -> np.ndarray:
    if kind not in _SCALARS:
      raise self._wrong(f"{what} has unknown type {kind}")
    dtype = np.dtype("<" + _SCALARS[kind])
    values = np.frombuffer(self._take(count * dtype.itemsize, what), dtype)
    if kind != _BOOL:
      return values
    if values.size and values.max() > 1:
      raise self._wrong(f"{what} is {values.max()}, must be 0 or 1")
    return values.astype(np.bool_)

  def _text(self, what: str) -> str:
    data = self._take(self._number("Q"), what)
    try:
      return data.decode()
    except UnicodeDecodeError:
      raise self._wrong(f"{what} isn't UTF-8: {data[:40]!r}") from None

  def _count(self, least: int, what: str) -> int:
    """A number of things that take at least `least` bytes each."""
    count = self._number("Q")
    if count * least > self._size - self._at:
      raise self._wrong(f"{what} is cut short: it claims {count} entries")
    return count

  def _number(self, code: str) -> int:
    data = self._take(struct.calcsize("<" + code), "the header")
    return struct.unpack("<" + code, data)[0]

  def _take(self, count: int, what: str) -> bytes:
    if count > self._size - self._at:
      raise self._wrong(f"{what} is cut short: it claims {count} bytes")
    data = self._data[self._at : self._at + count]
    self._at += count
    return data

  def _wrong(self, problem: str) -> ValueError:
    return ValueError(f"{self._path}: {problem}")
