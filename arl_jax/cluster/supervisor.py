"""Keeps a run's processes going until its learner is done. Imports no jax."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from arl_jax.cluster.config import ClusterConfig

# Exit codes of a learner that was asked to stop, and of errors that its user
# must mend.
_INTERRUPTED = 130
_USAGE = 2
_KNOWN_ERRORS = (1, _USAGE)
# Seconds before a process is started again: from the first to the last of
# these, doubled each time it ends within as many seconds as the third.
_WAITS, _HEALTHY_SECONDS = (1.0, 30.0), 60.0
_POLL_SECONDS = 0.2
# That processes without anything to commit get to end in.
_GRACE_SECONDS = 15.0
# Actors give back to the queue what they hold, hence the order.
_STOPPED_IN_ORDER = (("actor", "evaluator"), ("server",), ("queue",))


class Handle(Protocol):
  """A process of one role."""

  def poll(self) -> int | None:
    """Its exit code, -n if signal n ended it; None while it runs."""

  def terminate(self) -> None:
    """Asks it to stop, as SIGTERM does; nothing if it has ended."""

  def kill(self) -> None:
    """Ends it, and what it started, at once; also if it hangs."""

  def last_lines(self) -> str:
    """What it printed last; "" where that was seen as it was printed."""


class Processes(Protocol):
  """Where the processes of a run are started: this machine, or a cluster."""

  def start(self, role: str, index: int, *, resume: bool) -> Handle:
    """Starts `launch.role` of a role; doesn't wait until it is ready.

    Args:
      role: "queue", "learner", "server", "actor" or "evaluator".
      index: of the process among those of its role.
      resume: only for the first learner: go on with the run in its folder,
        rather than what the user asked for.

    Raises:
      OSError: it can't be started.
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
  """The latest sign of life of a process.

  Attributes:
    role: of the process.
    index: of the process among those of its role.
    age: seconds since the queue heard of it.
    idle_seconds: that it had not got on with its work, then.
  """

  role: str
  index: int
  age: float
  idle_seconds: float


class Signs(Protocol):
  """Who asks the queue for signs of life."""

  def look(self) -> Collection[Sign] | None:
    """Signs of all processes, within seconds; None without an answer."""


@dataclasses.dataclass(slots=True, eq=False)
class _Process:
  """One role and index, over all its starts.

  Attributes:
    started: time of the latest start.
    seen: time of the latest sign of life since then.
    due: time of the next start.
    quick: starts in a row that soon ended.
    killed: why, of the latest start.
  """

  role: str
  index: int
  handle: Handle | None = None
  starts: int = 0
  started: float = 0.0
  seen: float | None = None
  due: float = 0.0
  quick: int = 0
  killed: str = ""

  @property
  def name(self) -> str:
    return f"{self.role}-{self.index}"


class _GivenUp(Exception):
  """The run can't go on; the message says why."""

  def __init__(self, reason: str, code: int):
    super().__init__(reason)
    self.code = code


def processes_of(cluster: ClusterConfig) -> list[tuple[str, int]]:
  """Role and index of each process of a run, in the order of starts."""
  counts = {
    "queue": 1,
    "learner": cluster.learners,
    "server": cluster.servers * cluster.server_hosts,
    "actor": cluster.actors,
    "evaluator": cluster.evaluators,
  }
  return [(role, i) for role, count in counts.items() for i in range(count)]


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


class Supervisor:
  """Starts every process of a run, and again whatever ends before the learner.

  A process that gives no sign of life, or doesn't get on with its work, is
  killed first. The learner's processes are one job, and so are those of a
  replica: if one ends, the others are ended and all are started again. What
  each one needs to go on lies in the run's folder, with the queue or with the
  published weights, so that a start needs no other job's help.
  """

  def __init__(
    self,
    processes: Processes,
    cluster: ClusterConfig,
    signs: Signs,
    *,
    opened: Callable[[], bool],
    should_stop: Callable[[], bool],
    say: Callable[[str], None] = _say,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ):
    """Starts nothing before `run`.

    Args:
      processes: starts them.
      cluster: how many, and how patient to be.
      signs: of life.
      opened: whether the learner has opened the run's folder since this run was
        launched, so that the next learner is to go on with what is there.
      should_stop: asked several times a second.
      say: called with a line about each process that is started again.
      clock: returns seconds.
      sleep: waits so many.
    """
    self._start, self._cluster, self._signs = processes.start, cluster, signs
    self._opened, self._should_stop = opened, should_stop
    self._say, self._clock, self._sleep = say, clock, sleep
    self._all = [_Process(role, i) for role, i in processes_of(cluster)]
    # The run ends as the first of them does.
    self._learners = [p for p in self._all if p.role == "learner"]
    self._learner = self._learners[0]
    # Since when the queue answers without a gap, None while it doesn't.
    self._answers_since: float | None = None
    self._next_look = 0.0

  def run(self) -> int:
    """Returns the exit code of the run once all its processes have ended.

    0: the learner is done; 130: it was stopped; otherwise the run can't go on,
    and `say` has said why.

    Raises:
      KeyboardInterrupt: of a signal handler; nothing is left running.
    """
    try:
      code = self._supervise()
      self._stop_others()
    except _GivenUp as error:
      self._say(f"error: {error}")
      # A learner that can still commit does.
      self._stop(self._learners, self._cluster.stall_seconds)
      self._stop_others()
      code = error.code
    finally:
      self._kill(self._all)
    return code

  def _supervise(self) -> int:
    """Until the learner is done or stopped; returns its exit code."""
    while not self._should_stop():
      for process in self._all:
        code = self._tend(process)
        if code is None:
          continue
        if process.role == "learner" and code in (0, _INTERRUPTED):
          if process is self._learner:
            return code
          continue  # As the first one will.
        self._ended(process, code)
      if self._clock() >= self._next_look:
        self._look()
        self._next_look = self._clock() + self._cluster.beat_seconds
      self._sleep(_POLL_SECONDS)
    self._stop(self._learners, self._cluster.stall_seconds)
    code = self._learner.handle.poll() if self._learner.handle else None
    return code if code in (0, *_KNOWN_ERRORS) else _INTERRUPTED

  def _tend(self, process: _Process) -> int | None:
    """Starts a process that is due; returns the exit code of one that ended."""
    if process.handle is not None:
      return process.handle.poll()
    now = self._clock()
    if now < process.due:
      return None
    if process.role == "queue":
      # The next one knows nobody before the beats come in.
      self._answers_since = None
    process.starts += 1
    process.started, process.seen, process.killed = now, None, ""
    resume = process is self._learner and process.starts > 1 and self._opened()
    try:
      process.handle = self._start(process.role, process.index, resume=resume)
    except OSError as error:
      self._again(process, f"can't be started: {error}", "", 1)
    return None

  def _ended(self, process: _Process, code: int) -> None:
    """What happens after an end that nobody asked for.

    Raises:
      _GivenUp: another start would not help, or they were too many.
    """
    handle, process.handle = process.handle, None
    lines = handle.last_lines() if handle is not None else ""
    job = self._job_of(process)
    # None of the others goes on by itself.
    self._kill(job)
    for other in job:
      other.handle = None
    lived = self._clock() - process.started
    why = process.killed or f"ended with {_named(code)}"
    if code in _KNOWN_ERRORS and process.starts == 1 and not process.killed:
      # Errors of configurations and folders come before anything else; at the
      # second start a learner would go on with a run that it didn't make.
      early = process.seen is None or code == _USAGE
      if process in self._learners:
        early = lived < self._cluster.stall_seconds
      if early:
        raise _GivenUp(_with(f"{process.name} {why}", lines), code)
    self._again(process, why, lines, code)

  def _again(self, process: _Process, why: str, lines: str, code: int) -> None:
    if process.starts > self._cluster.restarts:
      raise _GivenUp(
        _with(
          f"{process.name} {why}; that was start {process.starts}, and"
          f" cluster.restarts is {self._cluster.restarts}",
          lines,
        ),
        code if code in _KNOWN_ERRORS else 1,
      )
    now = self._clock()
    quick = now - process.started < _HEALTHY_SECONDS
    process.quick = process.quick + 1 if quick else 1
    first, last = _WAITS
    wait = min(last, first * 2 ** (process.quick - 1))
    for other in self._job_of(process):
      other.due = now + wait
    self._say(
      _with(
        f"{process.name} {why} after {now - process.started:.0f} s; start"
        f" {process.starts + 1} in {wait:.0f} s",
        lines,
      )
    )

  def _job_of(self, process: _Process) -> list[_Process]:
    """Those that it can't go on without, and itself."""
    if process.role == "learner":
      return self._learners
    if process.role != "server":
      return [process]
    hosts = self._cluster.server_hosts
    replica = process.index // hosts
    servers = [p for p in self._all if p.role == "server"]
    return [p for p in servers if p.index // hosts == replica]

  def _look(self) -> None:
    """Kills processes that are lost or don't get on."""
    asked = self._clock()
    signs = self._signs.look()
    if signs is None:
      self._answers_since = None
    elif self._answers_since is None:
      self._answers_since = asked
    by_name = {(s.role, s.index): s for s in signs or ()}
    for process in self._all:
      if process.handle is None:
        continue
      if process.role == "queue":
        # An answer is a sign of life of the queue itself.
        process.seen = process.seen if signs is None else asked
        sign = None
      else:
        sign = by_name.get((process.role, process.index))
      # A sign from before the start is one of the process before.
      if sign is not None and asked - sign.age >= process.started:
        process.seen = asked - sign.age
      else:
        sign = None
      reason = self._fault(process, sign, asked)
      if reason:
        process.killed = f"{reason} and was killed"
        process.handle.kill()

  def _fault(
    self, process: _Process, sign: Sign | None, now: float
  ) -> str | None:
    """Why a running process must be killed, None if it needn't."""
    lost, stall = self._cluster.lost_seconds, self._cluster.stall_seconds
    since = process.started if process.seen is None else process.seen
    if process.role != "queue":
      if self._answers_since is None:
        return None  # Nobody could have heard of it.
      since = max(since, self._answers_since)
    silent = now - since
    if process.seen is None and silent > stall:
      return f"gave no sign of life in its first {silent:.0f} s"
    if process.seen is not None and silent > lost:
      return f"gave no sign of life for {silent:.0f} s"
    if sign is not None and sign.idle_seconds > stall:
      return f"did not get on with its work for {sign.idle_seconds:.0f} s"
    return None

  def _stop_others(self) -> None:
    self._stop(self._learners[1:], _GRACE_SECONDS)
    for roles in _STOPPED_IN_ORDER:
      self._stop([p for p in self._all if p.role in roles], _GRACE_SECONDS)

  def _stop(self, processes: Sequence[_Process], seconds: float) -> None:
    """Asks processes to stop; kills those that take longer than that."""
    handles = {p.name: p.handle for p in processes if p.handle is not None}
    for handle in handles.values():
      handle.terminate()
    limit = self._clock() + seconds
    while any(handle.poll() is None for handle in handles.values()):
      if self._clock() > limit:
        break
      self._sleep(_POLL_SECONDS / 4)
    for name, handle in handles.items():
      if handle.poll() is None:
        self._say(f"{name} didn't stop within {seconds:.0f} s; killed")
        handle.kill()

  def _kill(self, processes: Sequence[_Process]) -> None:
    """Returns once they have ended. Raises TimeoutError if they don't."""
    handles = [p.handle for p in processes if p.handle is not None]
    for handle in handles:
      handle.kill()
    limit = self._clock() + _GRACE_SECONDS
    while any(handle.poll() is None for handle in handles):
      if self._clock() > limit:
        left = [
          p.name
          for p in processes
          if p.handle is not None and p.handle.poll() is None
        ]
        raise TimeoutError(
          f"waited {_GRACE_SECONDS:.0f} s for killed processes to end:"
          f" {', '.join(left)} did not"
        )
      self._sleep(_POLL_SECONDS / 4)


def _named(code: int) -> str:
  return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _with(line: str, lines: str) -> str:
  """A line, and below it what a process printed last."""
  return "\n".join([line, *(f"  | {text}" for text in lines.splitlines())])
