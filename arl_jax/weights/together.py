"""How the processes of one learner write one version.

They leave small files in the version's folder and wait for those of others.
That works in the background, where collective operations of the devices would
get in the way of training.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable
from typing import Any

from arl_jax.weights import manifest
from arl_jax.weights.storage import Storage

_FAILED = "failed"
_POLL_S = (0.02, 1.0)


class Together:
  """One attempt to write one version.

  With one process nothing is written and nobody is waited for.
  """

  def __init__(
    self,
    storage: Storage,
    folder: Any,
    *,
    process: int,
    processes: int,
    attempt: int,
    timeout_s: float,
  ):
    """Writes nothing yet.

    Args:
      storage: of the folder.
      folder: of the version.
      process: index of this one.
      processes: their number.
      attempt: tells this attempt from earlier ones.
      timeout_s: seconds to wait for others at most.
    """
    self._storage, self._folder = storage, folder
    self._process, self._processes = process, processes
    self._attempt, self._timeout_s = attempt, timeout_s

  def gather(self, step: str, value: Any) -> list[Any]:
    """JSON values of all processes in process 0, of this one elsewhere."""
    if self._processes == 1:
      return [value]
    self._write(step, value)
    if self._process:
      return [value]
    names = [self._name(step, k) for k in range(self._processes)]
    self._wait(lambda there: there >= {*names}, f"all have {step}")
    return [
      json.loads(self._storage.read(self._folder / name, manifest.MAX_BYTES))
      for name in names
    ]

  def follow(self, step: str) -> None:
    """Returns when process 0 is here."""
    if self._processes == 1:
      return
    if self._process == 0:
      self._write(step, None)
      return
    name = self._name(step, 0)
    self._wait(lambda there: name in there, f"process 0 has {step}")

  def await_manifest(self) -> None:
    """Returns when process 0 has published."""
    self._wait(lambda there: manifest.NAME in there, "process 0 has published")

  def fail(self, why: str) -> None:
    """Has the others stop waiting."""
    if self._processes > 1:
      self._write(_FAILED, why)

  def _name(self, step: str, process: int) -> str:
    return f"{self._attempt}-{step}-{process}.json"

  def _write(self, step: str, value: Any) -> None:
    path = self._folder / self._name(step, self._process)
    self._storage.write(path, json.dumps(value))

  def _wait(self, ready: Callable[[set[str]], bool], what: str) -> None:
    failed = re.compile(rf"{self._attempt}-{_FAILED}-[0-9]+\.json")
    until = time.monotonic() + self._timeout_s
    pause = _POLL_S[0]
    while True:
      there = {*self._storage.listed(self._folder)}
      if ready(there):
        return
      for name in there:
        if failed.fullmatch(name):
          why = json.loads(self._storage.read(self._folder / name))
          raise OSError(errno.EIO, f"another process failed: {why}")
      if not any(name.startswith(f"{self._attempt}-") for name in there):
        raise OSError(errno.EIO, "process 0 gave this version up")
      if time.monotonic() > until:
        raise OSError(
          errno.ETIMEDOUT,
          f"waited {self._timeout_s:.0f} s in {self._folder} until {what}",
        )
      time.sleep(pause)
      pause = min(2 * pause, _POLL_S[1])
