"""Tasks, episodes and groups as JSON. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from arl_jax.types import (
  SCHEMA_VERSION,
  SEGMENT_DTYPES,
  Episode,
  Event,
  Group,
  Reward,
  Segment,
  StopReason,
  Task,
)


def to_json(record: Task | Episode | Group) -> dict[str, Any]:
  """A JSON-ready dict with `schema_version` and the record's kind."""
  return {
    "schema_version": SCHEMA_VERSION,
    "kind": type(record).__name__,
    **_plain(record),
  }


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = dataclasses.fields(value)
    return {f.name: _plain(getattr(value, f.name)) for f in fields}
  if isinstance(value, StopReason):
    return value.value
  if isinstance(value, np.ndarray) and value.ndim > 1:
    # Nested lists would lose the shape of an array without elements.
    return {"shape": list(value.shape), "values": value.reshape(-1).tolist()}
  if isinstance(value, (np.ndarray, np.generic)):
    if value.dtype == np.float32:
      # Shortest text that gives the same float32 back.
      return _map_nested(lambda x: float(str(np.float32(x))), value.tolist())
    return value.tolist()
  if isinstance(value, Mapping):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  return value


def _map_nested(f, value):
  if isinstance(value, list):
    return [_map_nested(f, v) for v in value]
  return f(value)


def from_json(data: Mapping[str, Any]) -> Task | Episode | Group:
  """Inverse of `to_json`.

  Raises:
    ValueError: the record was written by another schema version, is of an
      unknown kind, lacks or has surplus fields, or holds a value that would
      have to be changed to fit.
  """
  if not isinstance(data, Mapping):
    raise ValueError(f"a record is an object, not {type(data).__name__}")
  version, kind = data.get("schema_version"), data.get("kind")
  if version != SCHEMA_VERSION:
    raise ValueError(
      f"record has schema_version {version!r}; this program reads"
      f" {SCHEMA_VERSION}"
    )
  readers: dict[str, Callable[[Any], Task | Episode | Group]]
  readers = {"Task": _task, "Episode": _episode, "Group": _group}
  if not isinstance(kind, str) or kind not in readers:
    raise ValueError(f"record kind {kind!r} is none of {sorted(readers)}")
  body = {k: v for k, v in data.items() if k not in ("schema_version", "kind")}
  try:
    return readers[kind](body)
  except (TypeError, KeyError, OverflowError) as error:
    raise ValueError(f"malformed {kind} record: {error}") from error


def _task(data) -> Task:
  return Task(**data)


def _segment(data) -> Segment:
  arrays: dict[str, np.ndarray] = {}
  for name, dtype in SEGMENT_DTYPES.items():
    arrays[name] = _array(name, data[name], dtype)
  if data.get("experts") is not None:
    packed = data["experts"]
    values = _array("experts", packed["values"], np.int32)
    arrays["experts"] = values.reshape(packed["shape"])
  return Segment(**{**data, **arrays})


def _array(name: str, values: Any, dtype: Any) -> np.ndarray:
  """A [n] array whose every value is one of `dtype`, unchanged."""
  plain = np.asarray(values)
  kinds = {"b": "b", "f": "iuf"}.get(np.dtype(dtype).kind, "iu")
  if plain.size and plain.dtype.kind not in kinds:
    raise ValueError(
      f"Segment.{name} holds values that aren't {dtype.__name__}"
    )
  array = plain.astype(dtype)
  if kinds == "iu" and not np.array_equal(array, plain):
    raise ValueError(f"Segment.{name} holds values beyond {dtype.__name__}")
  return array


def _episode(data) -> Episode:
  reward = data["reward"]
  return Episode(
    **{
      **data,
      "segments": tuple(_segment(s) for s in data["segments"]),
      "events": tuple(Event(**e) for e in data["events"]),
      "stop_reason": StopReason(data["stop_reason"]),
      "reward": None if reward is None else Reward(**reward),
    }
  )


def _group(data) -> Group:
  known: dict[str, Any] = {"task": _task(data["task"])}
  known["episodes"] = tuple(_episode(e) for e in data["episodes"])
  return Group(**{**data, **known})
