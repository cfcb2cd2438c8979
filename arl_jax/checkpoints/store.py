"""Commits of a run: train state, position and queue, as one atomic thing."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from arl_jax import records, types
from arl_jax.checkpoints import leaves, manifest
from arl_jax.checkpoints.commit_folder import CommitFolder, best
from arl_jax.checkpoints.failure import (
  DamagedError,
  ForeignError,
  errno_of,
  reason,
)
from arl_jax.checkpoints.first_process import from_first
from arl_jax.checkpoints.room import make_room
from arl_jax.checkpoints.state_files import read, size, start_writing

# Bytes of a commit beside its arrays: records, indices, and what a filesystem
# itself takes.
_SPARE_BYTES = 1 << 20
_STATE, _QUEUE = "state", "queue.json"


class Commit(NamedTuple):
  """What was restored.

  Attributes:
    number: it was saved under.
    state: in the structure and placement that was asked for.
    record: JSON values, as saved.
    queue: groups, as saved.
    lineage: ids of the runs that led to it, oldest first.
    skipped: what was wrong with each newer commit that was passed over.
  """

  number: int
  state: Any
  record: dict[str, Any]
  queue: tuple[types.Group, ...]
  lineage: tuple[str, ...]
  skipped: tuple[str, ...]


class CheckpointStore:
  """Keeps the newest and the best commits of one run in one folder.

  A commit appears under its number in one rename, so that a torn one is never
  taken for whole; an old one is deleted only after that. One job at a time may
  have a store that writes on a folder: a new one deletes what an interrupted
  one left. All processes of a `jax.distributed` job call each method together.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    keep: int,
    keep_best: int = 0,
    quota_bytes: int | None = None,
    identity: Mapping[str, Any] | None = None,
    writes: bool = True,
  ):
    """Opens a folder, which is created if needed.

    Args:
      folder: on a filesystem that all processes share.
      keep: how many of the newest commits stay, at least 1.
      keep_best: how many of those with the highest scores stay besides.
      quota_bytes: most that the folder's files may take, None for no limit.
      identity: JSON values that say what run this is (of configuration and
        data); a commit with other ones is refused. None accepts all.
      writes: False only restores: the folder is left as it is, so that another
        job may have its store there meanwhile.

    Raises:
      ValueError: an argument that can't be.
      OSError: the folder can't be created.
    """
    for name, value, least in (
      ("keep", keep, 1),
      ("keep_best", keep_best, 0),
      ("quota_bytes", quota_bytes, 1),
    ):
      if value is not None and value < least:
        raise ValueError(f"{name} is {value}, must be at least {least}")
    self._keep, self._keep_best, self._quota = keep, keep_best, quota_bytes
    self._identity = None if identity is None else _plain("identity", identity)
    self._folder = CommitFolder(pathlib.Path(folder).absolute())
    if writes:
      from_first(self._open)
    self._background = ThreadPoolExecutor(1, "checkpoint")
    # The commit being written.
    self._writing: tuple[int, Future[None]] | None = None
    # The commit that the run goes on from, until that is saved.
    self._base: int | None = None
    self._lineage: tuple[str, ...] = (from_first(_new_id),)

  def _open(self) -> None:
    self._folder.path.mkdir(parents=True, exist_ok=True)
    self._folder.sweep()

  @property
  def newest(self) -> int | None:
    """Number of the newest commit that is written, None if there is none."""
    return max(self.numbers, default=None)

  @property
  def numbers(self) -> list[int]:
    """Of the commits that are written, in order."""
    return self._folder.numbers

  @property
  def lineage(self) -> tuple[str, ...]:
    """Ids of the runs up to this one, oldest first.

    A new store is a run of its own, until it restores: then it's a run that
    goes on from those of the commit restored.
    """
    return self._lineage

  def save(
    self,
    number: int,
    state: Any,
    record: Mapping[str, Any],
    *,
    queue: Sequence[types.Group] = (),
    score: float | None = None,
    wait: bool = False,
  ) -> None:
    """Takes a copy of everything and writes it in the background.

    A number that is there already is left as it is. But the first save after a
    restore takes away the commits newer than the one restored: they were
    damaged or given up, and the run goes on without them.

    Args:
      number: at least 0, and above those that are there.
      state: any pytree of arrays; it may be donated afterwards.
      record: JSON values.
      queue: groups that are rolled out and not trained yet.
      score: higher is better; without one, a commit isn't among the best.
      wait: whether to return only when it is written.

    Raises:
      ValueError: a number, record or score that can't be saved.
      OSError: this commit, or the last, can't be written, such as on a full
        disk or beyond the quota. Nothing half-written is left behind.
    """
    body, text = self._described(number, record, queue, score)
    self.wait()
    needed = size(state) + len(text) + _SPARE_BYTES
    if not from_first(lambda: self._make_room(number, needed)):
      return
    self._base = None
    body["leaves"] = leaves.described(state)
    try:
      finish = start_writing(self._folder.partial(number) / _STATE, state)
    except Exception as error:
      raise self._failed(number, error) from error
    job = self._background.submit(self._finish, finish, number, body, text)
    self._writing = number, job
    if wait:
      self.wait()

  def check_room(self, state: Any) -> None:
    """Raises OSError if the quota can't hold one commit of such a state."""
    needed = size(state) + _SPARE_BYTES
    if self._quota is not None and needed > self._quota:
      raise OSError(
        errno.EDQUOT,
        f"a checkpoint in {self._folder.path} needs up to {needed} bytes, but"
        f" the quota is {self._quota} bytes",
      )

  def wait(self) -> None:
    """Returns when nothing is being written any more.

    Raises:
      OSError: what was being written could not be.
    """
    if self._writing is None:
      return
    number, job = self._writing
    error = job.exception()
    self._writing = None
    failed = self._failed(number, error) if error is not None else None
    # A failure of process 0 is one of all; and all see what it has published.
    from_first(lambda: _raise(failed))
    _raise(failed)

  def record(self, number: int | None = None) -> dict[str, Any]:
    """The record of a commit, by default the newest.

    Raises:
      ValueError: there is no commit, or it can't be used.
    """
    chosen = self._candidates(number)[0]
    with self._naming(chosen):
      return from_first(lambda: self._read(chosen))["record"]

  def restore(
    self,
    like: Any,
    *,
    number: int | None = None,
    fall_back: bool = False,
  ) -> Commit:
    """Reads a commit and goes on from it.

    Args:
      like: a tree of what is wanted, as arrays or `jax.ShapeDtypeStruct` with
        shardings; or a function that makes one from the commit's record.
      number: of the commit, by default the newest.
      fall_back: whether an earlier commit will do if that one is damaged or
        another program's.

    Raises:
      ValueError: there is no commit, or it is damaged, or doesn't fit `like`,
        or is of another program, schema version or identity. Only what is
        damaged or another program's is ever passed over.
      OSError: what was being written could not be.
    """
    self.wait()
    skipped: list[str] = []
    for chosen in self._candidates(number):
      try:
        with self._naming(chosen):
          commit = self._restored(chosen, like)
      except (DamagedError, ForeignError) as error:
        if not fall_back:
          raise
        skipped.append(str(error))
        continue
      self._base = chosen
      self._lineage = (*commit.lineage, from_first(_new_id))
      return commit._replace(skipped=tuple(skipped))
    raise DamagedError(f"no checkpoint is whole: {'; '.join(skipped)}")

  def close(self) -> None:
    """Waits, and gives back threads. Raises OSError as `wait` does."""
    try:
      self.wait()
    finally:
      self._background.shutdown()

  def _described(
    self,
    number: int,
    record: Mapping[str, Any],
    queue: Sequence[types.Group],
    score: float | None,
  ) -> tuple[dict[str, Any], str]:
    """The manifest, but for the arrays, and the queue's file."""
    if number < 0:
      raise ValueError(f"number is {number}, must be at least 0")
    if score is not None and not math.isfinite(score):
      raise ValueError(f"score is {score}, must be finite; None for no score")
    body = {
      "number": int(number),
      "lineage": self._lineage,
      "identity": self._identity,
      "score": None if score is None else float(score),
      "record": _plain("record", record),
    }
    return body, json.dumps([records.to_json(group) for group in queue])

  def _make_room(self, number: int, needed: int) -> bool:
    """Whether to write a commit of `needed` bytes; if so, there's room then."""
    folder, base = self._folder, self._base
    own, there = folder.own_numbers, folder.numbers
    given_up = [n for n in own if base is not None and n > base]
    if number in there and number not in own:
      raise OSError(
        errno.EEXIST,
        f"can't write checkpoint {number}: {folder[number]} exists, and isn't a"
        " checkpoint of this program",
      )
    if number in there and number not in given_up:
      return False
    newest = max({*own} - {*given_up}, default=number)
    if newest > number:
      raise ValueError(
        f"number is {number}, must be above {newest}, the newest checkpoint in"
        f" {folder.path}"
      )
    folder.sweep()
    make_room(
      folder,
      number,
      needed,
      given_up=given_up,
      keep_best=self._keep_best,
      quota=self._quota,
    )
    return True

  def _finish(
    self,
    finish_state: Callable[[], None],
    number: int,
    body: Mapping[str, Any],
    queue: str,
  ) -> None:
    """Writes what isn't arrays, then publishes; in the background."""
    finish_state()
    if jax.process_index() != 0:
      return
    partial = self._folder.partial(number)
    (partial / _QUEUE).write_text(queue)
    manifest.seal(partial, body)
    self._folder.publish(number)
    own = self._folder.own_numbers
    staying = {*own[-self._keep :]}
    if self._keep_best:
      staying |= best(self._folder.scores(), self._keep_best)
    for old in sorted({*own} - staying):
      self._folder.remove(old)

  def _failed(self, number: int, error: BaseException) -> OSError:
    if jax.process_index() == 0:
      self._folder.sweep()
    return OSError(
      errno_of(error),
      f"can't write checkpoint {number} in {self._folder.path}:"
      f" {reason(error)}",
    )

  def _candidates(self, number: int | None) -> list[int]:
    """Numbers of the commit to read and of earlier ones, newest first."""
    numbers = from_first(lambda: self._folder.numbers)
    if not numbers:
      raise ValueError(f"{self._folder.path} holds no checkpoint")
    if number is not None and number not in numbers:
      raise ValueError(
        f"{self._folder.path} holds no checkpoint {number}, only"
        f" {', '.join(map(str, numbers))}"
      )
    last = numbers[-1] if number is None else number
    return [n for n in reversed(numbers) if n <= last]

  def _read(self, number: int) -> dict[str, Any]:
    """A manifest after all checks but those of the arrays."""
    body = manifest.read(self._folder[number])
    manifest.check_identity(body, self._identity)
    manifest.check_files(self._folder[number], body)
    return body

  def _restored(self, number: int, like: Any) -> Commit:
    body = from_first(lambda: self._read(number))
    if callable(like):
      like = like(body["record"])
    leaves.check_fits(body["leaves"], like)
    state = read(self._folder[number] / _STATE, like)
    leaves.check_digests(body["leaves"], state)
    queue = from_first(
      lambda: json.loads((self._folder[number] / _QUEUE).read_text())
    )
    groups: Any = tuple(records.from_json(group) for group in queue)
    lineage = tuple(body["lineage"])
    return Commit(number, state, body["record"], groups, lineage, ())

  @contextlib.contextmanager
  def _naming(self, number: int) -> Iterator[None]:
    """Errors inside say which commit they are about."""
    where = f"checkpoint {number} in {self._folder.path} can't be restored"
    try:
      yield
    except DamagedError as error:
      raise DamagedError(
        f"{where}: it is damaged: {error} ({_FALL_BACK})"
      ) from error
    except ForeignError as error:
      raise ForeignError(f"{where}: {error} ({_FALL_BACK})") from error
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from error


_FALL_BACK = "--fall_back takes the one before it"


def _new_id() -> str:
  return uuid.uuid4().hex[:12]


def _plain(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
  try:
    return json.loads(json.dumps(dict(value)))
  except (TypeError, ValueError) as error:
    raise ValueError(f"{name} must hold JSON values: {error}") from error


def _raise(error: Exception | None) -> None:
  if error is not None:
    raise error
