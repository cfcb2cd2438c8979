"""Commits of a run: train state and data position, atomically (orbax)."""

from __future__ import annotations

import contextlib
import errno
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from arl_jax.learner.state import TrainState

# Bytes of a commit beside its arrays: records, indices, and what a filesystem
# itself takes.
_SPARE_BYTES = 1 << 20


class CheckpointStore:
  """Keeps the newest commits of one run in one folder.

  A commit is one array tree and one JSON record. It appears under its number
  in one rename, so that a torn one is never taken for whole.
  """

  def __init__(self, folder: pathlib.Path, *, keep: int):
    """Args: folder: created if needed. keep: commits that stay."""
    self._folder = folder.absolute()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, create=True, enable_async_checkpointing=False
    )
    self._manager = ocp.CheckpointManager(self._folder, options=options)

  @property
  def newest(self) -> int | None:
    """Number of the newest commit, None if there is none."""
    return self._manager.latest_step()

  def save(
    self, number: int, state: TrainState, record: Mapping[str, Any]
  ) -> None:
    """Writes commit `number`; nothing half-written is left behind.

    Raises:
      OSError: it can't be written, such as on a full disk.
    """
    if number in self._manager.all_steps():
      return
    self._check_space(state)
    json.dumps(record)  # Before the arrays: a bad record writes nothing.
    try:
      self._manager.save(
        number,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          record=ocp.args.JsonSave(dict(record)),
        ),
      )
      self._manager.wait_until_finished()
    except Exception as error:
      with contextlib.suppress(Exception):
        self._manager.wait_until_finished()
      self._sweep()
      raise OSError(
        _errno_of(error),
        f"can't write checkpoint {number} in {self._folder}: {_brief(error)}",
      ) from error

  def record(self) -> dict[str, Any]:
    """The JSON record of the newest commit.

    Raises:
      ValueError: there is no commit, or it can't be read.
    """
    return self._read(record=ocp.args.JsonRestore())["record"]

  def restore(self, like: TrainState) -> TrainState:
    """The newest commit's state, in the structure and placement of `like`.

    Raises:
      ValueError: there is no commit, or it doesn't fit `like`.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    return self._read(state=ocp.args.StandardRestore(abstract))["state"]

  def _read(self, **items: Any) -> Any:
    number = self.newest
    if number is None:
      raise ValueError(f"{self._folder} holds no checkpoint")
    try:
      return self._manager.restore(number, args=ocp.args.Composite(**items))
    except Exception as error:
      raise ValueError(
        f"checkpoint {number} in {self._folder} can't be restored:"
        f" {_brief(error)}"
      ) from error

  def close(self) -> None:
    self._manager.close()

  def _check_space(self, state: TrainState) -> None:
    """Raises OSError if the disk can't hold another commit.

    Found out beforehand: the library's writers fail noisily, in threads.
    """
    needed = sum(x.nbytes for x in jax.tree.leaves(state)) + _SPARE_BYTES
    free = shutil.disk_usage(self._folder).free
    if free < needed:
      raise OSError(
        errno.ENOSPC,
        f"can't write a checkpoint in {self._folder}: disk full ({free} bytes"
        f" free, {needed} needed); free some space and run again with --resume",
      )

  def _sweep(self) -> None:
    """Takes away what an interrupted save left under a temporary name."""
    for path in self._folder.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(path, ignore_errors=True)


def _chain(error: BaseException | None):
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__


def _errno_of(error: BaseException) -> int:
  for one in _chain(error):
    if isinstance(one, OSError) and one.errno:
      return one.errno
  full = "no space left" in str(error).lower()
  return errno.ENOSPC if full else errno.EIO


def _brief(error: BaseException) -> str:
  if _errno_of(error) in (errno.ENOSPC, errno.EDQUOT):
    return "disk full; free some space and run again with --resume"
  lines = str(error).strip().splitlines()
  return lines[0][:300] if lines else type(error).__name__
