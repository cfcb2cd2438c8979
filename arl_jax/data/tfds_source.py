"""Conversations in a folder that tensorflow-datasets has prepared.

TensorFlow isn't needed: records are read by number from array_record files.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from arl_jax.data.json_lines import parse_json

_MAX_DESCRIPTION = 1 << 24  # bytes
# What is hashed of each end of a file, bytes. There lie the offsets of all its
# chunks, which change with what they hold; reading it whole could take hours.
_END = 1 << 16
# The library can't skip the decoding of these.
_NESTED = (tfds.features.FeaturesDict, tfds.features.Sequence)
_FEATURES = "tensorflow_datasets.core.features."


class TfdsSource:
  """Examples of one split, by number.

  Attributes:
    digest: of the split's files: their sizes, which records are taken, and both
      ends of each.
  """

  def __init__(self, path: epath.PathLike, *, split: str, field: str):
    """Opens the folder.

    Args:
      path: of the folder with features.json and dataset_info.json.
      split: such as "train", "train[:90%]" or "train+test".
      field: a Sequence with role and content, which are texts.

    Raises:
      ValueError: there is no such folder, split or field, its records can't be
        read by number, or it names features that tensorflow-datasets lacks.
    """
    folder = epath.Path(path)
    self._where, self._field = f"{folder} {split}", field
    _read_description(folder / "dataset_info.json")
    _check_features(folder / "features.json")
    try:
      builder = tfds.builder_from_directory(folder)
      features = builder.info.features
      # Others may be images, which nobody looks at.
      skipped = {
        name: tfds.decode.SkipDecoding()
        for name, feature in features.items()
        if name != field and not isinstance(feature, _NESTED)
      }
      self._records = builder.as_data_source(split, decoders=skipped or None)
      shards = builder.info.splits[split].file_instructions
    except Exception as error:  # The library has no narrower one for all.
      reason = " ".join(str(error).split())[:300]
      raise ValueError(f"{self._where} can't be read: {reason}") from error
    if field not in features:
      raise ValueError(
        f"{folder}: no field {field!r}; there is"
        f" {', '.join(sorted(features))[:200]}"
      )
    if not len(self._records):
      raise ValueError(f"{self._where} holds no example")
    self.digest = _digest(field, shards)
    self[0]  # Shows now whether the field holds messages at all.

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> dict[str, Any]:
    """One example, with `where` (folder, split and number).

    Raises:
      ValueError: it isn't a sequence of messages.
    """
    i = operator.index(index)
    if not 0 <= i < len(self):
      raise IndexError(f"example {i}, must be 0 to {len(self) - 1}")
    where = f"{self._where} example {i}"
    value = self._records[i][self._field]
    return {"messages": _messages(value, f"{where}: field {self._field!r}")} | {
      "where": where
    }


def _read_description(path: epath.Path) -> Any:
  """Raises ValueError if it isn't there, is too large or isn't JSON."""
  if not path.exists():
    raise ValueError(
      f"{path} doesn't exist; the path must be the folder of one version, such"
      " as my_chats/1.0.0"
    )
  with path.open("rb") as file:
    data = file.read(_MAX_DESCRIPTION + 1)
  if len(data) > _MAX_DESCRIPTION:
    raise ValueError(f"{path}: more than {_MAX_DESCRIPTION} bytes")
  return parse_json(data, str(path))


def _check_features(path: epath.Path) -> None:
  """Raises ValueError if a feature isn't one of the library's own.

  The library imports the module of whatever class this file names.
  """
  for key, name in _named(_read_description(path)):
    if not name.startswith(_FEATURES):
      raise ValueError(
        f"{path}: field {key!r} is {name!r:.80}, must be a class of"
        f" {_FEATURES.rstrip('.')}"
      )


def _named(value: Any) -> Iterator[tuple[str, str]]:
  """Key and name of each class that a description names."""
  pending = [value]
  while pending:
    top = pending.pop()
    if isinstance(top, Mapping):
      for key in ("pythonClassName", "python_class_name", "type"):
        if isinstance(top.get(key), str):
          yield key, top[key]
      pending += top.values()
    elif isinstance(top, list):
      pending += top


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
  """From a dict of lists, as `Sequence` has it, or a list of dicts."""
  if isinstance(value, Mapping):
    columns = {name: list(column) for name, column in value.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
      raise ValueError(f"{where} has lists of lengths {lengths}, must be equal")
    rows = [
      dict(zip(columns, row, strict=True))
      for row in zip(*columns.values(), strict=True)
    ]
  elif isinstance(value, (list, tuple, np.ndarray)):
    rows = list(value)
  else:
    raise ValueError(
      f"{where} is a {type(value).__name__}, must be a Sequence of messages"
    )
  return [_plain(row, where) for row in rows]


def _plain(value: Any, where: str) -> Any:
  """Python's own types instead of bytes and numpy's."""
  if isinstance(value, Mapping):
    return {name: _plain(item, where) for name, item in value.items()}
  if isinstance(value, (np.generic, np.ndarray)):
    value = value.tolist()
  if isinstance(value, bytes):
    try:
      return value.decode()
    except UnicodeDecodeError:
      raise ValueError(f"{where} has {value!r:.80}, must be UTF-8") from None
  if isinstance(value, (list, tuple)):
    return [_plain(item, where) for item in value]
  return value


def _digest(field: str, shards: Any) -> str:
  hashed = hashlib.sha256()
  for shard in shards:
    file = epath.Path(shard.filename)
    size = file.stat().length
    part = [field, size, shard.skip, shard.take]
    hashed.update(json.dumps(part).encode())
    with file.open("rb") as opened:
      hashed.update(opened.read(_END))
      opened.seek(max(0, size - _END))
      hashed.update(opened.read(_END))
  return hashed.hexdigest()
