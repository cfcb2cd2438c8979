"""The folder that commits lie in, and which of them stay there."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Collection, Mapping

from arl_jax.checkpoints import manifest

# Endings of what is being written and of what is being deleted. Each turns
# into the other state, or out of the number it had, in one rename.
_PARTIAL, _DELETED = ".partial", ".deleted"


class CommitFolder:
  """Commits by number, each a folder; one job at a time may change them.

  Attributes:
    path: of the folder.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path

  @property
  def numbers(self) -> list[int]:
    """Of all commits, in order, other programs' included."""
    names = [p.name for p in self.path.iterdir() if p.is_dir()]
    return sorted(int(x) for x in names if x.isdecimal() and str(int(x)) == x)

  @property
  def own_numbers(self) -> list[int]:
    """Of this program's commits, damaged ones included, in order."""
    return [n for n in self.numbers if (self[n] / manifest.NAME).exists()]

  def __getitem__(self, number: int) -> pathlib.Path:
    return self.path / str(number)

  def partial(self, number: int) -> pathlib.Path:
    """Where a commit is written."""
    return self.path / f"{number}{_PARTIAL}"

  def publish(self, number: int) -> None:
    """Gives a commit that was written its number."""
    os.rename(self.partial(number), self[number])
    manifest.flush(self.path)

  def remove(self, number: int) -> None:
    """Deletes a commit, which is never seen half deleted."""
    doomed = self.path / f"{number}{_DELETED}"
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(self[number], doomed)
    shutil.rmtree(doomed, ignore_errors=True)

  def sweep(self) -> None:
    """Takes away what interrupted writing or deleting left."""
    for ending in (_PARTIAL, _DELETED):
      for path in self.path.glob(f"[0-9]*{ending}"):
        shutil.rmtree(path, ignore_errors=True)

  def size(self, number: int | None = None) -> int:
    """Bytes of a commit's files, or of all files of the folder."""
    top = self.path if number is None else self[number]
    return sum(p.stat().st_size for p in top.rglob("*") if p.is_file())

  def scores(self) -> dict[int, float]:
    """Of the commits that have one."""
    found = {}
    for number in self.own_numbers:
      try:
        score = manifest.read(self[number])["score"]
      except ValueError:
        continue
      if score is not None:
        found[number] = score
    return found

  def newest_whole(self, numbers: Collection[int]) -> int | None:
    """The last of `numbers` whose files are as they were written."""
    for number in sorted(numbers, reverse=True):
      try:
        manifest.check_files(self[number], manifest.read(self[number]))
      except ValueError:
        continue
      return number
    return None


def best(scores: Mapping[int, float], count: int) -> set[int]:
  """Numbers of the highest scores; of equal ones, the later are better."""
  ranked = sorted(scores, key=lambda n: (scores[n], n), reverse=True)
  return set(ranked[:count])
