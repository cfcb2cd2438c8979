"""What queue, learner and actors tell each other, as JSON. Imports no jax.

Messages with groups are lines of JSON, compressed by zstd: a header first, then
each group as `records.to_json` gives it. Each line may be a frame of its own,
so that what one process sent is handed on to another as it came.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import zstandard

from arl_jax.cluster.roster import ROLES, Beat
from arl_jax.queueing.group_queue import Batch, Lease, Start
from arl_jax.queueing.task_source import MAX_TASK_ID, Source
from arl_jax.records import from_json as record_from_json
from arl_jax.records import to_json as record_to_json
from arl_jax.serving.body import Body, Malformed, kind, parse_object
from arl_jax.types import Episode, Event, Group, Reward, Segment, Task

# Content type of messages with groups.
LINES = "application/x-ndjson+zstd"
# Bytes of a message with one group and of one with many, compressed and not.
MAX_GROUP = 256 << 20, 1 << 30
MAX_GROUPS = 1 << 30, 4 << 30
# Bytes of any other message.
MAX_PLAIN = 8 << 20
MAX_LEASES = 4096
# Rollouts of a task.
MAX_GROUP_SIZE = 1 << 16
# Characters of an actor's name.
MAX_ACTOR = 256

_MAX_COUNT = 1 << 53
# Python's integers may be beyond any float.
_NUMBERS = -1e300, 1e300
_MAX_NAME = MAX_TASK_ID
_MAX_COUNTERS = 256
_MAX_LEVEL = 1 << 31
# Bytes that a frame may need to be looked back at; level 3 takes 2 MiB.
_WINDOW = 8 << 20
_CHUNK = 1 << 20
# Bytes of lines that any message may have, and more for each compressed byte.
_LEAST, _RATIO = 16 << 20, 1000


def pack(line: bytes) -> bytes:
  """A line as a frame of its own."""
  return zstandard.ZstdCompressor(level=3).compress(line + b"\n")


def pack_json(value: Mapping[str, Any]) -> bytes:
  text = json.dumps(value, separators=(",", ":"), allow_nan=False)
  return pack(text.encode())


def pack_group(group: Group) -> bytes:
  """Raises ValueError for a group whose data isn't JSON."""
  return pack_json(record_to_json(group))


def unpack(body: bytes, most: int) -> Iterator[bytes]:
  """The lines of a message.

  Args:
    body: frames one after another.
    most: bytes of all lines; fewer if the body is small, as JSON that is
      compressed far better than groups are would take long to read.

  Raises:
    Malformed: they aren't frames of zstd, are more than that, or end amid a
      line.
  """
  most = min(most, _LEAST + _RATIO * len(body))
  decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
  reader = decompressor.stream_reader(body, read_across_frames=True)
  begun: list[bytes] = []
  size = 0
  while True:
    try:
      chunk = reader.read(_CHUNK)
    except zstandard.ZstdError as error:
      raise Malformed("", f"the body isn't zstd: {error}") from error
    if not chunk:
      break
    size += len(chunk)
    if size > most:
      raise Malformed("", f"the body's lines are more than {most} bytes")
    first, *others = chunk.split(b"\n")
    begun.append(first)
    for other in others:
      yield b"".join(begun)
      begun = [other]
  if any(begun):
    raise Malformed("", "the body ends amid a line")


def read_group(line: bytes) -> Group:
  """A group, each of whose fields has its type.

  Raises:
    ValueError: it isn't one.
  """
  group = record_from_json(parse_object(line))
  if not isinstance(group, Group):
    raise Malformed("kind", f"{type(group).__name__!r} isn't 'Group'")
  _check_types(group)
  return group


def group_lines(lines: Iterator[bytes], count: int) -> Iterator[bytes]:
  """The lines after a header.

  Raises:
    Malformed: they aren't `count`.
  """
  found = 0
  for found, line in enumerate(lines, 1):
    if found > count:
      break
    yield line
  if found != count:
    raise Malformed(
      "groups",
      f"the header says {count}, but there are"
      f" {'more' if found > count else found}",
    )


# Fields that `records.from_json` takes as they come.
_TYPES: dict[type, dict[str, tuple[type, ...]]] = {
  Group: {"group_id": (str,)},
  Task: {
    "task_id": (str,),
    "prompt": (str,),
    "split": (str,),
    "truth": (dict,),
    "provenance": (dict,),
  },
  Episode: {
    "task_id": (str,),
    "rollout_index": (int,),
    "turns": (int,),
    "seed": (int,),
    "outcome": (dict,),
  },
  Segment: {
    "parent": (int, type(None)),
    "reason": (str,),
    "agent": (str,),
    "trainable": (bool,),
    "temperature": (int, float),
  },
  Event: {"turn": (int,), "kind": (str,), "data": (dict,)},
  Reward: {"total": (int, float), "parts": (dict,)},
}


def _check_types(group: Group) -> None:
  records: list[Any] = [group, group.task]
  for episode in group.episodes:
    records += [episode, *episode.segments, *episode.events]
    if episode.reward is not None:
      records.append(episode.reward)
      for name, value in (
        ("total", episode.reward.total),
        *((f"parts.{n}", v) for n, v in episode.reward.parts.items()),
      ):
        if type(value) not in (int, float):
          raise Malformed(f"Reward.{name}", f"it is {kind(value)}")
        if not _NUMBERS[0] <= value <= _NUMBERS[1]:
          raise Malformed(f"Reward.{name}", "it is beyond any float")
  for record in records:
    for name, types in _TYPES[type(record)].items():
      value = getattr(record, name)
      if type(value) not in types:
        raise Malformed(
          f"{type(record).__name__}.{name}",
          f"it is {kind(value)}, not {' or '.join(t.__name__ for t in types)}",
        )


class Fields(Body):
  """Takes fields that must be there."""

  def __init__(self, fields: Any, where: str = ""):
    if not isinstance(fields, dict):
      raise Malformed(where, f"it is {kind(fields)}, not an object")
    super().__init__(fields)
    self._where = f"{where}." if where else ""

  def needed_integer(
    self, name: str, low: int = 0, high: int = _MAX_COUNT
  ) -> int:
    return self._needed(name, self.integer(name, None, low, high))

  def needed_number(
    self, name: str, low: float = _NUMBERS[0], high: float = _NUMBERS[1]
  ) -> float:
    return float(self._needed(name, self.number(name, None, low, high)))

  def needed_text(self, name: str, longest: int = _MAX_NAME) -> str:
    return self._needed(name, self.text(name, None, longest))

  def needed_list(self, name: str, most: int) -> list[Any]:
    return self._needed(
      name,
      self.take(
        name,
        lambda x: type(x) is list and len(x) <= most,
        f"a list of at most {most}",
      ),
    )

  def needed_object(self, name: str) -> dict[str, Any]:
    return self._needed(
      name, self.take(name, lambda x: type(x) is dict, "an object")
    )

  def _needed(self, name: str, value: Any) -> Any:
    if value is None:
      raise Malformed(f"{self._where}{name}", "is missing")
    return value


def start_to_json(start: Start) -> dict[str, Any]:
  """A start's header; its groups follow."""
  return {
    "lineage": start.lineage,
    "version": start.version,
    "seed": start.seed,
    "epochs": start.epochs,
    "group_size": start.group_size,
    "groups_per_step": start.groups_per_step,
    "max_staleness": start.max_staleness,
    "tries": start.tries,
    "skip_below": _finite(start.skip_below),
    "skip_above": _finite(start.skip_above),
    "sources": [
      {
        "name": s.name,
        "weight": s.weight,
        "task_ids": list(s.task_ids),
        "levels": list(s.levels),
      }
      for s in start.sources
    ],
    "ledger": start.ledger,
    "groups": len(start.groups),
  }


def _finite(bound: float) -> float | None:
  """JSON has no infinity: a bound that bounds nothing is null."""
  return bound if math.isfinite(bound) else None


def read_start(lines: Iterator[bytes]) -> tuple[Start, list[bytes]]:
  """A start and the frames of its groups.

  Raises:
    ValueError: names the field that can't be.
  """
  fields = Fields(parse_object(next(lines, b"")))
  sources = fields.needed_list("sources", 1 << 16)
  values: dict[str, Any] = {
    "lineage": fields.needed_text("lineage", 64),
    "version": fields.needed_integer("version"),
    "seed": fields.needed_integer("seed", -_MAX_COUNT),
    "epochs": fields.needed_integer("epochs"),
    "group_size": fields.needed_integer("group_size", 2, MAX_GROUP_SIZE),
    "groups_per_step": fields.needed_integer("groups_per_step", 1, 1 << 16),
    "max_staleness": fields.needed_integer("max_staleness", 0, 1 << 16),
    "tries": fields.needed_integer("tries", 1),
    "skip_below": fields.number("skip_below", -math.inf, *_NUMBERS),
    "skip_above": fields.number("skip_above", math.inf, *_NUMBERS),
    "sources": tuple(_read_source(s) for s in sources),
    "ledger": fields.take("ledger", lambda x: type(x) is dict, "an object"),
  }
  count = fields.needed_integer("groups", 0, 1 << 20)
  fields.finish()
  found = [(read_group(x), pack(x)) for x in group_lines(lines, count)]
  start = Start(**values, groups=tuple(group for group, _ in found))
  return start, [frame for _, frame in found]


def _read_source(data: Any) -> Source:
  fields = Fields(data, "sources")
  name = fields.needed_text("name")
  weight = fields.needed_number("weight")
  task_ids = fields.needed_list("task_ids", 1 << 24)
  levels = fields.needed_list("levels", 1 << 24)
  fields.finish()
  if not all(type(n) is int and 0 <= n <= _MAX_LEVEL for n in levels):
    raise Malformed(
      "sources.levels",
      f"one of {name!r:.80} isn't an integer of 0..{_MAX_LEVEL}",
    )
  if not all(type(i) is str and len(i) <= _MAX_NAME for i in task_ids):
    raise Malformed(
      "sources.task_ids",
      f"an id of {name!r:.80} isn't a text of at most {_MAX_NAME} characters",
    )
  return Source(
    name=name,
    weight=weight,
    task_ids=tuple(task_ids),
    levels=tuple(levels),
  )


def lease_to_json(lease: Lease) -> dict[str, Any]:
  return {
    "lineage": lease.lineage,
    "number": lease.number,
    "attempt": lease.attempt,
    "task_id": lease.task_id,
    "epoch": lease.epoch,
    "group_size": lease.group_size,
    "version": lease.version,
  }


def read_lease(data: Any) -> Lease:
  """Raises ValueError naming the field that can't be."""
  fields = Fields(data, "lease")
  lease = Lease(
    lineage=fields.needed_text("lineage", 64),
    number=fields.needed_integer("number"),
    attempt=fields.needed_integer("attempt", 1),
    task_id=fields.needed_text("task_id"),
    epoch=fields.needed_integer("epoch"),
    group_size=fields.needed_integer("group_size", 2, MAX_GROUP_SIZE),
    version=fields.needed_integer("version"),
  )
  fields.finish()
  return lease


def read_leases(data: list[Any]) -> list[Lease]:
  return [read_lease(d) for d in data]


def leases_to_json(leases: Iterable[Lease]) -> list[dict[str, Any]]:
  return [lease_to_json(lease) for lease in leases]


def batch_to_json(batch: Batch) -> dict[str, Any]:
  """A batch's header; its groups follow."""
  return {
    "ledger": batch.ledger,
    "ended": batch.ended,
    "drops": dict(batch.drops),
    "waiting": batch.waiting,
    "groups": len(batch.groups),
  }


def read_batch(lines: Iterator[bytes]) -> Batch:
  """Raises ValueError for what the queue can't have sent."""
  fields = Fields(parse_object(next(lines, b"")))
  values: dict[str, Any] = {
    "ledger": fields.needed_object("ledger"),
    "ended": fields.flag("ended"),
    "drops": fields.needed_object("drops"),
    "waiting": fields.needed_integer("waiting"),
  }
  count = fields.needed_integer("groups", 0, 1 << 20)
  fields.finish()
  groups = tuple(read_group(x) for x in group_lines(lines, count))
  return Batch(groups=groups, **values)


def read_waiting(lines: Iterator[bytes]) -> tuple[Group, ...]:
  """Groups behind a header that counts them. Raises ValueError otherwise."""
  fields = Fields(parse_object(next(lines, b"")))
  count = fields.needed_integer("groups", 0, 1 << 20)
  fields.finish()
  return tuple(read_group(x) for x in group_lines(lines, count))


def read_delivery(
  lines: Iterator[bytes],
) -> tuple[str, Lease, Group | None, bytes]:
  """An actor, its lease, and the group with its frame if there is one.

  Raises:
    ValueError: names the field that can't be.
  """
  fields = Fields(parse_object(next(lines, b"")))
  actor = fields.needed_text("actor", MAX_ACTOR)
  lease = read_lease(fields.needed_object("lease"))
  count = fields.needed_integer("groups", 0, 1)
  fields.finish()
  found = [(read_group(x), pack(x)) for x in group_lines(lines, count)]
  return actor, lease, *(found[0] if found else (None, b""))


def read_beat(data: dict[str, Any]) -> Beat:
  """Raises ValueError naming the field that can't be."""
  fields = Fields(data)
  role = fields.needed_text("role", 32)
  if role not in ROLES:
    raise Malformed("role", f"{role!r} is none of {list(ROLES)}")
  counters = fields.needed_object("counters")
  if len(counters) > _MAX_COUNTERS or not all(
    len(name) <= 80
    and type(n) in (int, float)
    and _NUMBERS[0] <= n <= _NUMBERS[1]
    for name, n in counters.items()
  ):
    raise Malformed(
      "counters",
      f"they must be at most {_MAX_COUNTERS} numbers with names of at most 80"
      " characters",
    )
  beat = Beat(
    role=role,
    index=fields.needed_integer("index", 0, 9999),
    pid=fields.needed_integer("pid"),
    idle_seconds=fields.needed_number("idle_seconds", 0.0),
    counters={name: float(n) for name, n in counters.items()},
  )
  fields.finish()
  return beat


def read_roles(data: dict[str, Any]) -> list[dict[str, Any]]:
  """See `Roster.roles`. Raises ValueError for what it can't have given."""
  fields = Fields(data)
  found = []
  for row in fields.needed_list("roles", 1 << 16):
    place = Fields(row, "roles")
    counters = place.needed_object("counters")
    for name, value in counters.items():
      if type(value) not in (int, float):
        raise Malformed(f"roles.counters.{name}", f"it is {kind(value)}")
    found.append(
      {
        "role": place.needed_text("role", 32),
        "index": place.needed_integer("index"),
        "pid": place.needed_integer("pid"),
        "age": place.needed_number("age"),
        "idle_seconds": place.needed_number("idle_seconds"),
        "counters": counters,
      }
    )
  return found
