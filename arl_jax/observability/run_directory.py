"""The folder of one run: who owns it, and what made what lies in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from typing import IO, Any, Literal, get_args

from arl_jax.observability import provenance

Mode = Literal["new", "overwrite", "resume"]

_CONFIG = "config.json"
# What an interrupted overwrite leaves behind instead of config.json: no run to
# go on with, but still a folder that may be overwritten.
_OVERWRITTEN = "config.json.overwritten"
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
  """Writes a whole UTF-8 file or nothing: readers see the old or the new one.

  Args:
    path: file to write or replace; its folder must exist.
    text: what it holds; characters that UTF-8 can't hold are replaced.

  Raises:
    OSError: the file can't be written, with the cause (such as a full disk) in
      one line; what was there before still is.
  """
  path = pathlib.Path(path)
  temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    try:
      with open(temporary, "wb") as file:
        file.write(text.encode("utf-8", errors="replace"))
        file.flush()
        os.fsync(file.fileno())
      os.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
      raise
    _sync_folder(path.parent)
  except OSError as error:
    cause = error.strerror or str(error)
    if error.errno in _FULL:
      cause = "disk full; free some space and run again"
    raise OSError(error.errno, f"can't write {path}: {cause}") from error


def _sync_folder(folder: pathlib.Path) -> None:
  """Makes a rename in `folder` survive a power cut."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


class RunDirectory:
  """A run's folder, owned by one process at a time; a context manager.

  `config.json` in it says which configuration, data, code and environment made
  the run, and is what later runs are compared with.

  Attributes:
    path: the folder.
    resumed: whether a run that was already there goes on.
  """

  def __init__(
    self,
    path: pathlib.Path,
    lock: IO[bytes],
    record: dict[str, Any],
    *,
    resumed: bool,
  ):
    """Use `open`."""
    self.path = path
    self.resumed = resumed
    self._lock = lock
    self._record = record

  @classmethod
  def open(
    cls,
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    mode: Mode = "new",
    mutable_on_resume: Collection[str] = (),
  ) -> RunDirectory:
    """Creates, takes over or goes on with a run's folder, and locks it.

    Args:
      path: a local folder.
      config: resolved configuration, nested; JSON values.
      data: what the run learns from, such as digests; JSON values. None if not
        recorded.
      mode: "new" refuses a folder that holds a run, "overwrite" empties it,
        "resume" goes on with the same run.
      mutable_on_resume: dotted config fields that a resumed run may change; a
        name stands for everything below it too.

    Raises:
      ValueError: the folder can't be used this way; says why and what to do.
      OSError: the folder can't be written.
    """
    if mode not in get_args(Mode):
      raise ValueError(f"mode {mode!r} is none of {list(get_args(Mode))}")
    if "://" in str(path):
      raise ValueError(
        f"run directory {path} is not a local folder; give a path on this"
        " machine"
      )
    folder = pathlib.Path(path)
    if folder.exists() and not folder.is_dir():
      raise ValueError(f"run directory {folder} is a file; name a folder")
    if mode == "resume" and not (folder / _CONFIG).is_file():
      raise ValueError(
        f"run directory {folder} holds no run to go on with; leave out --resume"
        " to start one"
      )
    plain = provenance.plain(config)
    created = _make_folder(folder)
    try:
      lock = _take_lock(folder)
      try:
        return cls._open_locked(
          folder, lock, plain, data, mode, mutable_on_resume
        )
      except BaseException:
        lock.close()
        raise
    except BaseException:
      if created:
        # Nothing of ours stays: neither the lock nor the folders made for it.
        _remove_folders(folder, created)
      raise

  @classmethod
  def _open_locked(
    cls,
    folder: pathlib.Path,
    lock: IO[bytes],
    config: dict[str, Any],
    data: Mapping[str, Any] | None,
    mode: Mode,
    mutable: Collection[str],
  ) -> RunDirectory:
    old = _read_record(folder)
    if mode == "resume":
      if old is None:
        raise ValueError(f"run directory {folder} holds no run to go on with")
      _check_config(folder, old["config"], config, mutable)
      run = cls(
        folder, lock, provenance.resumed_record(old, config), resumed=True
      )
      if data is not None:
        run._check_data(provenance.plain(data))
        run._record["data"] = provenance.plain(data)
    else:
      _prepare(folder, old, config, mode)
      record = provenance.new_record(
        config, None if data is None else provenance.plain(data)
      )
      run = cls(folder, lock, record, resumed=False)
    run.write_json(_CONFIG, run._record)
    with contextlib.suppress(FileNotFoundError):
      (folder / _OVERWRITTEN).unlink()
    return run

  def _check_data(self, data: dict[str, Any]) -> None:
    old = self._record["data"]
    if old is None or old == data:
      return
    fields = provenance.differences(old, data)
    raise ValueError(
      f"run directory {self.path} was made from other data:"
      f" {provenance.describe(old, data, fields)}; give the data that it was"
      " made from, another --config.run_dir, or --overwrite"
    )

  def write_json(self, name: str, value: Any) -> None:
    """Writes a JSON file atomically; NaN and infinities become null.

    Raises:
      ValueError: `name` is not a plain file name.
      OSError: the file can't be written, e.g. the disk is full.
    """
    text = json.dumps(
      provenance.without_nonfinite(value), indent=2, allow_nan=False
    )
    self.write_text(name, text + "\n")

  def write_text(self, name: str, text: str) -> None:
    """Writes a UTF-8 text file atomically.

    Raises:
      ValueError: `name` is not a plain file name.
      OSError: the file can't be written, e.g. the disk is full.
    """
    if name in ("", ".", "..") or pathlib.PurePath(name).name != name:
      raise ValueError(f"name {name!r} is not the plain name of a file")
    write_atomically(self.path / name, text)

  def close(self) -> None:
    """Lets other processes have the folder."""
    self._lock.close()

  def __enter__(self) -> RunDirectory:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()


def _make_folder(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders that had to be made, innermost first."""
  made = [p for p in (folder, *folder.parents) if not p.exists()]
  folder.mkdir(parents=True, exist_ok=True)
  return made


def _remove_folders(folder: pathlib.Path, created: list[pathlib.Path]) -> None:
  with contextlib.suppress(OSError):
    (folder / _LOCK).unlink(missing_ok=True)
    for path in created:
      path.rmdir()


def _take_lock(folder: pathlib.Path) -> IO[bytes]:
  lock = open(folder / _LOCK, "ab")  # noqa: SIM115 - held until close()
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    lock.close()
    raise ValueError(
      f"run directory {folder} is in use by another process; wait for it, or"
      " name another --config.run_dir"
    ) from None
  except BaseException:
    lock.close()
    raise
  return lock


def _read_record(folder: pathlib.Path) -> dict[str, Any] | None:
  """The record in config.json; None where there is none that we wrote."""
  try:
    record = json.loads((folder / _CONFIG).read_text("utf-8"))
  except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
    return None
  # Other programs write a config.json too, beside model weights for one.
  keys = {"config", "config_digest", "data", "code", "environment"}
  return record if isinstance(record, dict) and keys <= set(record) else None


def _prepare(
  folder: pathlib.Path,
  old: dict[str, Any] | None,
  config: dict[str, Any],
  mode: Mode,
) -> None:
  """Leaves `folder` empty or raises ValueError."""
  contents = list(_contents(folder))
  if not contents:
    return
  if old is None and not (folder / _OVERWRITTEN).is_file():
    raise ValueError(
      f"run directory {folder} is not empty and holds no run of this program;"
      " name another --config.run_dir, or empty it yourself"
    )
  if mode == "overwrite":
    _empty(folder, contents)
    return
  if old is None:
    raise ValueError(
      f"run directory {folder} holds the rest of a run that was being"
      " overwritten; pass --overwrite to start anew"
    )
  fields = provenance.differences(old["config"], config)
  if not fields:
    raise ValueError(
      f"run directory {folder} already holds a run of this configuration: pass"
      " --resume to go on or --overwrite to start anew"
    )
  raise ValueError(
    f"run directory {folder} holds a run of another configuration:"
    f" {provenance.describe(old['config'], config, fields)}; name another"
    " --config.run_dir, or pass --overwrite"
  )


def _contents(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  for path in folder.iterdir():
    # A lock and a half-written config are what a run that died at once leaves.
    unfinished = path.name.startswith(f".{_CONFIG}.")
    if path.name != _LOCK and not unfinished:
      yield path


def _empty(folder: pathlib.Path, contents: list[pathlib.Path]) -> None:
  # The mark goes first, by a rename that also works on a full disk, so that an
  # interrupted overwrite is never taken for a run.
  with contextlib.suppress(FileNotFoundError):
    os.replace(folder / _CONFIG, folder / _OVERWRITTEN)
  for path in contents:
    if path.name in (_CONFIG, _OVERWRITTEN):
      continue
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    else:
      path.unlink()


def _check_config(
  folder: pathlib.Path,
  old: dict[str, Any],
  new: dict[str, Any],
  mutable: Collection[str],
) -> None:
  def may_change(field: str) -> bool:
    return any(field == m or field.startswith(f"{m}.") for m in mutable)

  fields = [f for f in provenance.differences(old, new) if not may_change(f)]
  if fields:
    raise ValueError(
      f"run directory {folder} holds a run of another configuration:"
      f" {provenance.describe(old, new, fields)}; --resume needs the same"
      " values, or name another --config.run_dir, or pass --overwrite"
    )
