"""The program that fetches models, without a network."""

import errno
import pathlib
import subprocess
import sys

import pytest

from launch import models

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  "problem",
  [ValueError("pip can't"), OSError(errno.ENOSPC, "No space left on device")],
)
def test_program_ends_with_one_line(problem, monkeypatch, capsys):
  def fetch(_):
    raise problem

  monkeypatch.setattr(models, "fetch", fetch)
  monkeypatch.setattr(models, "_DIRECTORY", type("Flag", (), {"value": "m"}))
  with pytest.raises(SystemExit) as ended:
    models.main(["models"])
  assert ended.value.code == 1
  out, err = capsys.readouterr()
  assert out == ""
  assert err.startswith("error: ")
  assert err.count("\n") == 1


def test_program_refuses_arguments():
  done = subprocess.run(
    [sys.executable, "-m", "launch.models", "smollm2"],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert done.stderr == (
    "error: unexpected arguments ['smollm2']; flags begin with --\n"
  )


def test_directory_that_is_a_file(tmp_path):
  (tmp_path / "models").write_text("")
  done = subprocess.run(
    [
      *(sys.executable, "-m", "launch.models"),
      f"--directory={tmp_path / 'models'}",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert "File exists" in done.stderr
  assert done.stderr.count("\n") == 1
