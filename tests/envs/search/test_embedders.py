"""Embedders by name, and endpoints that answer otherwise than they should."""

import json
import pathlib

import httpx
import numpy as np
import pytest

from arl_jax.envs.search import embedding_client
from arl_jax.envs.search.embedders import named_embedder
from arl_jax.envs.search.embedding_client import EmbeddingClient
from arl_jax.envs.search.hashing import hashed_embedder

MINILM = pathlib.Path(__file__).parents[3] / "models" / "all-MiniLM-L6-v2"
URL = "http://embeddings.test/v1"


class TestNamed:
  def test_hashed(self):
    found = named_embedder("hashed:8")
    assert (found.identity, found.dim) == ("hashed:8", 8)
    np.testing.assert_array_equal(found(["cat"]), hashed_embedder(8)(["cat"]))
    assert named_embedder("hashed").identity == "hashed:256"

  @pytest.mark.parametrize(
    ("name", "message"),
    [
      ("", "must be hashed, hashed:DIM"),
      ("bert", "must be hashed, hashed:DIM"),
      ("hashed:0", "must be 1 to 65536"),
      ("hashed:-3", "must be 1 to 65536"),
      ("hashed:x", "must be 1 to 65536"),
      ("minilm:", "is no folder"),
      ("minilm:/nowhere", "is no folder"),
      ("openai:", "must be like openai:http"),
      ("openai:http://x/v1", "must be like openai:http"),
      ("openai:ftp://x#m", "must begin with http://"),
    ],
  )
  def test_refuses_what_is_none(self, name, message):
    with pytest.raises(ValueError, match=message) as caught:
      named_embedder(name)
    assert "\n" not in str(caught.value)

  @pytest.mark.slow
  def test_minilm(self):
    if not MINILM.is_dir():
      pytest.skip("no models/; `make models` fetches them")
    found = named_embedder(f"minilm:{MINILM}")
    assert found.dim == 384
    assert found.identity.startswith("bert:")
    a, b, c = found(["a happy person", "a very happy person", "sunny day"])
    assert a @ b > 0.9 > 0.5 > a @ c


def vector(text: str) -> list[float]:
  """Length 5 times: 3-4-5, by the number of letters."""
  return [3.0 * len(text), 4.0 * len(text), 0.0]


def right(body) -> dict:
  rows = [
    {"index": i, "embedding": vector(text)}
    for i, text in enumerate(body["input"])
  ]
  # Any order will do.
  return {"data": rows[::-1]}


def client(answer, **options):
  """A client of an endpoint that gives `answer(request number, body)`."""
  requests = []

  def handle(request):
    body = json.loads(request.content)
    requests.append((request, body))
    found = answer(len(requests), body)
    if isinstance(found, httpx.Response):
      return found
    if isinstance(found, Exception):
      raise found
    return httpx.Response(200, json=found)

  made = EmbeddingClient(
    URL, "m", transport=httpx.MockTransport(handle), **options
  )
  return made, requests


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
  monkeypatch.setattr(embedding_client, "_WAITS", (0.001, 0.002))


class TestClient:
  def test_asks_in_batches_and_keeps_the_order(self):
    made, requests = client(lambda n, body: right(body), batch=2, key="k")
    rows = made(["a", "bb", ""])
    assert [body["input"] for _, body in requests] == [["a", "bb"], [" "]]
    request, body = requests[0]
    assert str(request.url) == f"{URL}/embeddings"
    assert request.headers["authorization"] == "Bearer k"
    assert body["model"] == "m"
    np.testing.assert_allclose(rows, [[0.6, 0.8, 0.0]] * 3, rtol=1e-6)
    assert rows.dtype == np.float32
    assert made([]).shape == (0, 3)

  @pytest.mark.parametrize(
    "failure",
    [
      httpx.Response(429, json={"error": {"message": "slow down"}}),
      httpx.Response(503, text="busy"),
      httpx.ConnectError("refused"),
      httpx.ReadTimeout("late"),
    ],
  )
  def test_tries_again(self, failure):
    made, requests = client(lambda n, body: failure if n < 3 else right(body))
    assert made(["a"]).shape == (1, 3)
    assert len(requests) == 3

  def test_gives_up_after_its_patience(self):
    made, _ = client(
      lambda n, body: httpx.Response(503, text="busy\nnow"), patience=0.02
    )
    with pytest.raises(
      OSError, match=r"no answer in 0\.02 s; last: status 503"
    ):
      made(["a"])

  def test_says_what_the_endpoint_says(self):
    made, requests = client(
      lambda n, body: httpx.Response(
        401, json={"error": {"message": "no\nkey"}}
      )
    )
    with pytest.raises(ValueError, match="status 401, no key"):
      made(["a"])
    assert len(requests) == 1

  @pytest.mark.parametrize(
    ("answer", "message"),
    [
      ({}, "data"),
      ([], "isn't OpenAI's"),
      ({"data": []}, "must be a list of 1"),
      ({"data": [{"index": 1, "embedding": [1]}]}, "index 1 must be 0 to 0"),
      ({"data": [{"index": True, "embedding": [1]}]}, "index True must be"),
      ({"data": [{"index": 0}]}, "embedding"),
      ({"data": [{"index": 0, "embedding": "AAA"}]}, "list of numbers"),
      ({"data": [{"index": 0, "embedding": [True]}]}, "list of numbers"),
      ({"data": [{"index": 0, "embedding": []}]}, "has 0 numbers"),
      ({"data": [{"index": 0, "embedding": [10**400]}]}, "isn't OpenAI's"),
    ],
  )
  def test_refuses_other_answers(self, answer, message):
    made, _ = client(lambda n, body: answer)
    with pytest.raises(ValueError, match=message) as caught:
      made(["a"])
    assert "\n" not in str(caught.value)

  @pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "no json", '{"data": [{"index": 0, "embedding":[NaN]}]}'],
  )
  def test_refuses_other_texts(self, text):
    made, _ = client(lambda n, body: httpx.Response(200, text=text))
    with pytest.raises(ValueError, match="isn't OpenAI's"):
      made(["a"])

  def test_refuses_an_index_twice_and_another_dimension(self):
    twice = {"data": [{"index": 0, "embedding": [1.0]}] * 2}
    made, _ = client(lambda n, body: twice)
    with pytest.raises(ValueError, match="index 0 is there twice"):
      made(["a", "b"])
    made, _ = client(
      lambda n, body: {"data": [{"index": 0, "embedding": [1.0] * n}]}
    )
    made(["a"])
    with pytest.raises(ValueError, match="has 2 numbers, must have 1"):
      made(["a"])

  def test_refuses_an_answer_without_end(self):
    def endless():
      while True:
        yield b" " * 2**20

    made, _ = client(lambda n, body: httpx.Response(200, content=endless()))
    with pytest.raises(ValueError, match="an answer has over"):
      made(["a"])

  def test_refuses_no_batch(self):
    with pytest.raises(ValueError, match="batch is 0"):
      EmbeddingClient(URL, "m", batch=0)
