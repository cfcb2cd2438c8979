"""Examples for training by number: conversations, and recorded groups.

An example is a dict. Of kinds "jsonl" and "tfds" it has `messages` and perhaps
`tools`, of kind "groups" a `group`; and always `where`, which says to people
what file and line it is from.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, Protocol

from arl_jax import records, types
from arl_jax.data.json_lines import JsonLines

KINDS = ("jsonl", "tfds", "groups")

# Bytes of a line. A group holds every token of its rollouts as numbers.
_MAX_LINE = 1 << 24
_MAX_GROUP = 1 << 28


class RandomAccess(Protocol):
  """Examples by number, the same ones each time.

  Attributes:
    digest: equal for equal data only: a position in one data set says nothing
      about another.
  """

  digest: str

  def __len__(self) -> int: ...

  def __getitem__(self, index: int, /) -> dict[str, Any]: ...


@dataclasses.dataclass(kw_only=True, slots=True)
class SourceConfig:
  """One data set of a mixture.

  Attributes:
    kind: "jsonl", an object with a list of messages on each line; "tfds", a
      folder that tensorflow-datasets has prepared as array_record; "groups", a
      `types.Group` as `records.to_json` has it on each line.
    path: of a file, a pattern such as `gs://bucket/part-*.jsonl`, or a folder
      (its *.jsonl files); of the folder with features.json for "tfds".
    weight: share of the mixture, relative to those of the other sources.
    split: for "tfds", such as "train" or "train[:90%]".
    field: what holds the messages of an example.
  """

  kind: str = "jsonl"
  path: str = ""
  weight: float = 1.0
  split: str = "train"
  field: str = "messages"

  def validate(self, where: str) -> None:
    """Checks every field.

    Raises:
      ValueError: names the field, its value and what would be right.
    """
    if self.kind not in KINDS:
      raise ValueError(f"{where}.kind is {self.kind!r}, none of {list(KINDS)}")
    for name in ("path", "split", "field"):
      value = getattr(self, name)
      if not isinstance(value, str) or not value:
        raise ValueError(f"{where}.{name} is {value!r}, must be a text")
    if not 0 < self.weight < math.inf:
      raise ValueError(f"{where}.weight is {self.weight}, not > 0 and finite")


def open_source(
  config: SourceConfig, *, check: Callable[[types.Group], None] | None = None
) -> RandomAccess:
  """Opens a data set and checks what can be checked in one pass.

  Args:
    config: of the source.
    check: raises ValueError for a group that can't be used; its line is named
      then, at once and not when its turn comes.

  Raises:
    ValueError: a field of `config`, a file or a line is at fault.
  """
  config.validate("source")
  if config.kind == "tfds":
    # Half a second, which runs without such a source needn't wait for.
    from arl_jax.data.tfds_source import TfdsSource

    return TfdsSource(config.path, split=config.split, field=config.field)
  if config.kind == "groups":
    parse = functools.partial(_group, check=check)
    return _Lines(JsonLines(config.path, parse, max_line=_MAX_GROUP), "groups")
  lines = JsonLines(
    config.path,
    functools.partial(_conversation, field=config.field),
    max_line=_MAX_LINE,
  )
  return _Lines(lines, f"jsonl {json.dumps(config.field)}")


class _Lines:
  """Lines of files, whose digest also tells how they are read."""

  def __init__(self, lines: JsonLines, reading: str):
    self._lines = lines
    text = f"{reading} {lines.digest}"
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def __len__(self) -> int:
    return len(self._lines)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self._lines[index]


def _conversation(row: dict[str, Any], field: str) -> dict[str, Any]:
  if field not in row:
    raise ValueError(
      f"no field {field!r:.80}; there is {', '.join(row)[:200] or 'none'}"
    )
  if not isinstance(row[field], list):
    raise ValueError(
      f"field {field!r:.80} is {row[field]!r:.80}, must be a list of messages"
    )
  example = {"messages": row[field]}
  if row.get("tools") is not None:
    example["tools"] = row["tools"]
  return example


def _group(
  row: dict[str, Any], check: Callable[[types.Group], None] | None
) -> dict[str, Any]:
  group = records.from_json(row)
  if not isinstance(group, types.Group):
    raise ValueError(
      f"field 'kind' is {type(group).__name__!r}, must be 'Group'"
    )
  if check is not None:
    check(group)
  return {"group": group}
