"""Room for the next commit: on the disk, and within a quota."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Collection, Mapping

from arl_jax.checkpoints.commit_folder import CommitFolder, best


def make_room(
  folder: CommitFolder,
  number: int,
  needed: int,
  *,
  given_up: Collection[int] = (),
  keep_best: int = 0,
  quota: int | None = None,
) -> None:
  """Deletes what has to go before commit `number` is written.

  Args:
    folder: that it will lie in.
    number: of the new commit.
    needed: bytes that it may take.
    given_up: commits that go in any case.
    keep_best: how many of those with the highest scores mustn't go.
    quota: most bytes that all files of the folder may take, None for no limit.

  Raises:
    OSError: there can't be enough room. Nothing is deleted then.
  """
  freed = sum(map(folder.size, given_up))
  going: list[int] = []
  if quota is not None:
    own = {*folder.own_numbers} - {*given_up}
    scores = {n: x for n, x in folder.scores().items() if n in own}
    staying = best(scores, keep_best) | {folder.newest_whole(own)}
    sizes = {n: folder.size(n) for n in own - staying}
    taken = folder.size() - freed
    surplus = taken + needed - quota
    if surplus > sum(sizes.values()):
      raise OSError(
        errno.EDQUOT,
        f"can't write checkpoint {number} in {folder.path}: it needs up to"
        f" {needed} bytes, but the quota is {quota} bytes, and"
        f" {taken - sum(sizes.values())} of them are taken by what must stay",
      )
    going = oldest(sizes, surplus)
    freed += sum(sizes[n] for n in going)
  free = shutil.disk_usage(folder.path).free + freed
  # Found out beforehand: the library's writers fail noisily, in threads.
  if free < needed:
    raise OSError(
      errno.ENOSPC,
      f"can't write checkpoint {number} in {folder.path}: disk full ({free}"
      f" bytes free, {needed} needed); free some space and run again with"
      " --resume",
    )
  for old in (*given_up, *going):
    folder.remove(old)


def oldest(sizes: Mapping[int, int], surplus: int) -> list[int]:
  """The oldest commits that take up `surplus` bytes, of `sizes` by number."""
  going: list[int] = []
  for number in sorted(sizes):
    if surplus > 0:
      going.append(number)
      surplus -= sizes[number]
  return going
