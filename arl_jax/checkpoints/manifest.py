"""What a commit says about itself, in a file that shows any damage.

The folder of a commit holds `state/` (arrays, by orbax), `queue.json` and
`commit.json`, which is written last. That one has a marker, the versions of its
schema, the commit's records, and the size and checksum of every other file.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from arl_jax import types
from arl_jax.checkpoints import sealed
from arl_jax.checkpoints.failure import DamagedError, ForeignError

# Raised whenever a field of a manifest, or how a digest is made, changes.
SCHEMA_VERSION = 1
NAME = "commit.json"

_MARKER = "arl_jax_commit"
# Of larger files of arrays, only the size is kept: arrays have digests, and
# reading those files back would double the work.
_SMALL_BYTES = 1 << 20
# What other processes wrote may not be visible here yet. It is arrays, too.
_OF_OTHERS = re.compile(r"process_[1-9]")


def seal(commit: pathlib.Path, body: Mapping[str, Any]) -> None:
  """Writes the manifest of a folder that holds everything else.

  All of it is on the disk, not just on its way there, before this returns.

  Args:
    commit: the folder.
    body: JSON values; "schema_version", "types_schema_version" and "files" are
      added.

  Raises:
    OSError: it can't be written.
  """
  files = {}
  for path in sorted(commit.rglob("*")):
    name = path.relative_to(commit).as_posix()
    if path.is_file() and not _OF_OTHERS.search(name):
      files[name] = [path.stat().st_size, _checksum(path)]
    flush(path)
  whole = {
    "schema_version": SCHEMA_VERSION,
    "types_schema_version": types.SCHEMA_VERSION,
    **body,
    "files": files,
  }
  (commit / NAME).write_text(sealed.seal(_MARKER, whole))
  flush(commit / NAME)
  flush(commit)


def read(commit: pathlib.Path) -> dict[str, Any]:
  """The body of a commit's manifest; other files aren't looked at.

  Raises:
    DamagedError: the manifest isn't as it was written.
    ForeignError: it is another program's.
    ValueError: it is of another schema version.
  """
  body = _opened(commit)
  for name, expected in (
    ("schema_version", SCHEMA_VERSION),
    ("types_schema_version", types.SCHEMA_VERSION),
  ):
    if body[name] != expected:
      raise ValueError(
        f"it has {name} {body[name]}; this program reads {expected}"
      )
  if body["number"] != int(commit.name):
    raise ValueError(f"it is checkpoint {body['number']} under another number")
  return body


def check_files(commit: pathlib.Path, body: Mapping[str, Any]) -> None:
  """Raises DamagedError naming the first file that isn't as it was written."""
  for name, (size, checksum) in body["files"].items():
    path = commit / name
    if not path.is_file():
      raise DamagedError(f"its file {name} is missing")
    found = path.stat().st_size
    if found != size:
      raise DamagedError(
        f"its file {name} has {found} bytes, {size} were written"
      )
    if _checksum(path) != checksum:
      raise DamagedError(f"its file {name} has other bytes than were written")


def check_identity(
  body: Mapping[str, Any], identity: Mapping[str, Any] | None
) -> None:
  """Raises ValueError naming the first difference; None fits every commit."""
  if identity is None:
    return
  theirs = body["identity"] or {}
  for key in sorted({*identity, *theirs}):
    shown = [repr(x[key]) if key in x else "absent" for x in (theirs, identity)]
    if shown[0] != shown[1]:
      raise ValueError(
        f"its identity has {key!r} {shown[0]}, but this run has {shown[1]}"
      )


def _opened(commit: pathlib.Path) -> dict[str, Any]:
  try:
    text = (commit / NAME).read_text()
  except FileNotFoundError:
    raise ForeignError(
      f"it has no file {NAME}, so it wasn't written by this program"
    ) from None
  except (OSError, ValueError) as error:
    raise DamagedError(f"its file {NAME} can't be read: {error}") from error
  return sealed.unseal(_MARKER, NAME, text)


def _checksum(path: pathlib.Path) -> str | None:
  """SHA-256; None for large files other than JSON."""
  if path.stat().st_size > _SMALL_BYTES and path.suffix != ".json":
    return None
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: pathlib.Path) -> None:
  """Has a file or folder written to the disk before it returns."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
