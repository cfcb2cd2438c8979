"""Runs as programs."""

import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]


def train(folder, config, run_dir, *flags, **streams):
  """`launch.train`, with what is compiled shared by all runs of a folder."""
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  environment |= {
    "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  return subprocess.Popen(
    [
      *(sys.executable, "-m", "launch.train", f"--config={config}"),
      *(f"--config.run_dir={run_dir}", *flags),
    ],
    cwd=_ROOT,
    env=environment,
    text=True,
    **streams,
  )
