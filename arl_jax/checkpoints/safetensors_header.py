"""Headers and indices of safetensors, parsed strictly."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from arl_jax.checkpoints.source import Stored, shown

DTYPES: dict[str, np.dtype] = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
  "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
  "I16": np.dtype(np.int16),
  "I8": np.dtype(np.int8),
  "U64": np.dtype(np.uint64),
  "U32": np.dtype(np.uint32),
  "U16": np.dtype(np.uint16),
  "U8": np.dtype(np.uint8),
  "BOOL": np.dtype(np.bool_),
}

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"

# Longest header, in bytes: the format's own limit. Indices keep to it too.
MAX_HEADER = 100_000_000
# Longest JSON value built at once, in characters: a tensor's entry, and what an
# index has beside its weight_map. A parse of the whole could take many times
# the text's length, if that is made for it.
_MAX_ENTRY = 4096
_MAX_NOTES = 1 << 16
# numpy's limit.
_MAX_DIMS = 64

_SPACE = re.compile(r"[ \t\n\r]*")


class Header(NamedTuple):
  """What a file holds, by the names of its tensors.

  Attributes:
    tensors: shape and dtype of each.
    starts: byte of the file at which each begins.
    metadata: the strings under `__metadata__`.
  """

  tensors: dict[str, Stored]
  starts: dict[str, int]
  metadata: dict[str, str]


def read_header(where: str, file: IO[Any]) -> Header:
  """Reads and checks the header of a file.

  Args:
    where: what errors call the file.
    file: open in binary, at any position.

  Raises:
    ValueError: it isn't a whole safetensors file.
  """
  size = file.seek(0, os.SEEK_END) or file.tell()
  if size < 8:
    raise ValueError(f"{where}: {size} bytes are too few, 8 at least must be")
  file.seek(0)
  length = int.from_bytes(exactly(file, 8, where), "little")
  limit = min(MAX_HEADER, size - 8)
  if not 2 <= length <= limit:
    raise ValueError(
      f"{where}: header length {length} must be between 2 and {limit}"
    )
  text = exactly(file, length, where)
  if text[:1] != b"{":
    raise ValueError(f"{where}: the header must start with {{")
  data = 8 + length
  tensors, starts, metadata = _entries(f"header of {where}", text, size - data)
  starts = {name: data + start for name, start in starts.items()}
  return Header(tensors, starts, metadata)


def read_index(where: str, file: IO[Any]) -> dict[str, str]:
  """The shard of each tensor, as an index says.

  Args:
    where: what errors call the file.
    file: open in binary, at its start.

  Raises:
    ValueError: it isn't an index.
  """
  data = file.read(MAX_HEADER + 1)
  if len(data) > MAX_HEADER:
    raise ValueError(f"{where} must have at most {MAX_HEADER} bytes")
  scanner = _Scanner(where, data)
  shards: dict[str, str] | None = None
  for key in scanner.fields():
    if key == "weight_map":
      shards = {name: scanner.string() for name in scanner.fields()}
    else:
      scanner.value(_MAX_NOTES)
  scanner.end()
  if shards is None:
    raise ValueError(f"{where} has no weight_map, from tensors to shards")
  return shards


def exactly(file: IO[Any], size: int, where: str) -> bytes:
  """The next `size` bytes. Raises ValueError if the file ends before."""
  data = file.read(size)
  if len(data) != size:
    raise ValueError(
      f"{where}: {size} bytes must follow, the file ends after {len(data)}"
    )
  return data


def _entries(
  where: str, header: bytes, data_bytes: int
) -> tuple[dict[str, Stored], dict[str, int], dict[str, str]]:
  """Tensors, where each starts in the data, and the metadata."""
  scanner = _Scanner(where, header)
  tensors: dict[str, Stored] = {}
  starts: dict[str, int] = {}
  metadata: dict[str, str] = {}
  for name in scanner.fields():
    if name == "__metadata__":
      metadata = {key: scanner.string() for key in scanner.fields()}
    else:
      here = f"{where}, tensor {shown(name)}"
      tensors[name], starts[name] = _entry(
        here, scanner.value(_MAX_ENTRY), data_bytes
      )
  scanner.end()
  end = 0
  for name in sorted(starts, key=lambda n: (starts[n], tensors[n].nbytes)):
    if starts[name] != end:
      raise ValueError(
        f"{where}, tensor {shown(name)}: data_offsets must start at {end},"
        f" where the tensor before ends; they start at {starts[name]}"
      )
    end += tensors[name].nbytes
  if end != data_bytes:
    raise ValueError(
      f"{where}: the tensors end at byte {end} of the data; they must end at"
      f" {data_bytes}, like the file"
    )
  return tensors, starts, metadata


def _entry(where: str, entry: Any, data_bytes: int) -> tuple[Stored, int]:
  """A checked tensor and its start, from its JSON value."""
  fields = dict(entry) if isinstance(entry, _Pairs) else {}
  if sorted(fields) != ["data_offsets", "dtype", "shape"] or len(entry) != 3:
    raise ValueError(
      f"{where}: {shown(entry)} must have dtype, shape and data_offsets, once"
      " each and nothing else"
    )
  dtype, shape = fields["dtype"], fields["shape"]
  offsets = fields["data_offsets"]
  if not isinstance(dtype, str) or dtype not in DTYPES:
    raise ValueError(
      f"{where}: dtype {shown(dtype)} must be one of {', '.join(DTYPES)}"
    )
  # `type`, since JSON's true is an int to isinstance.
  if (
    type(shape) is not list
    or len(shape) > _MAX_DIMS
    or not all(type(n) is int and 0 <= n < 2**63 for n in shape)
  ):
    raise ValueError(
      f"{where}: shape {shown(shape)} must be a list of at most {_MAX_DIMS}"
      " integers from 0 to 2^63 - 1"
    )
  if (
    type(offsets) is not list
    or len(offsets) != 2
    or not all(type(n) is int for n in offsets)
    or not 0 <= offsets[0] <= offsets[1] <= data_bytes
  ):
    raise ValueError(
      f"{where}: data_offsets {shown(offsets)} must be a list of two integers,"
      f" 0 <= begin <= end <= {data_bytes}"
    )
  stored = Stored(tuple(shape), DTYPES[dtype])
  # numpy counts the bytes of empty arrays without their empty dimensions.
  if math.prod(n for n in shape if n) * stored.dtype.itemsize >= 2**63:
    raise ValueError(
      f"{where}: shape {shown(shape)} must have fewer than 2^63 bytes"
    )
  if stored.nbytes != offsets[1] - offsets[0]:
    raise ValueError(
      f"{where}: data_offsets {offsets} must be {stored.nbytes} bytes apart,"
      f" for shape {shown(shape)} of {dtype}"
    )
  return stored, offsets[0]


class _Pairs(list):
  """A JSON object as its (key, value) pairs, so that duplicates show."""


class _Scanner:
  """Walks JSON text key by key, and never holds more than one value of it."""

  def __init__(self, where: str, data: bytes):
    """Args: where: what errors say. data: the text, in UTF-8."""
    self._where = where
    try:
      self._text = data.decode()
    except UnicodeDecodeError as error:
      raise ValueError(
        f"{where} must be UTF-8; byte {error.start} isn't"
      ) from None
    self._at = 0
    self._decoder = json.JSONDecoder(object_pairs_hook=_Pairs)

  def fields(self) -> Iterator[str]:
    """Keys of the object that is next; each value is the caller's to take."""
    seen = set()
    self._take("{")
    more = self._peek() != "}"
    while more:
      key = self.string()
      if key in seen:
        raise ValueError(f"{self._where} has {shown(key)} twice, must be once")
      seen.add(key)
      self._take(":")
      yield key
      if more := self._peek() == ",":
        self._take(",")
    self._take("}")

  def string(self) -> str:
    if self._peek() != '"':
      raise self._fault("a string")
    try:
      result, self._at = self._decoder.raw_decode(self._text, self._at)
      result.encode()
    except ValueError:
      raise self._fault("a string") from None
    return result

  def value(self, limit: int) -> Any:
    """The next value, of at most `limit` characters; objects are _Pairs."""
    self._peek()
    text = self._text[self._at : self._at + limit]
    try:
      result, length = self._decoder.raw_decode(text)
    except (ValueError, RecursionError):
      raise self._fault(f"a value of at most {limit} characters") from None
    self._at += length
    return result

  def end(self) -> None:
    if self._peek():
      raise self._fault("the end")

  def _peek(self) -> str:
    match = _SPACE.match(self._text, self._at)
    self._at = match.end() if match else self._at
    return self._text[self._at : self._at + 1]

  def _take(self, char: str) -> None:
    if self._peek() != char:
      raise self._fault(char)
    self._at += 1

  def _fault(self, wanted: str) -> ValueError:
    found = self._text[self._at : self._at + 20]
    return ValueError(
      f"{self._where} isn't valid JSON: {wanted} must be at character"
      f" {self._at}, which has {shown(found)}"
    )
