"""What the README shows must exist and run."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", *command],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )


def test_names_only_files_that_exist():
  named = re.findall(
    r"(?:arl_jax|configs|benchmarks|launch|docs|examples)/[\w./-]*\w", _README
  )
  assert named
  assert not [n for n in named if not (_ROOT / n).exists()]


def test_make_targets_exist():
  makefile = (_ROOT / "Makefile").read_text()
  targets = set(re.findall(r"\bmake ([a-z]+)\b", _README))
  assert {"quickstart", "test"} <= targets
  for target in targets:
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_flags_of_the_quickstart_are_accepted():
  shown = re.findall(r"^make quickstart ARGS=(.*)$", _README, re.MULTILINE)
  assert shown
  # All at once: what matters is that each flag is known.
  given = [flag for args in shown for flag in shlex.split(shlex.split(args)[0])]
  done = _run("launch.train", *given, "--dry_run")
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_own_parts_run(tmp_path):
  (command,) = re.findall(r"python -m (examples\.own_parts) ", _README)
  done = _run(command, f"--run_dir={tmp_path / 'run'}")
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "run" / "report.html").is_file()


def test_configurations_shown_are_accepted():
  shown = set(re.findall(r"--config=(configs/\w+\.py)", _README))
  assert {"configs/sft_tiny.py", "configs/replay_tiny.py"} <= shown
  for config in sorted(shown):
    if "gpt_oss" not in config:
      done = _run("launch.train", f"--config={config}", "--dry_run")
      assert done.returncode == 0, done.stderr


def test_an_index_is_prepared_as_shown(tmp_path):
  (command,) = re.findall(
    r"python -m (launch\.prepare index .*)$", _README, re.M
  )
  shown = shlex.split(command)
  given = [flag for flag in shown if not flag.startswith("--out=")]
  done = _run(*given, f"--out={tmp_path / 'index'}")
  assert done.returncode == 0, done.stderr
  assert "documents in" in done.stdout
