"""The files of one version: boxes encoded, laid out and described."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from arl_jax.weights import delta, manifest
from arl_jax.weights.manifest import Manifest, Part, Tensor, Version
from arl_jax.weights.shards import Box, Piece

Key = tuple[str, Box]


class Content(NamedTuple):
  """A version as it is in host memory.

  Attributes:
    version: its identity.
    words: [n] of each box that this process has.
  """

  version: Version
  words: Mapping[Key, np.ndarray]


class Encoded(NamedTuple):
  """A box, ready to be written.

  Attributes:
    key: tensor and box.
    file: that it goes to.
    words: [n], its elements.
    difference: from the last version, or all of it.
    payload: checksum of what is written.
    content: checksum of the words.
  """

  key: Key
  file: str
  words: np.ndarray
  difference: delta.Encoded
  payload: str
  content: str


def encode(piece: Piece, last: Content | None) -> Encoded:
  """A box as the difference from what the last version had there, if any."""
  key = piece.name, (piece.start, piece.stop)
  words = delta.words(piece.data)
  old = None if last is None else last.words.get(key)
  difference = delta.encode(words, old)
  content = manifest.checksum(words)
  payload = content
  if difference.encoding != delta.WHOLE:
    payload = manifest.checksum(difference.data)
  return Encoded(
    key, f"shard-{piece.device:05d}.bin", words, difference, payload, content
  )


def buffers(encoded: Iterable[Encoded]) -> dict[str, list[Any]]:
  """What each file consists of, in order."""
  files: dict[str, list[Any]] = {}
  for box in encoded:
    files.setdefault(box.file, []).append(box.difference.data)
  return files


def describe(encoded: Iterable[Encoded]) -> dict[str, Any]:
  """What the manifest says of one process's boxes, as JSON values."""
  files: dict[str, int] = {}
  parts: dict[str, list[dict[str, Any]]] = {}
  for box in encoded:
    name, (start, stop) = box.key
    offset = files.setdefault(box.file, 0)
    size = box.difference.size
    files[box.file] += size
    part = Part(
      start=start,
      stop=stop,
      file=box.file,
      offset=offset,
      bytes=size,
      encoding=box.difference.encoding,
      entries=box.difference.entries,
      payload=box.payload,
      content=box.content,
    )
    parts.setdefault(name, []).append(dataclasses.asdict(part))
  return {"files": files, "parts": parts}


def merge(
  number: int,
  lineage: str,
  base: Version | None,
  arrays: Mapping[str, Any],
  described: Sequence[Mapping[str, Any]],
) -> Manifest:
  """The manifest of a version.

  Args:
    number: policy version.
    lineage: id of this run.
    base: what differences start from.
    arrays: with shape and dtype, by name.
    described: by `describe` in each process.
  """
  tensors = {
    name: Tensor(
      shape=tuple(array.shape),
      dtype=str(array.dtype),
      parts=tuple(
        Part(**{**p, "start": tuple(p["start"]), "stop": tuple(p["stop"])})
        for one in described
        for p in one["parts"].get(name, ())
      ),
    )
    for name, array in arrays.items()
  }
  checksum = manifest.content_checksum(tensors)
  return Manifest(
    version=Version(number, lineage, checksum),
    base=base,
    files={k: n for one in described for k, n in one["files"].items()},
    tensors=tensors,
  )
