"""Runs as programs."""

import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]


def train(config, run_dir, *flags, **streams):
  """`launch.train`, on one device."""
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
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
