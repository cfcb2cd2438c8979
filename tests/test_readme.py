"""What the README shows must exist and run."""

import pathlib
import re

_ROOT = pathlib.Path(__file__).parents[1]


def test_readme_names_only_files_that_exist():
  text = (_ROOT / "README.md").read_text()
  named = re.findall(
    r"(?:arl_jax|configs|benchmarks|launch|docs|examples)/[\w./-]*\w", text
  )
  assert named
  missing = [n for n in named if not (_ROOT / n).exists()]
  assert not missing


def test_readme_make_targets_exist():
  text = (_ROOT / "README.md").read_text()
  makefile = (_ROOT / "Makefile").read_text()
  targets = set(re.findall(r"\bmake ([a-z]+)\b", text))
  assert {"quickstart", "test"} <= targets
  for target in targets:
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
