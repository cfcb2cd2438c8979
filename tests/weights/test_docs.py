"""The program that docs/weights.md shows."""

import pathlib
import re

from tests.weights.published import assert_is, like, weights

_TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "weights.md").read_text()


def test_the_program_shown_publishes_and_fetches(tmp_path):
  names = {"folder": tmp_path, "like": like(), "params": weights()}
  (code,) = re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL)
  exec(code, names)
  assert_is(names["fetched"], 0)
  names["subscriber"].close()
  names["publisher"].close()
