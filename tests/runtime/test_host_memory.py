"""Pages that a program has freed, in a process of its own."""

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, resource, sys, threading
import numpy as np
from arl_jax.runtime import host_memory
host_memory._ACCELERATORS = sys.argv[1:]
kept = host_memory.keep_freed_memory()
def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(4):
    np.ones(100_000_000)
  found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
found = []
# In a thread, as XLA allocates.
for _ in range(2):
  thread = threading.Thread(target=faults)
  thread.start()
  thread.join()
print(json.dumps([kept, found]))
"""


def _run(*accelerators):
  done = subprocess.run(
    [sys.executable, "-c", _PROGRAM, *accelerators],
    capture_output=True,
    check=True,
    text=True,
    timeout=120,
  )
  return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_pages_are_used_again():
  kept, (first, second) = _run()
  assert kept
  # 800 MB, on small or on huge pages, are faulted in once only.
  assert first >= 300
  assert second < first / 10


def test_programs_with_an_accelerator_are_left_alone():
  kept, (first, second) = _run("/dev/null")
  assert not kept
  assert second > first / 2
