"""What becomes of memory that a program on a CPU has freed."""

from __future__ import annotations

import ctypes
import glob
import sys

# Options of glibc's mallopt, by their numbers in malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8

_ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")


def keep_freed_memory() -> bool:
  """Lets this process use again the pages that it freed.

  XLA allocates the temporary memory of a program anew each time it runs. By
  default glibc gives gigabytes back to the kernel and gets them back zeroed,
  page by page: a quarter of a training step on a CPU. Programs with an
  accelerator hold their arrays there and are left alone.

  To be called before threads are started, as memory arenas belong to threads.

  Returns:
    Whether it is so now; False with an accelerator, or without glibc.
  """
  if any(glob.glob(pattern) for pattern in _ACCELERATORS):
    return False
  if not sys.platform.startswith("linux"):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:
    return False
  # A threshold of -1 is never reached.
  options = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))
  return all(mallopt(*option) == 1 for option in options)
