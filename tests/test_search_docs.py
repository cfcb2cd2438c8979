"""What docs/search.md shows works."""

import pathlib
import re

from launch import prepare
from tests.envs.search import corpora

_ROOT = pathlib.Path(__file__).parents[1]
_TEXT = (_ROOT / "docs" / "search.md").read_text()


def test_flags_are_those_of_the_program():
  section = _TEXT.partition("## Preparing an index")[2].partition("\n## ")[0]
  shown = set(re.findall(r"`--(\w+)", section))
  assert shown == {
    name
    for name, value in vars(prepare).items()
    for name in [getattr(value, "name", "")]
    if name and type(value).__name__ == "FlagHolder"
  } - {"source", "out"}


def test_flags_of_a_teacher_are_those_of_the_program():
  section = _TEXT.partition("## Demonstrations")[2].partition("\n## ")[0]
  command = section.partition("launch.demonstrate ")[2].partition("python")[0]
  shown = set(re.findall(r"--(\w+)=", command)) - {"config"}
  program = (_ROOT / "launch" / "demonstrate.py").read_text()
  assert {"teacher", "model", "out"} <= shown
  assert all(f'"{flag}"' in program for flag in shown)


def test_the_code_runs(tmp_path, monkeypatch, capsys):
  (code,) = re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL)
  corpora.write(tmp_path / "documents")
  (tmp_path / "documents" / "a.txt").write_text("how to open a file: open(x)")
  corpora.build(tmp_path / "documents", tmp_path / "runs" / "index")
  monkeypatch.chdir(tmp_path)
  namespace = {}
  exec(code, namespace)
  # First by words and by vectors.
  assert capsys.readouterr().out.startswith(f"{2 / 21} how to open a file")
  assert namespace["index"].grep(r"open\(\w+") == ["a.txt_0"]
