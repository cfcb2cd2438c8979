"""The search agent over HTTP, with a policy that plays from a list."""

import asyncio
import json

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from arl_jax.agents.harness import AgentConfig
from arl_jax.chat.renderer import Renderer, usage_symbols
from arl_jax.chat.tokenizer import Tokenizer
from arl_jax.envs.search.corpus import Document, build_corpus
from arl_jax.envs.search.environment import SearchEnvironment
from arl_jax.envs.search.index import SearchIndex
from arl_jax.envs.search.tools import TOOL_NAMES
from arl_jax.online.search_agent import SearchAgent
from arl_jax.online.search_agent_config import SearchAgentConfig
from arl_jax.online.serve_config import AgentServeConfig
from arl_jax.serving.http_errors import response
from arl_jax.types import Sample, ToolCall

TEXTS = {
  "fox": "The red fox sleeps in a den.",
  "dog": "A dog barks at the red moon.",
  "owl": "An owl hunts mice at night.",
}
HANDLES = [f"<c{i}>" for i in range(8)]
CONFIG = AgentConfig(observation_tokens=120, message_tokens=40)


class Player:
  """Says one message after the other, to each session."""

  def __init__(self, renderer, messages, wait=0.0):
    self.renderer, self.messages, self.wait = renderer, messages, wait
    self.turns: dict[str, int] = {}
    self.closed: list[str] = []

  async def sample(self, session, ids, *, max_tokens, **_):
    await asyncio.sleep(self.wait)
    turn = self.turns.get(session, 0)
    self.turns[session] = turn + 1
    message = self.messages[turn]
    tokens = (
      self.renderer.calls([message])
      if isinstance(message, ToolCall)
      else self.renderer.answer(message)
    )
    assert len(tokens) <= max_tokens
    return Sample(
      ids=np.array(tokens, np.int32),
      logp=np.zeros(len(tokens), np.float32),
      versions=np.full(len(tokens), 3, np.int32),
      stopped=True,
    )

  async def close(self, session):
    self.closed.append(session)


@pytest.fixture(scope="module")
def renderer():
  tokenizer = Tokenizer.train(
    [*TEXTS.values(), "because it says so 0123456789"],
    vocab_size=180,
    symbols=[*HANDLES, *TOOL_NAMES, *usage_symbols(CONFIG.token_budget)],
  )
  return Renderer(tokenizer)


@pytest.fixture(scope="module")
def index(renderer):
  documents = [Document(name, name, text) for name, text in TEXTS.items()]
  count = renderer.tokenizer.count
  return SearchIndex(
    build_corpus(documents, count_tokens=count, max_tokens=100)
  )


@pytest.fixture
def serve(renderer, index):
  """Makes a client of an agent whose policy says these messages."""

  def make(messages, *, wait=0.0, concurrency=2, seconds=20.0):
    player = Player(renderer, messages, wait)
    agent = SearchAgent(
      player,
      lambda: SearchEnvironment(
        index=index,
        handles=HANDLES,
        count_tokens=renderer.tokenizer.count,
        snippet_tokens=40,
      ),
      renderer,
      CONFIG,
      concurrency=concurrency,
      seconds=seconds,
    )

    async def handler(request):
      try:
        return await agent.search(request)
      except Exception as error:
        return response(error)

    app = Starlette(routes=[Route("/s", handler, methods=["POST"])])
    transport = httpx.ASGITransport(app=app)
    client = httpx.AsyncClient(transport=transport, base_url="http://a")
    return player, client

  return make


FOUND = [
  ToolCall(name="search_corpus", argument="red fox"),
  "<c1> because it says so <c0>",
]


def post(client, body):
  async def ask():
    async with client:
      return await client.post("/s", json=body, timeout=30)

  return asyncio.run(ask())


def test_a_question_gets_ranked_passages_with_reasons(serve):
  player, client = serve(FOUND)
  answer = post(client, {"query": "what is red", "seed": 1})
  assert answer.status_code == 200, answer.text
  body = answer.json()
  assert body["stop_reason"] == "answered"
  assert body["turns"] == 2
  assert body["policy_version"] == 3
  assert [d["doc_id"] for d in body["documents"]] == ["dog", "fox"]
  assert [d["justification"] for d in body["documents"]] == [
    "because it says so",
    "",
  ]
  assert body["documents"][1]["text"] == TEXTS["fox"]
  # The session's cache is given back.
  assert len(player.closed) == 1


def test_steps_are_streamed_as_they_are_done(serve):
  _, client = serve(FOUND)
  answer = post(client, {"query": "what is red", "stream": True})
  lines = [x for x in answer.text.split("\n\n") if x]
  assert lines[-1] == "data: [DONE]"
  events = [json.loads(x.removeprefix("data: ")) for x in lines[:-1]]
  assert [e["object"] for e in events] == [
    "agent.search.begun",
    "agent.search.step",
    "agent.search.step",
    "agent.search",
  ]
  assert events[1]["tool"] == "search_corpus"
  assert events[1]["argument"] == "red fox"
  assert events[1]["chunk_ids"][0] == "fox_0"
  assert len(events[-1]["documents"]) == 2


def test_an_answer_that_names_nothing_has_no_documents(serve):
  _, client = serve(["because it says so"])
  body = post(client, {"query": "what is red"}).json()
  assert body["stop_reason"] == "malformed"
  assert body["documents"] == []


@pytest.mark.parametrize(
  ("body", "field"),
  [
    ({}, "query"),
    ({"query": "  "}, "query"),
    ({"query": 3}, "query"),
    ({"query": "x" * 5000}, "query"),
    ({"query": "x", "stream": "yes"}, "stream"),
    ({"query": "x", "seed": 1.5}, "seed"),
    ({"query": "x", "more": 1}, "more"),
  ],
)
def test_a_body_that_can_not_be_names_the_field(serve, body, field):
  _, client = serve(FOUND)
  answer = post(client, body)
  assert answer.status_code == 400
  assert answer.json()["error"]["param"] == field


def test_a_prompt_beyond_the_budget_is_the_clients_error(serve):
  _, client = serve(FOUND)
  answer = post(client, {"query": "red fox " * 400})
  assert answer.status_code == 400
  assert "agent.token_budget" in answer.json()["error"]["message"]


def test_no_more_searches_run_than_may(serve):
  _, client = serve(FOUND, wait=0.3, concurrency=1)

  async def ask():
    async with client:
      both = [client.post("/s", json={"query": "red"}) for _ in range(2)]
      return await asyncio.gather(*both)

  codes = sorted(answer.status_code for answer in asyncio.run(ask()))
  assert codes == [200, 429]


def test_a_search_that_takes_too_long_ends(serve):
  player, client = serve(FOUND, wait=5.0, seconds=0.2)
  answer = post(client, {"query": "red"})
  assert answer.status_code == 408
  assert len(player.closed) == 1


def test_an_agent_needs_room_in_a_slot():
  config = AgentServeConfig(checkpoint="x", max_length=100)
  config.search_agent = SearchAgentConfig(index="y")
  with pytest.raises(ValueError, match="not below max_length 100"):
    config.validate()


def test_justifications_follow_their_ids(renderer, index):
  environment = SearchEnvironment(
    index=index,
    handles=HANDLES,
    count_tokens=renderer.tokenizer.count,
    snippet_tokens=40,
  )

  async def play():
    from arl_jax.types import Task

    await environment.start(Task(task_id="t", prompt="p", truth={}))
    call = ToolCall(name="search_corpus", argument="red")
    await environment.execute([call], 200)
    return await environment.finish("1. <c0>: first. 2. <c1> - <c0> again")

  assert asyncio.run(play()) is None
  assert [d["justification"] for d in environment.documents()] == [
    "first. 2.",
    "",
  ]
