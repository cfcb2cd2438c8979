"""Rerankers alone and in the environment; the model behind one is made up."""

import asyncio
import json

import httpx
import pytest

from arl_jax.envs.search.corpus import Document, build_corpus
from arl_jax.envs.search.environment import SearchEnvironment
from arl_jax.envs.search.index import SearchIndex
from arl_jax.envs.search.reranker import (
  EmbeddingReranker,
  Judge,
  ModelReranker,
)
from arl_jax.types import Task, ToolCall

TEXTS = {
  "fox": "The red fox sleeps in a den.",
  "dog": "A dog barks at the red moon.",
  "owl": "An owl hunts red mice at night.",
}
JUDGE = Judge(url="http://judge/v1/", model="m", yes=7)


@pytest.fixture(scope="module")
def index():
  documents = [Document(name, name, text) for name, text in TEXTS.items()]
  return SearchIndex(
    build_corpus(documents, count_tokens=lambda t: len(t.split()))
  )


def streamed(response):
  """As it comes from the network: not read yet."""
  stream = httpx.ByteStream(response.content)
  return httpx.Response(response.status_code, stream=stream)


def judged(index, answer, **fields):
  """A reranker whose model answers by a function of the request's body."""

  def respond(request):
    return streamed(answer(json.loads(request.content)))

  judge = Judge(**{"url": JUDGE.url, "model": "m", "yes": 7} | fields)
  return ModelReranker(index, judge, transport=httpx.MockTransport(respond))


def order(reranker, ids):
  async def run():
    try:
      return await reranker.order("what is red", ids)
    finally:
      await reranker.close()

  return asyncio.run(run())


def said(logp):
  body = {"choices": [{"logprobs": {"token_logprobs": [logp]}}]}
  return httpx.Response(200, json=body)


def test_chunks_go_by_the_log_probability_of_yes(index):
  bodies = []

  def answer(body):
    bodies.append(body)
    return said(-0.1 if "owl" in body["prompt"] else -2.0)

  found = order(judged(index, answer), ["fox_0", "dog_0", "owl_0"])
  # Equal ones stay as they were.
  assert found == ["owl_0", "fox_0", "dog_0"]
  assert all(body["logit_bias"] == {"7": 100.0} for body in bodies)
  assert all(body["max_tokens"] == 1 for body in bodies)
  assert all("what is red" in body["prompt"] for body in bodies)


def test_no_more_are_judged_at_once_than_may(index):
  running, most = 0, 0

  async def respond(request):
    nonlocal running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.01)
    running -= 1
    return streamed(said(-1.0))

  judge = Judge(url="http://judge", model="m", yes=7, concurrency=2)
  reranker = ModelReranker(index, judge, transport=httpx.MockTransport(respond))
  order(reranker, ["fox_0", "dog_0", "owl_0"] * 3)
  assert most == 2


def test_what_passes_is_tried_again(index):
  calls = []

  def answer(body):
    calls.append(body)
    return httpx.Response(503) if len(calls) == 1 else said(-1.0)

  assert order(judged(index, answer), ["fox_0"]) == ["fox_0"]
  assert len(calls) == 2


@pytest.mark.parametrize(
  "response",
  [
    httpx.Response(400, text="no such model"),
    httpx.Response(200, text="no JSON"),
    httpx.Response(200, json={"choices": []}),
    httpx.Response(
      200, json={"choices": [{"logprobs": {"token_logprobs": [-1, -1]}}]}
    ),
    httpx.Response(
      200, json={"choices": [{"logprobs": {"token_logprobs": [True]}}]}
    ),
    httpx.Response(
      200, json={"choices": [{"logprobs": {"token_logprobs": [0.5]}}]}
    ),
    httpx.Response(200, content=b"x" * 100_000),
  ],
)
def test_what_is_no_answer_fails_as_infrastructure(index, response):
  with pytest.raises(OSError, match="http://judge/v1/completions"):
    order(judged(index, lambda body: response, tries=1), ["fox_0"])


def test_an_endpoint_that_is_not_there(index):
  def answer(body):
    raise httpx.ConnectError("refused")

  with pytest.raises(OSError, match="refused"):
    order(judged(index, answer, tries=2), ["fox_0"])


def test_a_judge_that_can_not_be(index):
  with pytest.raises(ValueError, match="concurrency is 0"):
    ModelReranker(index, Judge(url="http://u", model="m", yes=1, concurrency=0))


def test_embeddings_give_the_index_s_own_ranking(index):
  ids = ["fox_0", "dog_0", "owl_0"]
  found = asyncio.run(EmbeddingReranker(index).order("owl mice", ids))
  assert found == index.rank("owl mice", ids)
  assert found[0] == "owl_0"


class Reversed:
  """Puts what it is given upside down, and remembers it."""

  def __init__(self):
    self.given = []

  async def order(self, query, chunk_ids):
    self.given.append((query, list(chunk_ids)))
    return list(chunk_ids)[::-1]


def shown(observation):
  return list(observation.data["chunk_ids"])


def test_a_search_shows_the_best_of_all_that_was_fused(index):
  """Not of as many as it may show, which is one."""
  reranker = Reversed()
  environment = SearchEnvironment(
    index=index,
    handles=["<c0>", "<c1>", "<c2>"],
    count_tokens=lambda text: len(text.split()),
    reranker=reranker,
    results_per_search=1,
  )

  async def play():
    await environment.start(Task(task_id="t", prompt="the task", truth={}))
    search = ToolCall(name="search_corpus", argument="red fox")
    (first,) = await environment.execute([search], 200)
    (again,) = await environment.execute([search], 200)
    read = ToolCall(name="read_document", argument="owl")
    (document,) = await environment.execute([read], 200)
    return first, again, document

  first, again, document = asyncio.run(play())
  (query, fused), (_, left), (asked, chunks) = reranker.given
  assert query == "red fox"
  assert sorted(fused) == ["dog_0", "fox_0", "owl_0"]
  assert shown(first) == fused[-1:]
  # What a search showed isn't found again.
  assert left == [c for c in fused if c != fused[-1]]
  assert shown(again) == left[-1:]
  # A document's chunks are ranked for the task, which names no query.
  assert (asked, chunks) == ("the task", ["owl_0"])
  assert shown(document) == ["owl_0"]
