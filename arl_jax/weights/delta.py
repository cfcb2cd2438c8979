"""Differences between two versions of an array, as few bytes.

An array is seen as a line of 16-bit words (bytes, if their number is odd). A
small update leaves most words of bfloat16 weights as they are, and the others
differ in few low bits. Both show in the XOR of old and new words:

- "same": nothing changed; no bytes.
- "sparse": XORs of the words that changed, each with the gap before it.
- "xor": XORs of all words.
- "whole": the new words, which need no old ones and aren't compressed.

In "sparse" and "xor", words are split into planes of low and of high bytes,
which zstd then compresses better. The result is exact whatever the words are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import zstandard

from arl_jax.checkpoints.failure import DamagedError

# Bytes in one piece.
Buffer = Any

SAME, SPARSE, XOR, WHOLE = "same", "sparse", "xor", "whole"

_LEVEL = 1
# Beyond this share of changed words, gaps cost more than they save.
_SPARSE_SHARE = 0.25
# Words that one entry can skip and set. Where more are unchanged, entries that
# change nothing (XOR 0) fill the gap.
_REACH = 1 << 16


class Encoded(NamedTuple):
  """What turns the old words into the new.

  Attributes:
    encoding: see the module.
    entries: of "sparse", otherwise 0.
    data: bytes, or the new words themselves if "whole".
  """

  encoding: str
  entries: int
  data: bytes | np.ndarray

  @property
  def size(self) -> int:
    """Bytes of the data."""
    data = self.data
    return data.nbytes if isinstance(data, np.ndarray) else len(data)


def words(array: np.ndarray) -> np.ndarray:
  """The array as a line of words: [n] uint16, or uint8 for odd bytes.

  A view wherever the array is contiguous.
  """
  line = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  return line if line.size % 2 else line.view(np.uint16)


def encode(new: np.ndarray, old: np.ndarray | None) -> Encoded:
  """The difference in the encoding that takes the fewest bytes.

  Args:
    new: [n] words.
    old: [n] words that the reader has; None if it can't be told.
  """
  if old is None:
    return Encoded(WHOLE, 0, new)
  changes = new ^ old
  places = np.flatnonzero(changes)
  if not places.size:
    return Encoded(SAME, 0, b"")
  if places.size < _SPARSE_SHARE * new.size:
    places = _filled(places)
    gaps = np.diff(places, prepend=-1) - 1
    parts = [gaps.astype("<u2"), changes[places]]
    encoded = Encoded(SPARSE, places.size, _packed(parts))
  else:
    encoded = Encoded(XOR, 0, _packed([changes]))
  if encoded.size < new.nbytes:
    return encoded
  return Encoded(WHOLE, 0, new)


def apply(line: np.ndarray, encoding: str, entries: int, data: Buffer) -> None:
  """Turns old words into new ones, in place.

  Args:
    line: [n] words; as good as lost if this raises.
    encoding: "sparse" or "xor".
    entries: as encoded; at most n, which bounds what is unpacked.
    data: as encoded.

  Raises:
    DamagedError: the bytes aren't what was encoded.
  """
  if encoding == SPARSE:
    size = entries * line.itemsize
    raw = _unpacked(data, entries * 2 + size)
    gaps = _joined(raw[: entries * 2], np.dtype(np.uint16))
    places = np.cumsum(gaps + np.int64(1)) - 1
    if places.size and places[-1] >= line.size:
      raise DamagedError("a difference reaches beyond the array's end")
    line[places] ^= _joined(raw[entries * 2 :], line.dtype)
  elif encoding == XOR:
    line ^= _joined(_unpacked(data, line.nbytes), line.dtype)
  else:
    raise ValueError(f"{encoding!r} needs no old words")


def _filled(places: np.ndarray) -> np.ndarray:
  """The places, with others between them so that no gap is too long."""
  before = np.concatenate([[-1], places[:-1]])
  fillers = (places - before - 1) // _REACH
  if not fillers.any():
    return places
  owners = np.repeat(np.arange(places.size), fillers)
  starts = np.cumsum(fillers) - fillers
  steps = np.arange(owners.size) - starts[owners] + 1
  return np.sort(np.concatenate([places, before[owners] + steps * _REACH]))


def _packed(lines: list[np.ndarray]) -> bytes:
  """Bytes of all lines, plane by plane, compressed."""
  planes = b"".join(
    line.view(np.uint8).reshape(line.size, line.itemsize).T.tobytes()
    for line in lines
  )
  return zstandard.ZstdCompressor(level=_LEVEL).compress(planes)


def _unpacked(data: Buffer, size: int) -> np.ndarray:
  """[size] uint8; nothing is allocated for a frame that says it has more."""
  try:
    declared = zstandard.get_frame_parameters(data).content_size
    if declared != size:
      raise DamagedError(
        f"a difference unpacks to {declared} bytes, {size} are right"
      )
    raw = zstandard.ZstdDecompressor().decompress(
      data, max_output_size=size, allow_extra_data=False
    )
  except zstandard.ZstdError as error:
    raise DamagedError(f"a difference can't be unpacked: {error}") from error
  return np.frombuffer(raw, np.uint8)


def _joined(planes: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Inverse of the split into planes."""
  line = np.empty((planes.size // dtype.itemsize, dtype.itemsize), np.uint8)
  line.T[...] = planes.reshape(dtype.itemsize, -1)
  return line.view(dtype).reshape(-1)
