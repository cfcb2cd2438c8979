"""What can go wrong with a commit, told apart and put into words."""

from __future__ import annotations

import errno
from collections.abc import Iterator


class DamagedError(ValueError):
  """What was read isn't what was written."""


class ForeignError(ValueError):
  """Another program wrote it."""


def errno_of(error: BaseException) -> int:
  """The number of an error of the operating system, however it is wrapped."""
  for one in _chain(error):
    if isinstance(one, OSError) and one.errno:
      return one.errno
  full = "no space left" in str(error).lower()
  return errno.ENOSPC if full else errno.EIO


def reason(error: BaseException) -> str:
  """What went wrong, on one line, for people."""
  if errno_of(error) in (errno.ENOSPC, errno.EDQUOT):
    return "disk full; free some space and run again with --resume"
  lines = str(error).strip().splitlines()
  return lines[0][:300] if lines else type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__
