"""What a test tells the processes of a tiny run, and what they tell it."""

import os
import pathlib
import subprocess
import sys
import time

from arl_jax.cluster.heartbeat import Heartbeat

FOLDER = pathlib.Path(os.environ.get("TINY_RUN", "."))


def started(name: str, *words: str) -> None:
  """A line "name pid words" in the file `starts`."""
  with open(FOLDER / "starts", "a") as file:
    file.write(" ".join([name, str(os.getpid()), *words]) + "\n")


def work(config, role, index, should_stop) -> None:
  """Beats until it is to stop, end, or get stuck.

  A file NAME.exit has it end with the code in it, NAME.stuck has it beat on
  without progress, NAME.deaf has it not hear that it is to stop.
  """
  name = f"{role}-{index}"
  ends, stuck = FOLDER / f"{name}.exit", FOLDER / f"{name}.stuck"
  deaf = FOLDER / f"{name}.deaf"
  # As environment workers do, but it doesn't care whose it is.
  child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(1000)"],
    stdin=subprocess.DEVNULL,
  )
  started(f"{name}/child-of-{os.getpid()}", str(child.pid))
  with Heartbeat(config.cluster, role, index) as heart:
    while deaf.exists() or not should_stop():
      if not stuck.exists():
        heart.progress()
      if ends.exists() and (code := ends.read_text()):
        ends.unlink()
        print(f"{name} was told to end\x1b[2J", file=sys.stderr, flush=True)
        sys.exit(int(code))
      time.sleep(0.02)
  if role != "learner":
    with open(FOLDER / "stopped", "a") as file:
      file.write(f"{name}\n")
