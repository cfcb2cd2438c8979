"""Outcomes of attempts in a file, so that a run that was killed goes on."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

from arl_jax import records, types
from arl_jax.data.synthesis.pipeline import Attempt, Outcome


class FileJournal:
  """A `Journal` of one line an outcome; a context manager.

  The first line says what the outcomes follow from. A last line that was cut is
  dropped; it is the only one that a kill can leave.

  Args:
    path: of the file, which is made if there is none.
    identity: JSON values; outcomes of another identity are refused.

  Raises:
    ValueError: the file is of something else, none of these, or being
      written by another process.
    OSError: it can't be read or written.
  """

  def __init__(self, path: str | os.PathLike[str], identity: Mapping[str, Any]):
    self.path = pathlib.Path(path)
    self._known: dict[Attempt, Outcome] = {}
    # As it reads once written, for the comparison.
    header = json.loads(json.dumps({"made_from": dict(identity)}))
    self._file: IO[bytes] = self.path.open("ab")
    try:
      self._lock()
      end = self._read(header)
      self._file.truncate(end)
      if not end:
        self._write(header)
    except BaseException:
      self._file.close()
      raise

  def __enter__(self) -> FileJournal:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self._file.close()

  def __len__(self) -> int:
    return len(self._known)

  def known(self, attempt: Attempt) -> Outcome | None:
    """What came of an attempt, None if nobody tried."""
    return self._known.get(attempt)

  def add(self, outcome: Outcome) -> None:
    """Remembers an outcome; it survives the process once this returns."""
    self._known[outcome.attempt] = outcome
    attempt, task = outcome.attempt, outcome.task
    self._write(
      {
        "split": attempt.split,
        "hops": attempt.hops,
        "number": attempt.number,
        "task": None if task is None else records.to_json(task),
        "reason": outcome.reason,
        "example": outcome.example,
      }
    )

  def remove(self) -> None:
    """Deletes the file, when what it was for is done."""
    self._file.close()
    self.path.unlink(missing_ok=True)

  def _lock(self) -> None:
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f"{self.path} is being written by another process; wait for its end"
      ) from None

  def _write(self, record: Mapping[str, Any]) -> None:
    self._file.write(json.dumps(record).encode() + b"\n")
    self._file.flush()

  def _read(self, header: Mapping[str, Any]) -> int:
    """Takes in all whole lines; returns how many bytes they are."""
    lines = self.path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
      try:
        record = json.loads(line)
        outcome = None if number == 1 else _outcome(record)
      except (KeyError, TypeError, RecursionError, ValueError) as error:
        raise ValueError(
          f"{self.path}:{number} is no outcome ({error}); remove the file"
        ) from error
      if outcome is None:
        self._check(record, header)
      else:
        self._known[outcome.attempt] = outcome
    return sum(len(line) + 1 for line in lines)

  def _check(self, found: Any, header: Mapping[str, Any]) -> None:
    if found == header:
      return
    before = found.get("made_from") if isinstance(found, dict) else None
    if not isinstance(before, dict):
      raise ValueError(f"{self.path} is no journal; remove it")
    now = header["made_from"]
    changed = [k for k in {**before, **now} if before.get(k) != now.get(k)]
    raise ValueError(
      f"{self.path} is of a run with another {', '.join(sorted(changed))};"
      " go on with the same or remove it"
    )


def _outcome(record: Any) -> Outcome:
  attempt = Attempt(
    split=record["split"], hops=record["hops"], number=record["number"]
  )
  task = record["task"]
  found = None if task is None else records.from_json(task)
  if found is not None and not isinstance(found, types.Task):
    raise TypeError("a record that is no task")
  return Outcome(
    attempt=attempt,
    task=found,
    reason=record["reason"],
    example=record["example"],
  )
