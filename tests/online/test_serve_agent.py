"""Flags of `launch.serve` that serve an agent."""

import pathlib
import subprocess
import sys

import pytest

from tests.serving.programs import PATIENCE, write_checkpoint

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def test_an_agent_without_an_index_is_refused(tmp_path):
  checkpoint = tmp_path / "checkpoint"
  write_checkpoint(checkpoint)
  done = subprocess.run(
    [
      *(sys.executable, "-m", "launch.serve", f"--checkpoint={checkpoint}"),
      "--agent=search",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=PATIENCE,
  )
  assert done.returncode not in (0, 130)
  assert len(done.stderr.strip().splitlines()) == 1, done.stderr
  assert "--agent=search needs --index" in done.stderr
