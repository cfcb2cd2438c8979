"""The scripted searcher, in episodes of the real environment."""

import asyncio

import pytest

from arl_jax.agents.harness import AgentConfig, run_episode
from arl_jax.agents.scripted import ScriptConfig, ScriptedSearcher
from arl_jax.chat import tokenizer as tok
from arl_jax.envs.search.tools import TOOL_NAMES
from arl_jax.types import (
  PolicyClient,
  StopReason,
  ToolCall,
)
from tests.agents.search_episode import (
  CONFIG,
  HANDLES,
  TASK,
  environment,
  events,
  renderer,
)


class TestScripted:
  def run(self, seed: int, config=CONFIG, **script):
    script = ScriptedSearcher(
      TASK.prompt,
      renderer(),
      ScriptConfig(**script),
      seed=seed,
      handles=HANDLES,
      tools=TOOL_NAMES,
    )
    assert isinstance(script, PolicyClient)
    return asyncio.run(
      run_episode(TASK, environment(), script, renderer(), config)
    )

  def test_plays_without_a_malformed_call_and_uses_every_tool(self):
    wide = AgentConfig(token_budget=400, soft_threshold=200, hard_threshold=300)
    used = set()
    for seed in range(60):
      episode = self.run(seed, wide)
      bad = [
        e.data["problem"]
        for e in events(episode, "malformed_call")
        if e.data["problem"] != "message too long"
      ]
      assert not bad
      used |= set(episode.outcome["calls"])
    assert used == set(TOOL_NAMES)

  def test_a_plan_asks_for_each_clue_once_and_answers_with_what_holds_them(
    self,
  ):
    wide = AgentConfig(token_budget=400, soft_threshold=200, hard_threshold=300)
    orders = set()
    for seed in range(8):
      episode = self.run(seed, wide, diligence=1.0)
      assert episode.outcome["calls"] == ["search_corpus"] * 2
      asked = [e.data["argument"] for e in events(episode, "tool_call")]
      assert sorted(asked) == ["brown fox", "lazy dog"]
      orders.add(asked[0])
      assert episode.stop_reason is StopReason.ANSWERED
      # It holds the words of both, but not each snippet of it does.
      assert "d0_0" in episode.outcome["answer"]
      assert len(episode.outcome["answer"]) <= 2
    assert len(orders) == 2

  def test_a_plan_prunes_what_it_would_not_answer_with(self):
    marks = renderer().tokenizer.controls

    def context(*results, used):
      said = "".join(results) + f"[Token usage: {used}/9]"
      encoded = renderer().tokenizer.encode(said)
      return [marks[tok.TOOL], *encoded, marks[tok.END]]

    script = ScriptedSearcher(
      TASK.prompt,
      renderer(),
      ScriptConfig(diligence=1.0),
      seed=0,
      handles=HANDLES,
      tools=TOOL_NAMES,
    )

    def message(ids):
      return renderer().parse(script.play(ids, 20).ids, TOOL_NAMES)

    found = ("<c0> the brown fox", "<c1> fish swim", "<c2> lazy bears")
    first, second = message([]), message(context(*found, used=4))
    asked = [c.argument for m in (first, second) for c in m.calls]
    assert sorted(asked) == sorted(TASK.prompt.split(" ; "))
    pruning = message(context(*found, used=5))
    assert pruning.calls == (ToolCall(name="prune_chunks", argument="<c1>"),)
    # Nothing is left to prune or to ask for.
    holds = {"brown fox": "<c0>", "lazy dog": "<c2>"}
    final = message(context(found[0], found[2], used=8)).final
    assert final == " ".join(holds[clue] for clue in asked)

  def test_a_plan_keeps_all_that_hold_a_whole_clue(self):
    assert TASK.prompt == "brown fox ; lazy dog"
    marks = renderer().tokenizer.controls
    found = "<c0> the brown fox <c1> fox brown <c2> dog ran <c3> lazy"
    said = renderer().tokenizer.encode(f"{found}[Token usage: 1/9]")
    script = ScriptedSearcher(
      TASK.prompt,
      renderer(),
      ScriptConfig(diligence=1.0),
      seed=0,
      handles=HANDLES,
      tools=TOOL_NAMES,
    )
    for _ in TASK.prompt.split(" ; "):
      script.play([], 20)
    context = [marks[tok.TOOL], *said, marks[tok.END]]
    played = script.play(context, 20).ids
    final = renderer().parse(played, TOOL_NAMES).final
    # Of "lazy dog" no chunk holds both words: the first with one of them.
    assert sorted(final.split()) == ["<c0>", "<c1>", "<c2>"]

  def test_plays_with_the_tools_that_there_are(self):
    tools = ("grep_corpus", "prune_chunks")
    used = set()
    for seed in range(8):
      script = ScriptedSearcher(
        TASK.prompt,
        renderer(),
        ScriptConfig(diligence=0.3),
        seed=seed,
        handles=HANDLES,
        tools=tools,
      )
      for _ in range(8):
        message = renderer().parse(script.play([], 20).ids, TOOL_NAMES)
        used |= {call.name for call in message.calls}
    assert used == {"grep_corpus"}
    with pytest.raises(ValueError, match=r"greps with 0\.1, but the"):
      ScriptedSearcher(
        TASK.prompt,
        renderer(),
        ScriptConfig(),
        seed=0,
        handles=HANDLES,
        tools=("read_document",),
      )

  def test_is_deterministic_by_seed(self):
    one, two, other = self.run(3), self.run(3), self.run(4)
    assert one.events == two.events
    assert one.events != other.events

  def test_a_message_is_never_longer_than_asked(self):
    script = ScriptedSearcher(
      TASK.prompt,
      renderer(),
      ScriptConfig(),
      seed=0,
      handles=HANDLES,
      tools=TOOL_NAMES,
    )
    for most in range(1, 12):
      played = script.play([], most)
      assert 1 <= len(played.ids) <= most
      assert played.stopped == (played.ids[-1] == renderer().end)
