"""Which versions of a run were scored; survives crashes. Imports no jax.

A line of `evaluation/evaluations.jsonl` is one of

  {"version", "lineage", "checksum", "scores", "seconds", "time"}
  {"version", "lineage", "checksum", "skipped": why, "time"}
  {"lineage", "since": version, "time"}

The last says that the run goes on as another lineage from a version on. What
earlier lineages published beyond that version was given up, and so are its
scores.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FOLDER = "evaluation"
NAME = "evaluations.jsonl"

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)

Scores = Mapping[str, Sequence[float | None]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
  """One version's scores.

  Attributes:
    version: policy version.
    lineage: that published it.
    checksum: of its weights.
    scores: [mean, low, high] of each metric; None where it is undefined. Empty
      if the version was skipped.
    seconds: that scoring took.
    skipped: why it wasn't scored, "" if it was.
    abandoned: whether the run has gone back behind this version since.
  """

  version: int
  lineage: str
  checksum: str
  scores: Scores
  seconds: float
  skipped: str = ""
  abandoned: bool = False

  @property
  def reward(self) -> float | None:
    """Mean reward, None if there is none."""
    return (self.scores.get("reward") or (None,))[0]


def path_of(run_dir: str | os.PathLike[str]) -> pathlib.Path:
  """Where a run's scores lie."""
  return pathlib.Path(run_dir) / FOLDER / NAME


def read(path: str | os.PathLike[str]) -> list[Evaluation]:
  """All evaluations in order of their lines; a torn last line is ignored.

  Raises:
    ValueError: another line is none of this program's.
    OSError: the file can't be read.
  """
  return _evaluations(_records(pathlib.Path(path)))


def valid(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
  """Those that stand, by version; of two of one version, the later line."""
  found = {e.version: e for e in evaluations if not (e.abandoned or e.skipped)}
  return [found[version] for version in sorted(found)]


class ScoreLog:
  """The evaluator's side of the file. One process at a time has it."""

  def __init__(self, path: str | os.PathLike[str]):
    """Reads what is there, and takes away a last line that was torn.

    Raises:
      ValueError: a line is none of this program's.
      OSError: the file can't be read or written.
    """
    self._path = pathlib.Path(path)
    self._records: list[dict[str, Any]] = []
    if self._path.exists():
      with open(self._path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
      self._records = _records(self._path)

  @property
  def evaluations(self) -> list[Evaluation]:
    """See `read`."""
    return _evaluations(self._records)

  @property
  def lineage(self) -> str | None:
    """That the run goes on as, None before the first."""
    named = [r["lineage"] for r in self._records if "since" in r]
    return named[-1] if named else None

  def has(self, version: int, lineage: str, checksum: str) -> bool:
    """Whether these weights are scored or skipped, and that still stands."""
    return any(
      e.version == version
      and not e.abandoned
      # Weights alike have scores alike, whoever published them.
      and (e.lineage == lineage or (not e.skipped and e.checksum == checksum))
      for e in self.evaluations
    )

  def switch(self, lineage: str, since: int) -> None:
    """Says that the run goes on as another lineage.

    Args:
      lineage: its id.
      since: the first version that it published.

    Raises:
      OSError: the line can't be written.
    """
    self._append({"lineage": lineage, "since": since})

  def add(
    self,
    version: int,
    lineage: str,
    checksum: str,
    scores: Scores,
    seconds: float,
  ) -> None:
    """Appends a version's scores. Raises OSError if that fails."""
    self._append(
      {
        "version": version,
        "lineage": lineage,
        "checksum": checksum,
        "scores": {name: list(value) for name, value in scores.items()},
        "seconds": seconds,
      }
    )

  def skip(self, version: int, lineage: str, checksum: str, why: str) -> None:
    """Says why a version has no scores. Raises OSError if that fails."""
    self._append(
      {
        "version": version,
        "lineage": lineage,
        "checksum": checksum,
        "skipped": why,
      }
    )

  def _append(self, record: dict[str, Any]) -> None:
    record = {**record, "time": time.time()}
    line = (json.dumps(record, allow_nan=False) + "\n").encode()
    with open(self._path, "ab", buffering=0) as file:
      start = file.seek(0, os.SEEK_END)
      try:
        if file.write(line) != len(line):
          raise OSError(f"can't write {self._path}: the line was cut short")
        os.fsync(file.fileno())
      except OSError:
        # Half a line must not become the beginning of the next one.
        file.truncate(start)
        raise
    self._records.append(record)


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
  *lines, rest = path.read_bytes().split(b"\n")
  del rest  # Empty, or torn: every whole line ends in a newline.
  found = []
  for number, line in enumerate(lines, start=1):
    try:
      record = json.loads(line)
      _check(record)
    except _MALFORMED as error:
      raise ValueError(
        f"{path}:{number} is {line[:40]!r}, no line of an evaluation ({error!r}"
        "); remove it"
      ) from error
    found.append(record)
  return found


def _check(record: Any) -> None:
  """Raises what indexing and comparing raise, for a record that can't be."""
  if not isinstance(record["lineage"], str):
    raise TypeError("lineage is no text")
  number = record["since" if "since" in record else "version"]
  if not isinstance(number, int) or number < 0:
    raise ValueError(f"version is {number!r}, not an integer >= 0")
  if "since" in record:
    return
  if not isinstance(record["checksum"], str):
    raise TypeError("checksum is no text")
  if "skipped" in record:
    if not isinstance(record["skipped"], str) or not record["skipped"]:
      raise ValueError("skipped is no reason")
    return
  if not 0 <= record["seconds"] < math.inf:
    raise ValueError(f"seconds is {record['seconds']!r}")
  for name, value in record["scores"].items():
    if len(value) != 3 or not all(
      x is None or isinstance(x, int | float) for x in value
    ):
      raise ValueError(f"scores[{name!r}] isn't [mean, low, high]")


def _evaluations(records: Sequence[Mapping[str, Any]]) -> list[Evaluation]:
  named = [(r["lineage"], r["since"]) for r in records if "since" in r]
  order = {lineage: n for n, (lineage, _) in enumerate(named)}

  def abandoned(version: int, lineage: str) -> bool:
    later = named[order.get(lineage, -1) + 1 :]
    return any(since < version for _, since in later)

  return [
    Evaluation(
      version=r["version"],
      lineage=r["lineage"],
      checksum=r["checksum"],
      scores=r.get("scores", {}),
      seconds=r.get("seconds", 0.0),
      skipped=r.get("skipped", ""),
      abandoned=abandoned(r["version"], r["lineage"]),
    )
    for r in records
    if "since" not in r
  ]
