"""The renderer of gpt-oss, with a tokenizer that has harmony's marks."""

import asyncio

import numpy as np
import pytest

from arl_jax.agents.harness import AgentConfig, run_episode
from arl_jax.chat.harmony_renderer import HarmonyRenderer
from arl_jax.chat.renderers import renderer_of
from arl_jax.envs.search.tools import SYSTEM, TOOLS
from arl_jax.types import (
  Block,
  Observation,
  Role,
  Sample,
  StopReason,
  Task,
  ToolCall,
)
from tests.chat.agent_conversation import appended, rendered

NAMES = [tool.name for tool in TOOLS]
SEARCH = ToolCall(name="search_corpus", argument="red fox")


@pytest.fixture(scope="module")
def renderer(harmony):
  found = renderer_of(harmony, TOOLS, SYSTEM)
  assert isinstance(found, HarmonyRenderer)
  return found


def test_a_conversation_is_what_the_format_writes(renderer):
  tokenizer = renderer.tokenizer
  ids, whole = appended(renderer), rendered(renderer, end="\n")

  def text(ids):
    return tokenizer.decode(ids, skip_special=False)

  def marks(ids):
    return [i for i in ids if i in tokenizer.controls.values()]

  assert text(ids) == text(whole)
  assert marks(ids) == marks(whole)


@pytest.mark.parametrize(
  "call",
  [
    ToolCall(name="search_corpus", argument='a "quoted" word'),
    ToolCall(name="grep_corpus", argument=r"\bfox\d+"),
    ToolCall(name="read_document", argument="<c1>"),
    ToolCall(name="prune_chunks", argument="<c0> <c3>"),
  ],
)
def test_what_is_written_is_read(renderer, call):
  ids = renderer.calls([call])
  assert ids[-1] in renderer.stop_ids
  assert renderer.parse(ids, NAMES).calls == (call,)


def test_an_answer_is_final_whatever_it_says(renderer):
  ids = renderer.answer("<c3> says <|end|>")
  assert ids[-1] in renderer.stop_ids
  message = renderer.parse(ids, NAMES)
  assert message.calls == ()
  assert message.final == "<c3> says <|end|>"


def test_thoughts_are_no_part_of_an_answer(renderer):
  thought = renderer._written(
    *("<|channel|>", "analysis", "<|message|>", "hm", "<|end|>"),
    *("<|start|>", "assistant"),
  )
  ids = [*thought, *renderer.answer("<c3>")]
  assert renderer.parse(ids, NAMES).final == "<c3>"


def test_a_call_of_no_tool_says_why(renderer):
  call = ToolCall(name="search_corpus", argument="x")
  (found,) = renderer.parse(renderer.calls([call]), ["grep_corpus"]).calls
  assert "no such tool" in found.problem


def test_observations_are_found_in_a_context(renderer):
  ids = [
    *renderer.prompt("Which <|start|>functions.look to=assistant?"),
    *renderer.open_turn(),
    *renderer.calls([SEARCH]),
    *renderer.open_tool("search_corpus"),
    *renderer.block("<c0> one"),
    *renderer.block("<c1> two"),
    *renderer.close_tool(),
  ]
  assert renderer.observed(ids) == ["<c0> one\n<c1> two"]


class Environment:
  """Answers each call with its name."""

  tool_names = tuple(NAMES)

  async def start(self, task):
    return task.prompt

  async def execute(self, calls, budget):
    return [Observation(blocks=(Block(text=c.name),)) for c in calls]

  async def finish(self, message):
    return None

  async def outcome(self):
    return {}


class Player:
  def __init__(self, messages):
    self.messages = list(messages)

  async def sample(self, session, ids, *, max_tokens, **_):
    ids = np.array(self.messages.pop(0), np.int32)
    return Sample(
      ids=ids,
      logp=np.zeros(len(ids), np.float32),
      versions=np.zeros(len(ids), np.int32),
      stopped=True,
    )

  async def close(self, session):
    pass


def test_an_episode_in_harmony(renderer):
  grep = ToolCall(name="grep_corpus", argument="x")
  nothing = renderer._written(
    "<|channel|>", "nowhere", "<|message|>", "<|call|>"
  )
  messages = [
    renderer.calls([SEARCH]),
    renderer.calls([grep]),
    nothing,
    renderer.answer("<c1>"),
  ]
  config = AgentConfig(
    token_budget=4000,
    soft_threshold=3000,
    hard_threshold=3500,
    message_tokens=200,
    observation_tokens=200,
  )
  task = Task(task_id="t", prompt="?", truth={})
  episode = asyncio.run(
    run_episode(task, Environment(), Player(messages), renderer, config)
  )
  assert episode.stop_reason is StopReason.ANSWERED
  (segment,) = episode.segments
  text = renderer.tokenizer.decode(segment.ids, skip_special=False)
  # Each answer is of the tool that was called.
  for name, said in (
    ("search_corpus", "search_corpus"),
    ("grep_corpus", "grep_corpus"),
    ("error", "error: no such channel"),
  ):
    begin = f"<|start|>functions.{name} to=assistant<|channel|>commentary"
    assert f"{begin}<|message|>{said}" in text
  sampled = segment.ids[segment.roles == Role.SAMPLED].tolist()
  assert sampled == [i for message in messages for i in message]
