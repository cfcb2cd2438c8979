"""Builders that are killed at each step that reaches the disk.

  python -m tests.envs.search.kills SOURCE FOLDER

A process of its own, so that nothing else runs in what it forks. Prints how
many steps there are; exits with 1 if an index isn't as it would have been.
"""

import os
import pathlib
import shutil
import signal
import sys

from arl_jax.envs.search.stored_index import StoredIndex
from tests.envs.search import corpora

_STEPS = ("fsync", "replace", "rename")


def _count(kill_at: int, steps: list[int]) -> None:
  """Counts steps in `steps`, and dies before step `kill_at`."""
  for name in _STEPS:
    real = getattr(os, name)

    def step(*arguments, _real=real):
      steps.append(0)
      if len(steps) == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
      return _real(*arguments)

    setattr(os, name, step)


def _killed(source: pathlib.Path, out: pathlib.Path, kill_at: int) -> bool:
  child = os.fork()
  if child == 0:
    try:
      _count(kill_at, [])
      corpora.build(source, out)
    finally:
      os._exit(0)
  _, status = os.waitpid(child, 0)
  return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def main(source: pathlib.Path, folder: pathlib.Path) -> None:
  corpora.build(source, folder / "whole")
  wanted = corpora.contents(StoredIndex(folder / "whole"))
  step, killed = 1, 0
  while True:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    if not _killed(source, out, step):
      break
    killed += 1
    # A second one dies while it goes on.
    _killed(source, out, 2 + step % 5)
    corpora.build(source, out)
    if corpora.contents(StoredIndex(out)) != wanted:
      sys.exit(f"killed before step {step}: another index")
    left = [p.name for p in out.iterdir() if "partial" in p.name]
    if left:
      sys.exit(f"killed before step {step}: {left} is left")
    step += 2
  print(killed)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
