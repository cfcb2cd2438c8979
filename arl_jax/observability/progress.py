"""Live progress on a terminal; a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

import rich.console
import rich.progress


class Progress:
  """Shows which phase a run is in, how far, and its latest numbers.

  On a terminal each phase is a bar with elapsed and remaining time. Elsewhere
  a phase prints its first and its last update, and between them one line at
  most every `interval` seconds. A context manager.
  """

  def __init__(
    self,
    stream: TextIO | None = None,
    *,
    interval: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Shows nothing before the first phase.

    Args:
      stream: where to write; standard output by default.
      interval: seconds between plain lines, > 0.
      clock: returns seconds; replaced by tests.

    Raises:
      ValueError: `interval` is not positive.
    """
    if interval <= 0:
      raise ValueError(f"interval {interval} must be above 0 seconds")
    stream = sys.stdout if stream is None else stream
    self._display: _Lines | _Bars = (
      _Bars(stream) if stream.isatty() else _Lines(stream, interval, clock)
    )

  def phase(self, name: str, total: int, *, start: int = 0) -> None:
    """Ends the phase before, if any, and begins one of `total` steps.

    Args:
      name: shown.
      total: steps of the phase, >= 0.
      start: steps done before, by the run that is resumed; >= 0.

    Raises:
      ValueError: `total` or `start` is negative.
    """
    if total < 0 or start < 0:
      raise ValueError(
        f"phase {name!r} has total {total} and start {start}; neither may be"
        " negative"
      )
    self._display.end()
    self._display.begin(name, total, start)

  def update(self, step: int, **numbers: float) -> None:
    """Shows that `step` steps of the phase are done, and `numbers`.

    Raises:
      RuntimeError: no phase has begun.
    """
    self._display.update(step, _text(numbers))

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._display.end()
    self._display.close()


class _Lines:
  """Plain lines for logs and pipes."""

  def __init__(
    self, stream: TextIO, interval: float, clock: Callable[[], float]
  ):
    self._stream = stream
    self._interval = interval
    self._clock = clock
    self._name: str | None = None
    self._total = self._start = 0
    self._began = self._shown = 0.0
    self._pending: str | None = None

  def begin(self, name: str, total: int, start: int) -> None:
    self._name, self._total, self._start = name, total, start
    self._began = self._clock()
    self._shown = float("-inf")

  def update(self, step: int, text: str) -> None:
    if self._name is None:
      raise RuntimeError("Progress.update before Progress.phase")
    now = self._clock()
    self._pending = self._line(step, text, now - self._began)
    if now - self._shown >= self._interval:
      self._show(now)

  def end(self) -> None:
    if self._pending is not None:
      self._show(self._clock())
    self._name = None

  def close(self) -> None:
    pass

  def _show(self, now: float) -> None:
    print(self._pending, file=self._stream, flush=True)
    self._pending, self._shown = None, now

  def _line(self, step: int, text: str, elapsed: float) -> str:
    line = f"{self._name} {step}/{self._total}  {_duration(elapsed)}"
    done, left = step - self._start, self._total - step
    if left > 0 and done > 0:
      line += f" + {_duration(elapsed / done * left)} left"
    return f"{line}  {text}".rstrip()


class _Bars:
  """One live bar a phase."""

  def __init__(self, stream: TextIO):
    self._bars = rich.progress.Progress(
      rich.progress.TextColumn("{task.description}", markup=False),
      rich.progress.BarColumn(bar_width=24),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TimeElapsedColumn(),
      rich.progress.TextColumn("left"),
      # Steps are few and uneven (the first compiles), hence the long memory.
      rich.progress.TimeRemainingColumn(),
      rich.progress.TextColumn("{task.fields[numbers]}", markup=False),
      console=rich.console.Console(file=stream),
      speed_estimate_period=300.0,
    )
    self._task: rich.progress.TaskID | None = None

  def begin(self, name: str, total: int, start: int) -> None:
    self._bars.start()
    self._task = self._bars.add_task(
      name, total=total, completed=start, numbers=""
    )

  def update(self, step: int, text: str) -> None:
    if self._task is None:
      raise RuntimeError("Progress.update before Progress.phase")
    self._bars.update(self._task, completed=step, numbers=text)

  def end(self) -> None:
    if self._task is not None:
      self._bars.stop_task(self._task)
    self._task = None

  def close(self) -> None:
    self._bars.stop()


def _text(numbers: dict[str, float]) -> str:
  return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _duration(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{rest:02}"
  return f"{minutes}:{rest:02}"
