"""The programs that docs/serving.md shows."""

import pathlib
import re

from tests.serving.http_serving import EchoEngine, serving

_DOCS = pathlib.Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_programs_shown_run():
  codes = re.findall(r"```python\n(.*?)```", _DOCS.read_text(), re.DOTALL)
  assert len(codes) == 2
  names = {}
  with serving(EchoEngine()) as server:
    names["url"] = server.url
    for code in codes:
      exec(code, names)
    names["client"].close()
    names["harness"].close()
  assert bytes(names["tokens"]["ids"][:-1]) == b"What is JAX?"
  (segment,) = names["episode"].segments
  # Each answer is cut at eight tokens.
  sampled = segment.ids[segment.sampled].tolist()
  assert bytes(sampled) == b"Name a pAnother "
  assert names["episode"].reward.total == 1.0


def test_every_address_is_told():
  text = _DOCS.read_text()
  for address in ("/health", "/ready", "/metrics", "/admin/load"):
    assert f"`GET {address}`" in text
