"""What a published version says about itself.

The manifest is the last file of a version to be written: a version exists when
its manifest does. It is JSON with a marker and a checksum of its own. It comes
from outside, so each field is checked before anything is made of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import xxhash

from arl_jax.checkpoints import sealed
from arl_jax.checkpoints.failure import DamagedError
from arl_jax.weights import delta

# Raised whenever a field of a manifest, an encoding or a checksum changes.
SCHEMA_VERSION = 1
NAME = "version.json"
# Of a manifest; tensors of a trillion parameters need less.
MAX_BYTES = 1 << 28

_MARKER = "arl_jax_weights"
_DTYPES = {
  name: np.dtype(getattr(ml_dtypes, name, name))
  for name in (
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "uint8", "int16", "uint16", "int32", "uint32"),
  )
}
_FILE = re.compile(r"shard-[0-9]{5,9}\.bin")
_LINEAGE = re.compile(r"[0-9A-Za-z_-]{1,64}")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


class Version(NamedTuple):
  """Which weights these are.

  Attributes:
    number: policy version.
    lineage: id of the run that published it. A run that goes on from a commit
      has a new one, as what it publishes differs under numbers used before.
    checksum: over the content of all tensors; 32 hexadecimal digits.
  """

  number: int
  lineage: str
  checksum: str

  def __str__(self) -> str:
    return f"{self.number} of lineage {self.lineage} ({self.checksum[:8]})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
  """A box of a tensor, and where its bytes lie.

  Attributes:
    start: first index along each axis.
    stop: index after the last one along each axis.
    file: name of the file in the version's folder.
    offset: of its bytes there.
    bytes: their number.
    encoding: see `delta`.
    entries: see `delta`.
    payload: checksum of these bytes.
    content: checksum of the box's elements once they are decoded.
  """

  start: tuple[int, ...]
  stop: tuple[int, ...]
  file: str
  offset: int
  bytes: int
  encoding: str
  entries: int
  payload: str
  content: str

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
  """A leaf of the parameters.

  Attributes:
    shape: of all of it.
    dtype: name.
    parts: boxes that it consists of, none twice.
  """

  shape: tuple[int, ...]
  dtype: str
  parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
  """A version.

  Attributes:
    version: its identity.
    base: what its differences start from; None if it needs nothing.
    files: size of each file of arrays by name.
    tensors: by path, such as "layers/000/mlp/up".
  """

  version: Version
  base: Version | None
  files: Mapping[str, int]
  tensors: Mapping[str, Tensor]


def dtype(name: str) -> np.dtype:
  """Raises ValueError for a dtype that isn't published."""
  if name not in _DTYPES:
    raise ValueError(f"dtype {name!r} is none of {', '.join(_DTYPES)}")
  return _DTYPES[name]


def checksum(data: Any) -> str:
  """XXH3 of 128 bits over the bytes of what has them in one piece."""
  return xxhash.xxh3_128_hexdigest(data)


def content_checksum(tensors: Mapping[str, Tensor]) -> str:
  """Of a whole version: over names, shapes, dtypes, boxes and their content."""
  said = [
    [name, tensor.dtype, tensor.shape, _contents(tensor)]
    for name, tensor in sorted(tensors.items())
  ]
  return checksum(json.dumps(said).encode())


def _contents(tensor: Tensor) -> list[Any]:
  return sorted([p.start, p.stop, p.content] for p in tensor.parts)


def check_lineage(lineage: str) -> str:
  """The same. Raises ValueError for what can't be an id."""
  if not isinstance(lineage, str) or not _LINEAGE.fullmatch(lineage):
    raise ValueError(
      f"lineage {lineage!r} isn't 1 to 64 letters, digits, '-' or '_'"
    )
  return lineage


def to_text(manifest: Manifest) -> str:
  body = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(manifest)}
  for key in ("version", "base"):
    body[key] = body[key] and body[key]._asdict()
  return sealed.seal(_MARKER, body)


def from_text(text: str) -> Manifest:
  """Reads a manifest.

  Raises:
    DamagedError: it isn't as it was written, or contradicts itself.
    ForeignError: another program wrote it.
    ValueError: it is of another schema version.
  """
  body = sealed.unseal(_MARKER, NAME, text)
  found = body.get("schema_version") if isinstance(body, dict) else None
  if found != SCHEMA_VERSION:
    raise ValueError(
      f"it has schema_version {found!r}; this program reads {SCHEMA_VERSION}"
    )
  try:
    return _manifest(body)
  except (KeyError, TypeError, ValueError) as error:
    raise DamagedError(f"its file {NAME} is no manifest: {error!r}") from error


def _manifest(body: dict[str, Any]) -> Manifest:
  _check_keys(body, "schema_version", "version", "base", "files", "tensors")
  version = _version(body["version"])
  base = None if body["base"] is None else _version(body["base"])
  if base is not None and (
    base.lineage != version.lineage or base.number >= version.number
  ):
    raise ValueError(f"version {version} can't have base {base}")
  files = {
    _text(name, _FILE): _count(size) for name, size in _items(body["files"])
  }
  tensors = {
    name: _tensor(values, files, base is None)
    for name, values in _items(body["tensors"])
  }
  _check_filled(files, tensors)
  if content_checksum(tensors) != version.checksum:
    raise ValueError("checksums of the parts don't make that of the version")
  return Manifest(version=version, base=base, files=files, tensors=tensors)


def _version(values: Any) -> Version:
  _check_keys(values, *Version._fields)
  return Version(
    _count(values["number"]),
    check_lineage(values["lineage"]),
    _text(values["checksum"], _CHECKSUM),
  )


def _tensor(values: Any, files: Mapping[str, int], whole: bool) -> Tensor:
  _check_keys(values, "shape", "dtype", "parts")
  shape = tuple(_count(size) for size in values["shape"])
  size = dtype(values["dtype"]).itemsize
  parts = tuple(_part(p, size, files, whole) for p in values["parts"])
  check_tiling(shape, [(p.start, p.stop) for p in parts])
  return Tensor(shape=shape, dtype=values["dtype"], parts=parts)


def _part(
  values: Any, itemsize: int, files: Mapping[str, int], whole: bool
) -> Part:
  _check_keys(values, *Part.__dataclass_fields__)
  part = Part(
    start=tuple(_count(x) for x in values["start"]),
    stop=tuple(_count(x) for x in values["stop"]),
    file=_text(values["file"], _FILE),
    offset=_count(values["offset"]),
    bytes=_count(values["bytes"]),
    encoding=values["encoding"],
    entries=_count(values["entries"]),
    payload=_text(values["payload"], _CHECKSUM),
    content=_text(values["content"], _CHECKSUM),
  )
  decoded = math.prod(part.shape) * itemsize
  if part.offset + part.bytes > files[part.file]:
    raise ValueError(f"a part ends beyond its file {part.file}")
  allowed = {
    delta.WHOLE: part.bytes == decoded,
    delta.SAME: part.bytes == 0 and not whole,
    delta.XOR: part.bytes < decoded and not whole,
    delta.SPARSE: part.bytes < decoded and not whole,
  }
  sparse = part.encoding == delta.SPARSE
  if not allowed[part.encoding] or not (
    sparse <= part.entries <= sparse * decoded
  ):
    raise ValueError(
      f"a part of {decoded} bytes can't be {part.bytes} bytes of"
      f" {part.encoding!r} with {part.entries} entries"
    )
  return part


def check_tiling(
  shape: tuple[int, ...],
  boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
  """Raises ValueError unless the boxes are a grid that fills the shape."""
  boxes = list(boxes)
  if any(len(a) != len(shape) or len(b) != len(shape) for a, b in boxes):
    raise ValueError(f"a part has other axes than the shape {shape}")
  grid = []
  for axis, size in enumerate(shape):
    cuts = sorted({(a[axis], b[axis]) for a, b in boxes})
    ends = [0, *(b for _, b in cuts)]
    if (
      [a for a, _ in cuts] != ends[:-1]
      or ends[-1] != size
      or (size and any(a >= b for a, b in cuts))
    ):
      raise ValueError(f"parts leave gaps or overlap in a shape {shape}")
    grid.append(cuts)
  wanted = set(itertools.islice(itertools.product(*grid), len(boxes) + 1))
  found = {tuple(zip(a, b, strict=True)) for a, b in boxes}
  if len(found) != len(boxes) or found != wanted:
    raise ValueError(f"parts are missing or there twice in a shape {shape}")


def _check_filled(
  files: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> None:
  """Raises ValueError unless each byte of a file belongs to one part."""
  filled = dict.fromkeys(files, 0)
  parts = [p for tensor in tensors.values() for p in tensor.parts]
  for part in sorted(parts, key=lambda p: (p.file, p.offset, p.bytes)):
    if part.offset != filled[part.file]:
      raise ValueError(f"parts leave gaps or overlap in file {part.file}")
    filled[part.file] += part.bytes
  if filled != dict(files):
    raise ValueError("files have more bytes than their parts")


def _check_keys(values: Any, *names: str) -> None:
  if not isinstance(values, dict) or values.keys() != {*names}:
    raise ValueError(f"fields aren't {', '.join(names)}")


def _items(values: Any) -> Iterable[tuple[str, Any]]:
  if not isinstance(values, dict):
    raise ValueError(f"{type(values).__name__} where fields are by name")
  return values.items()


def _count(value: Any) -> int:
  if not isinstance(value, int) or isinstance(value, bool) or value < 0:
    raise ValueError(f"{value!r} is no count")
  return value


def _text(value: Any, pattern: re.Pattern[str]) -> str:
  if not isinstance(value, str) or not pattern.fullmatch(value):
    raise ValueError(f"{value!r} isn't {pattern.pattern}")
  return value
