"""A chat model shows a task, and the policy could have said all of it."""

import asyncio
import dataclasses
import json
import pathlib
import re

import pytest

from arl_jax.agents.harness import run_episode
from arl_jax.agents.teacher import Teacher, TeacherFailed
from arl_jax.chat.pretrained import load_tokenizer
from arl_jax.chat.renderers import renderer_of
from arl_jax.envs.search.tools import SYSTEM, TOOL_NAMES, TOOLS
from arl_jax.serving import json_endpoint
from arl_jax.serving.chat_endpoint import ChatEndpoint
from arl_jax.serving.json_endpoint import NoAnswer
from arl_jax.types import StopReason
from tests.agents import search_episode
from tests.data.synthesis.chat_server import ChatServer, completion

MODEL = (
  pathlib.Path(__file__).parents[2] / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
  monkeypatch.setattr(json_endpoint, "_WAITS", (0.001, 0.01))


def calls(*wanted, content=None, finish="tool_calls"):
  """A completion's body that calls tools: (name, arguments), ..."""
  made = [
    {
      "id": f"any{place}",
      "type": "function",
      "index": place,
      "function": {
        "name": name,
        "arguments": a if isinstance(a, str) else json.dumps(a),
      },
    }
    for place, (name, a) in enumerate(wanted)
  ]
  message = {"role": "assistant", "content": content, "tool_calls": made}
  choice = {"index": 0, "message": message, "finish_reason": finish}
  return json.dumps({"choices": [choice]}).encode()


def search(query, **more):
  return calls(("search_corpus", {"query": query}), **more)


def play(answers, *, renderer=None, token=""):
  """The episode, and the requests that it took."""
  said = iter(answers)
  renderer = renderer or search_episode.renderer()
  config = search_episode.CONFIG
  if renderer is not search_episode.renderer():
    # The tools' descriptions alone are some 500 tokens.
    config = dataclasses.replace(
      config, token_budget=1200, soft_threshold=600, hard_threshold=900,
      message_tokens=80, observation_tokens=200,
    )  # fmt: skip

  async def go(url):
    async with ChatEndpoint(url, model="m", token=token) as chat:
      teacher = Teacher(
        chat,
        renderer,
        system=SYSTEM,
        question=search_episode.TASK.prompt,
        tools=TOOLS,
      )
      return await run_episode(
        search_episode.TASK,
        search_episode.environment(),
        teacher,
        renderer,
        config,
      )

  with ChatServer(lambda _: next(said)) as server:
    return asyncio.run(go(server.url)), server.requests


def messages(renderer, episode):
  """What the policy is shown to say, turn by turn."""
  (segment,) = episode.segments
  found, ids = [], []
  for token, sampled in zip(segment.ids, segment.sampled, strict=True):
    if sampled:
      ids.append(int(token))
    elif ids:
      found.append(renderer.parse(ids, TOOL_NAMES))
      ids = []
  return [*found, renderer.parse(ids, TOOL_NAMES)] if ids else found


@pytest.fixture(
  params=[
    "own",
    pytest.param(
      "chatml",
      marks=pytest.mark.skipif(
        not MODEL.exists(), reason="make models fetches the tokenizer"
      ),
    ),
  ]
)
def renderer(request):
  if request.param == "own":
    return search_episode.renderer()
  return renderer_of(load_tokenizer(MODEL), TOOLS, SYSTEM)


def test_what_a_teacher_says_is_what_the_policy_is_shown(renderer):
  episode, requests = play(
    [
      calls(
        ("search_corpus", {"query": "brown fox"}),
        ("search_corpus", {"query": "lazy dog"}),
        content="<think>two at once</think> Let me look.",
      ),
      completion("<think>c0 it is</think> <c0>"),
    ],
    renderer=renderer,
    token="secret",
  )
  assert episode.stop_reason is StopReason.ANSWERED
  both, last = messages(renderer, episode)
  assert [(c.name, c.argument) for c in both.calls] == [
    ("search_corpus", "brown fox"),
    ("search_corpus", "lazy dog"),
  ]
  assert last.final == "<c0>"
  first, second = requests
  assert [m["role"] for m in first["messages"]] == ["system", "user"]
  assert first["messages"][0]["content"].startswith(SYSTEM)
  assert first["messages"][1]["content"] == "brown fox ; lazy dog"
  assert [t["function"]["name"] for t in first["tools"]] == [*TOOL_NAMES]
  assert first["model"] == "m"
  _, _, said, one, other = second["messages"]
  # Each call is answered, under the id that it has here.
  assert [c["id"] for c in said["tool_calls"]] == ["call_0_0", "call_0_1"]
  assert [one["tool_call_id"], other["tool_call_id"]] == [
    "call_0_0", "call_0_1"
  ]  # fmt: skip
  assert "<c0>" in one["content"]
  assert "Token usage" in one["content"]
  assert "first call" in other["content"]


def test_a_teacher_no_longer_sees_what_it_pruned(renderer):
  episode, requests = play(
    [
      search("brown fox"),
      calls(("prune_chunks", {"chunk_ids": ["<c0>"]})),
      completion("<c1>"),
    ],
    renderer=renderer,
  )
  assert episode.stop_reason is StopReason.ANSWERED
  assert len(episode.segments) == 2
  before, after = (
    [m["content"] for m in r["messages"] if m["role"] == "tool"]
    for r in requests[1:]
  )
  assert re.findall(r"<c\d>", before[0]) == ["<c0>", "<c1>"]
  assert re.findall(r"<c\d>", after[0]) == ["<c1>"]
  assert "pruned 1" in after[1]
  assert all(s.trained.any() for s in episode.segments)


@pytest.mark.parametrize(
  ("bad", "reason"),
  [
    (calls(("browse", {"query": "x"})), "no such tool"),
    (calls(("search_corpus", {"q": "x"})), "'query' is missing"),
    (calls(("search_corpus", {"query": "x", "k": 3})), "no such argument"),
    (calls(("search_corpus", {"query": ["a", 1]})), "takes query alone"),
    (calls(("search_corpus", {"query": "  "})), "no argument"),
    (calls(("search_corpus", "{broken")), "must be the text of a JSON object"),
    (calls(("search_corpus", "[" * 9999)), "must be the text of a JSON object"),
    (search("fox " * 30), "there is room for 12"),
    (search("the brown <|end|> fox"), "can't say these calls"),
    (search("fox", finish="length"), "cut off"),
    (completion("<c0> <|end|> so"), "can't say this answer"),
    (completion(""), "neither calls a tool nor says anything"),
    (completion("<think>hm</think>  "), "neither calls a tool"),
    (completion(["a list"]), "content"),
    (completion("x", finish="length"), "cut off"),
    (b"no JSON", "no chat completion"),
    (b'{"choices": []}', "no chat completion"),
    (b'{"choices": [{"message": "x"}]}', "no chat completion"),
  ],
)  # fmt: skip
def test_what_the_policy_could_not_say_is_asked_for_again(bad, reason):
  episode, requests = play([bad, search("fox"), bad, completion("<c0>")])
  assert episode.stop_reason is StopReason.ANSWERED
  # Nothing of it is shown.
  said = messages(search_episode.renderer(), episode)
  assert [c.argument for c in said[0].calls] == ["fox"]
  assert said[1].final == "<c0>"
  hint = requests[1]["messages"][-1]
  assert hint["role"] == "user"
  assert reason in hint["content"]
  assert len(hint["content"]) < 500
  assert requests[0]["seed"] != requests[1]["seed"]
  # Nor does the teacher see it in the next turn.
  assert requests[2]["messages"][-1]["role"] == "tool"
  assert requests[3]["messages"][-1]["role"] == "user"


def test_a_teacher_that_says_nothing_usable_fails_its_episode():
  with pytest.raises(TeacherFailed, match="turn 0: nothing usable in 3 tries"):
    play([calls(("browse", {"x": "y"}))] * 3)
  with pytest.raises(NoAnswer, match="401"):
    play([(401, b"who are you?")])
