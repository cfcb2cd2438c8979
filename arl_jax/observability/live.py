"""A run on a terminal while it goes on: progress, numbers, processes."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from arl_jax.observability import asynchrony
from arl_jax.observability.asynchrony import is_number

# Lines of a phase that are looked at.
_LINES = 2000
_RECENT = 20
_ROWS = 24
_SPARKS = "▁▂▃▄▅▆▇█"
_FIRST = (
  *("reward", "loss", "turns", "sampled_tokens", "episode_tokens"),
  *("episode_tokens_p95", "truncated", "groups_without_signal"),
  *("staleness_mean", "staleness_max", "queue_ready", "queue_leased"),
  *("effective_tokens", "draft_acceptance", "tool_seconds"),
)
_HIDDEN = ("time", "phase", "step")
# Share of idle time, sampled tokens a second; None if that isn't known.
_Pace = tuple[float | None, float | None]
_QUEUE = ("state", "version", "ready", "leased", "open", "training")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
  """A process of the run, as the queue knows it.

  Attributes:
    role: such as "actor".
    index: of the process in its role.
    pid: of it.
    age: seconds since its last sign of life.
    stuck: seconds since it got on with its work.
    idle: share of the time between its last two signs of life, None if that
      isn't known.
    rate: tokens that it sampled a second in that time, likewise.
  """

  role: str
  index: int
  pid: int
  age: float
  stuck: float
  idle: float | None
  rate: float | None


class View:
  """Takes what is known of a run, and makes a frame of it."""

  def __init__(
    self,
    title: str,
    planned: Mapping[str, int],
    *,
    clock: Callable[[], float] = time.time,
  ):
    """Knows nothing yet.

    Args:
      title: of the run.
      planned: steps of each phase, as far as that is known.
      clock: seconds since the epoch; replaced by tests.
    """
    self._title, self._planned, self._clock = title, planned, clock
    self._lines: deque[Mapping[str, Any]] = deque(maxlen=_LINES)
    self._status: Mapping[str, Any] = {}
    self._places: list[Place] = []
    # Of a process: its counters, and what they said of idle time and tokens.
    self._seen: dict[tuple[str, int], tuple[Mapping[str, Any], _Pace]] = {}
    self._score = ""
    self._trouble = ""

  def add(self, lines: Sequence[Mapping[str, Any]], *, anew: bool) -> None:
    """Takes new lines of metrics; the old ones go if they are `anew`."""
    if anew:
      self._lines.clear()
    for line in lines:
      if self._lines and line.get("phase") != self._lines[-1].get("phase"):
        self._lines.clear()
      self._lines.append(line)

  def queue(self, status: Any, roles: Any, trouble: str = "") -> None:
    """Takes what the queue says; whatever isn't of its kind is left out.

    Args:
      status: as from GET /status; None if it doesn't answer.
      roles: as from GET /roles, likewise.
      trouble: why it doesn't.
    """
    self._trouble = trouble
    self._status = status if isinstance(status, Mapping) else {}
    if isinstance(roles, Mapping):
      roles = roles.get("roles")
    found = roles if isinstance(roles, list) else []
    places = [self._place(role) for role in found]
    self._places = [place for place in places if place is not None]

  def score(self, version: int, interval: Sequence[float | None]) -> None:
    """Takes the newest version's reward on held-out tasks: mean, low, high."""
    shown = [_number(x) for x in interval]
    self._score = f"version {version}: reward {shown[0]} "
    self._score += f"[{shown[1]}, {shown[2]}]"

  def frame(self) -> RenderableType:
    """The run as it is now."""
    parts: list[RenderableType] = [self._head()]
    tables = [self._numbers(), self._roles(), self._rates(), self._queue()]
    tables += [self._ages(), self._drops()]
    shown = [Padding(table, (1, 2, 0, 0)) for table in tables if table]
    if shown:
      parts.append(Columns(shown))
    if self._score:
      parts.append(Text(f"\nheld-out tasks  {self._score}"))
    if self._trouble:
      parts.append(Text(f"\n{clean(self._trouble, 200)}", "yellow"))
    return Group(*parts)

  # Parts of a frame.

  def _head(self) -> RenderableType:
    title = Text(clean(self._title), "bold")
    if not self._lines:
      return Group(title, Text("no metrics yet"))
    last = self._lines[-1]
    phase, step = clean(last.get("phase"), 20), last.get("step")
    of = self._planned.get(str(last.get("phase")))
    words = [f"{phase} {clean(step, 12)}" + (f"/{of}" if of else "")]
    seconds = self._seconds_a_step()
    if seconds is not None:
      words.append(f"{_number(seconds)} s a step")
      if of and is_number(step) and of > step:
        words.append(f"{_duration(seconds * (of - step))} left")
    if is_number(last.get("time")):
      ago = max(0.0, self._clock() - last["time"])
      words.append(f"last step {_duration(ago)} ago")
    parts: list[RenderableType] = [title, Text("   ".join(words))]
    if of and is_number(step):
      parts.append(ProgressBar(of, min(float(step), of), width=60))
    return Group(*parts)

  def _seconds_a_step(self) -> float | None:
    """Mean over the last steps, None before the second one."""
    recent = [
      (line["step"], line["time"])
      for line in list(self._lines)[-_RECENT:]
      if is_number(line.get("step")) and is_number(line.get("time"))
    ]
    if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
      return None
    (first, began), (last, ended) = recent[0], recent[-1]
    return max(0.0, ended - began) / (last - first)

  def _numbers(self) -> Table | None:
    values: dict[str, list[float]] = {}
    for line in self._lines:
      for name, value in line.items():
        if name in _HIDDEN or asynchrony.belongs(name):
          continue
        if is_number(value):
          values.setdefault(name, []).append(float(value))
    if not values:
      return None
    table = _table("metric", "last", f"mean of {_RECENT}", "")
    names = [*(n for n in _FIRST if n in values)]
    names += sorted(values.keys() - {*names})
    for name in names[:_ROWS]:
      recent = values[name][-_RECENT:]
      mean = sum(recent) / len(recent)
      _row(table, name, recent[-1], mean, spark(values[name][-_RECENT:]))
    return table

  def _roles(self) -> Table | None:
    if not self._places:
      return None
    table = _table("process", "pid", "sign of life", "at work", "idle", "tok/s")
    for p in self._places:
      _row(
        table,
        f"{p.role} {p.index}",
        str(p.pid),
        f"{_duration(p.age)} ago",
        f"{_duration(p.stuck)} ago",
        _share(p.idle),
        p.rate,
      )
    return table

  def _rates(self) -> Table | None:
    """What the last step says of roles, also where no queue can be asked."""
    last = list(self._lines)[-1:]
    idle = asynchrony.series(last, asynchrony.IDLE)
    rates = [asynchrony.series(last, prefix) for prefix in asynchrony.RATES]
    roles = sorted({*idle}.union(*rates))
    if not roles:
      return None
    table = _table("role, last step", "idle", "tok/s", "prefilled/s")
    for role in roles:
      cells = [r[role][-1][1] if role in r else None for r in rates]
      share = idle[role][-1][1] if role in idle else None
      _row(table, role, _share(share), *cells)
    return table

  def _queue(self) -> Table | None:
    names = [name for name in _QUEUE if name in self._status]
    if not names:
      return None
    table = _table("queue", "")
    for name in names:
      _row(table, name, clean(self._status[name], 20))
    return table

  def _ages(self) -> Table | None:
    ages = asynchrony.staleness(list(self._lines)[-_RECENT:])
    if not ages:
      return None
    table = _table("staleness", "share", "")
    for age, share in ages.items():
      _row(table, str(age), _share(share), "█" * round(20 * min(share, 1.0)))
    return table

  def _drops(self) -> Table | None:
    drops = asynchrony.dropped(list(self._lines))
    if not drops and isinstance(self._status.get("drops"), Mapping):
      drops = asynchrony.series([self._status["drops"]], "")
    if not drops:
      return None
    table = _table("dropped", "")
    for reason, points in drops.items():
      _row(table, reason, f"{points[-1][1]:.0f}")
    return table

  def _place(self, role: Any) -> Place | None:
    """A process, None for what is none."""
    if not isinstance(role, Mapping):
      return None
    name = role.get("role")
    numbers: list[Any] = [
      role.get(key) for key in ("index", "pid", "age", "idle_seconds")
    ]
    if not isinstance(name, str) or not all(map(is_number, numbers)):
      return None
    index, pid, age, stuck = numbers
    if not isinstance(index, int) or not isinstance(pid, int):
      return None
    counters = role.get("counters")
    counters = counters if isinstance(counters, Mapping) else {}
    pace = self._pace((name, index), counters)
    return Place(clean(name, 20), index, pid, age, stuck, *pace)

  def _pace(self, key: tuple[str, int], counters: Mapping[str, Any]) -> _Pace:
    """Of a process between its last two signs of life that differ."""
    old, pace = self._seen.get(key, ({}, (None, None)))
    seconds = _growth(old, counters, "seconds")
    if seconds == 0:
      return pace  # The same sign of life.
    pace = None, None
    if seconds is not None and seconds > 0:
      idle = _growth(old, counters, "idle_seconds")
      tokens = _growth(old, counters, "sampled_tokens")
      pace = (
        None if idle is None else idle / seconds,
        None if tokens is None else tokens / seconds,
      )
    self._seen[key] = counters, pace
    return pace


def planned(config: Mapping[str, Any]) -> dict[str, int]:
  """Steps of each phase, as far as a configuration (JSON values) says."""
  found: dict[str, int] = {}
  for phase, value in (
    ("warm_start", config.get("warm_start")),
    ("rl", config.get("rl")),
    ("training", config),
  ):
    steps = value.get("steps") if isinstance(value, Mapping) else None
    if isinstance(steps, int):
      found[phase] = steps
  return found


def spark(values: Sequence[float]) -> str:
  """Values as a line of blocks, the least lowest; flat if all are alike."""
  low, high = min(values), max(values)
  if not high > low:
    return _SPARKS[0] * len(values)
  scale = (len(_SPARKS) - 1) / (high - low)
  return "".join(_SPARKS[round((v - low) * scale)] for v in values)


def clean(value: Any, most: int = 80) -> str:
  """Text of anything, without what a terminal would obey."""
  text = str(value)
  text = text if len(text) <= most else text[: most - 1] + "…"
  return "".join(c if c.isprintable() else "·" for c in text)


def _growth(
  old: Mapping[str, Any], new: Mapping[str, Any], name: str
) -> float | None:
  """Of a counter; None if it isn't in both."""
  now, then = new.get(name), old.get(name)
  return now - then if is_number(now) and is_number(then) else None


def _table(*heads: str) -> Table:
  table = Table(box=None, pad_edge=False, header_style="dim")
  for n, head in enumerate(heads):
    justify: JustifyMethod = "right" if n and head else "left"
    table.add_column(head, justify=justify, no_wrap=True)
  return table


def _row(table: Table, name: Any, *cells: Any) -> None:
  shown = [Text(c if isinstance(c, str) else _number(c)) for c in cells]
  table.add_row(Text(clean(name, 32)), *shown)


def _number(value: Any) -> str:
  return f"{value:.4g}" if is_number(value) else "–"


def _share(value: float | None) -> str:
  if value is None:
    return "–"
  return f"{100 * min(max(value, 0.0), 1.0):.0f} %"


def _duration(seconds: float) -> str:
  if not 0 <= seconds < 1e9:
    return "?"
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{rest:02}"
  return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
