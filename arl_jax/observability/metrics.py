"""Numbers of a run over time: one JSON line each, and TensorBoard events."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from arl_jax.observability.run_directory import write_atomically

_RESERVED = ("time", "phase", "step")


class MetricsWriter:
  """Appends to `metrics.jsonl` and `tensorboard/`; a context manager.

  Each line is whole on disk, as far as the operating system is concerned, when
  `write` returns, so that it survives a crash of this process. A disk that is
  full, or any other OSError, never stops the caller: it is warned of once, and
  what couldn't be written is counted.

  Attributes:
    dropped: lines that could not be written to metrics.jsonl.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    keep: Callable[[dict[str, Any]], bool] | None = None,
  ):
    """Opens the files, which may hold earlier lines.

    Args:
      folder: where they lie; made if need be.
      keep: of the lines already there, which ones stay (all of them if None).
        A run that goes back to a checkpoint leaves out what came after it.
    """
    self._folder = pathlib.Path(folder)
    self._lines: Any = None
    self._events: EventsWriter | None = None
    self._event_files = 0
    self._warned = False
    self.dropped = 0
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      self._recover(keep)
    except OSError as error:
      self._warn(error)

  def write(self, step: int, phase: str, values: Mapping[str, float]) -> None:
    """Appends one line {"time", "phase", "step", **values}.

    NaN and infinities become null in JSON, which has neither.

    Args:
      step: of the phase.
      phase: name of the phase.
      values: numbers by name.

    Raises:
      ValueError: a value is named like one of the line's own fields.
    """
    for name in _RESERVED:
      if name in values:
        raise ValueError(f"metric {name!r} is a field of every line; rename it")
    numbers = {k: float(v) for k, v in values.items()}
    finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
    now = time.time()
    line = {"time": now, "phase": phase, "step": int(step), **finite}
    try:
      self._append(json.dumps(line, allow_nan=False).encode() + b"\n")
    except OSError as error:
      self.dropped += 1
      self._warn(error)
    self._add_event(now, phase, int(step), numbers)

  def close(self) -> None:
    """Closes the files."""
    lines, self._lines = self._lines, None
    events, self._events = self._events, None
    for file in (lines, events):
      try:
        if file is not None:
          file.close()
      except OSError as error:
        self._warn(error)

  def __enter__(self) -> MetricsWriter:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  @property
  def _path(self) -> pathlib.Path:
    return self._folder / "metrics.jsonl"

  def _recover(self, keep: Callable[[dict[str, Any]], bool] | None) -> None:
    """Drops a torn last line, and the lines that `keep` turns down."""
    if not self._path.exists():
      return
    with open(self._path, "rb+") as file:
      content = file.read()
      if not content.endswith(b"\n"):
        file.truncate(content.rfind(b"\n") + 1)
    if keep is None:
      return
    lines = read(self._path)
    kept = [line for line in lines if keep(line)]
    if len(kept) == len(lines):
      return
    write_atomically(self._path, "".join(json.dumps(k) + "\n" for k in kept))
    # TensorBoard files can't be cut per phase; they follow from the lines.
    shutil.rmtree(self._folder / "tensorboard", ignore_errors=True)
    for line in kept:
      numbers = {
        k: v for k, v in line.items() if k not in _RESERVED and v is not None
      }
      self._add_event(line["time"], line["phase"], line["step"], numbers)

  def _append(self, line: bytes) -> None:
    if self._lines is None:
      self._lines = open(self._path, "ab", buffering=0)  # noqa: SIM115
    start = self._lines.seek(0, os.SEEK_END)
    try:
      if self._lines.write(line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
    except OSError:
      # Half a line must not become the beginning of the next one.
      self._lines.truncate(start)
      raise

  def _add_event(
    self, now: float, phase: str, step: int, numbers: Mapping[str, float]
  ) -> None:
    event = event_pb2.Event(wall_time=now, step=step)
    for name, value in numbers.items():
      event.summary.MergeFrom(summary.scalar(f"{phase}/{name}", value))
    try:
      if self._events is None:
        self._events = self._open_events()
      # Written here and not by the queue and thread of SummaryWriter: when a
      # full disk kills that thread, the queue fills up and blocks the caller.
      self._events.write_event(event)
      self._events.flush()
    except OSError as error:
      # A reader stops at a torn record, so what follows needs a new file.
      broken, self._events = self._events, None
      self._warn(error)
      if broken is not None:
        with contextlib.suppress(OSError):
          broken.close()

  def _open_events(self) -> EventsWriter:
    folder = self._folder / "tensorboard"
    folder.mkdir(parents=True, exist_ok=True)
    self._event_files += 1
    suffix = f".{os.getpid()}.{self._event_files}"
    return EventsWriter(str(folder / "events"), suffix)

  def _warn(self, error: OSError) -> None:
    if not self._warned:
      self._warned = True
      logging.warning(
        "metrics in %s can't be written, training goes on without: %s",
        self._folder,
        error,
      )


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads metrics.jsonl; a torn last line, left by a crash, is ignored.

  Raises:
    ValueError: another line is not a JSON object.
    OSError: the file can't be read.
  """
  *lines, rest = pathlib.Path(path).read_bytes().split(b"\n")
  del rest  # Empty, or torn: every whole line ends in a newline.
  records = []
  for number, line in enumerate(lines, start=1):
    try:
      record = json.loads(line)
    except ValueError:
      record = None
    if not isinstance(record, dict):
      raise ValueError(
        f"{path}:{number} is {line[:40]!r}, not a JSON object; remove the line"
      )
    records.append(record)
  return records
