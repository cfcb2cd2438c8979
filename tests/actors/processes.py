"""Waiting for real processes."""

import time


def gone(pid: int) -> bool:
  """Whether a process has ended, reaped or not."""
  try:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
      return file.read().rpartition(")")[2].split()[0] == "Z"
  except (FileNotFoundError, ProcessLookupError):
    return True


def wait_until(condition, seconds: float = 20.0) -> None:
  limit = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < limit, f"not so within {seconds} s"
    time.sleep(0.02)
