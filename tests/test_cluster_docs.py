"""Commands in docs/cluster.md are ones that the programs take."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_TEXT = (_ROOT / "docs" / "cluster.md").read_text()
# Flags that make a program print what it would do, or that say so themselves.
_CHECKS = {"launch.train": "--dry_run", "launch.xm_train": "--dry_run"}


def _commands():
  """Words after `python -m` of each command shown."""
  blocks = re.findall(r"```sh\n(.*?)```", _TEXT, re.DOTALL)
  lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
  return [
    shlex.split(line.partition("python -m ")[2])
    for line in lines
    if "python -m " in line
  ]


def test_all_ways_of_launching_are_shown():
  flags = {flag.partition("=")[0] for words in _commands() for flag in words}
  assert {"--role", "--engine", "--sweep", "--executor"} <= flags


@pytest.mark.slow
@pytest.mark.parametrize(
  "words", [w for w in _commands() if w[0] in _CHECKS], ids=" ".join
)
def test_commands_are_accepted(words, tmp_path):
  check = _CHECKS[words[0]]
  done = subprocess.run(
    [sys.executable, "-m", *words, *([] if check in words else [check])],
    cwd=_ROOT,
    env={**os.environ, "HOME": str(tmp_path)},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr


def test_fields_and_files_named_exist():
  from arl_jax.runtime.config import Config, explain_field

  fields = re.findall(r"(?:--config\.|`)(cluster\.[a-z_.]+)\b", _TEXT)
  assert "cluster.patience" in fields
  assert not [f for f in fields if explain_field(Config(), f)]
  files = re.findall(r"--config=(\S+?\.py)", _TEXT)
  files += [f"docs/{name}" for name in re.findall(r"\]\((\w+\.md)\)", _TEXT)]
  assert not [f for f in files if not (_ROOT / f).exists()]


def test_other_programs_shown_exist():
  modules = {words[0] for words in _commands()}
  assert modules == {"launch.train", "launch.xm_train", "launch.compile"}
