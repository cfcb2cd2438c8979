"""README's server, with the pretrained model that it names."""

import asyncio
import json
import pathlib
import re
import shlex

import httpx
import pytest

from arl_jax.serving.client import RemoteClient
from tests.serving.programs import PATIENCE, ROOT, program

_GOLDEN = json.loads(
  (
    pathlib.Path(__file__).parents[1] / "testdata/smollm2/smollm2.json"
  ).read_text()
)
_README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.slow


def _command():
  """The checkpoint of README's command, which has no other flag but a port."""
  (shown,) = re.findall(r"python -m launch\.serve (.*)", _README)
  checkpoint, port = shlex.split(shown)
  assert port == "--port=8000"
  return checkpoint.removeprefix("--checkpoint=")


def _body():
  (shown,) = re.findall(r"^curl localhost:8000(.*?)\n```", _README, re.S | re.M)
  words = shlex.split(shown.replace("\\\n", ""))
  assert words[0] == "/v1/chat/completions"
  return json.loads(words[words.index("-d") + 1])


def test_it_answers_as_the_reference_does(tmp_path):
  checkpoint = ROOT / _command()
  if not checkpoint.exists():
    pytest.skip("run `make models` first")
  with program(checkpoint, tmp_path / "log") as server:
    server.wait_until_ready()
    answer = httpx.post(
      server.url + "/v1/chat/completions",
      json=_body() | {"max_tokens": 16},
      timeout=PATIENCE,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]

    async def greedy(ids):
      async with RemoteClient(server.url) as client:
        how = {"max_tokens": 24, "stop_ids": (), "seed": 0, "temperature": 0.0}
        return await client.sample("s", ids, training=False, **how)

    for case in _GOLDEN["cases"]:
      found = asyncio.run(greedy(case["token_ids"]))
      assert found.ids.tolist() == case["greedy_24"]
    assert server.end() == 0, server.text()
