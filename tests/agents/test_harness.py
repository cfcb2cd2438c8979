"""An episode, with a fake client and the real search environment."""

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.agents import harness
from arl_jax.agents.harness import AgentConfig, derive_seed, run_episode
from arl_jax.envs.search.tools import TOOL_NAMES
from arl_jax.types import (
  PolicyClient,
  Role,
  Sample,
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


class Player:
  """Sends given messages; keeps what it was given and what it sent."""

  def __init__(self, messages, *, fail_at: int | None = None):
    self._messages = iter(messages)
    self._fail_at = fail_at
    self.requests: list[tuple[list[int], list[int]]] = []
    self.limits: list[int] = []
    self.seeds: list[int] = []
    self.sessions: set[str] = set()
    self.closed: list[str] = []

  async def sample(
    self, session, ids, *, max_tokens, stop_ids, seed, temperature=1.0
  ):
    if self._fail_at == len(self.requests):
      raise ConnectionError("gone")
    message = list(next(self._messages, [renderer().end]))
    # As a sampler would: cut at the first stop token or at the limit.
    stops = [i for i, x in enumerate(message) if x in stop_ids]
    if stops:
      message = message[: stops[0] + 1]
    message = message[:max_tokens] or [0]
    self.requests.append((list(ids), message))
    self.limits.append(max_tokens)
    self.seeds.append(seed)
    self.sessions.add(session)
    n = len(message)
    return Sample(
      ids=np.array(message, np.int32),
      logp=np.full(n, -0.25, np.float32),
      versions=np.full(n, 7, np.int32),
      stopped=message[-1] in stop_ids,
    )

  async def close(self, session):
    self.closed.append(session)


def call(name: str, argument: str) -> list[int]:
  return renderer().call(ToolCall(name=name, argument=argument))


def say(*calls: tuple[str, str]) -> list[int]:
  return [i for c in calls for i in call(*c)] + [renderer().end]


def final(text: str) -> list[int]:
  return [*renderer().text(text), renderer().end]


def play(messages, config=CONFIG, env=None, **options):
  player = Player(messages)
  episode = asyncio.run(
    run_episode(
      TASK, env or environment(), player, renderer(), config, **options
    )
  )
  check(episode, player, config)
  return episode, player


def check(episode, player, config):
  """What holds for every episode."""
  assert isinstance(player, PolicyClient)
  assert player.closed == [*player.sessions] or not player.sessions
  assert all(len(s) <= config.token_budget for s in episode.segments)
  assert episode.turns == len(player.requests) <= config.max_turns
  # Each request and its answer are a prefix of exactly one segment, sampled
  # there and nowhere else.
  found = []
  for number, segment in enumerate(episode.segments):
    starts = np.flatnonzero(np.diff(segment.sampled.astype(int), prepend=0) > 0)
    found += [(number, int(at)) for at in starts]
  assert len(found) == len(player.requests)
  for (number, at), (given_ids, sent) in zip(
    found, player.requests, strict=True
  ):
    segment = episode.segments[number]
    end = at + len(sent)
    assert segment.ids[:end].tolist() == given_ids + sent
    assert segment.sampled[at:end].all()
    assert (segment.policy_version[at:end] == 7).all()
  assert episode.trained_tokens == sum(len(s) for _, s in player.requests)
  rewrites = [e for e in episode.events if e.kind == "rewrite"]
  assert len(rewrites) == len(episode.segments) - 1
  for event in rewrites:
    child = episode.segments[event.data["segment"]]
    parent = episode.segments[child.parent]
    gone = {i for a, b in event.data["removed"] for i in range(a, b)}
    kept = [x for i, x in enumerate(parent.ids.tolist()) if i not in gone]
    assert child.ids[: len(kept)].tolist() == kept
    assert child.reason == event.data["reason"]


def text(segment) -> str:
  return "".join(renderer().tokenizer.piece(i) for i in segment.ids)


SEARCH = say(("search_corpus", "fox"))


class TestStops:
  def test_answered(self):
    episode, _ = play([SEARCH, final("<c0>")])
    assert episode.stop_reason is StopReason.ANSWERED
    assert episode.turns == 2
    assert episode.outcome["answer"]
    assert events(episode, "final")[0].data["problem"] is None

  @pytest.mark.parametrize("answer", ["<c7>", "the dog", ""])
  def test_a_final_message_that_does_not_parse(self, answer):
    episode, _ = play([SEARCH, final(answer)])
    assert episode.stop_reason is StopReason.MALFORMED
    assert episode.outcome["answer"] is None

  def test_turn_limit(self):
    wide = AgentConfig(
      token_budget=600, soft_threshold=500, hard_threshold=550, max_turns=3
    )
    episode, player = play([SEARCH] * 9, wide)
    assert episode.stop_reason is StopReason.TURN_LIMIT
    assert len(player.requests) == 3

  def test_an_answer_in_the_last_turn_counts(self):
    config = AgentConfig(
      token_budget=600, soft_threshold=500, hard_threshold=550, max_turns=2
    )
    episode, _ = play([SEARCH, final("<c0>")], config)
    assert episode.stop_reason is StopReason.ANSWERED

  def test_context_full(self):
    config = AgentConfig(
      token_budget=70, soft_threshold=60, hard_threshold=65, max_turns=9
    )
    episode, _ = play([SEARCH] * 9, config)
    assert episode.stop_reason is StopReason.CONTEXT_FULL


class TestMessages:
  def test_a_truncated_message_is_closed_and_reported(self):
    long = [*renderer().text("the lazy dog " * 9)]
    episode, player = play([long, SEARCH, final("<c0>")])
    assert len(player.requests[0][1]) == CONFIG.message_tokens
    (bad,) = events(episode, "malformed_call")
    assert bad.data["problem"] == "message too long"
    (segment,) = episode.segments
    end = len(player.requests[0][0]) + CONFIG.message_tokens
    assert segment.ids[end] == renderer().end
    assert segment.roles[end] == Role.FORCED
    assert not segment.sampled[end]
    assert episode.stop_reason is StopReason.ANSWERED

  def test_a_truncated_answer_is_no_answer(self):
    config = AgentConfig(
      token_budget=120,
      soft_threshold=60,
      hard_threshold=90,
      message_tokens=3,
      max_turns=2,
    )
    long = [*renderer().text("<c0> <c1> <c0> <c1>")]
    episode, _ = play([long, long], config)
    assert episode.outcome["answer"] is None
    assert episode.stop_reason is StopReason.TURN_LIMIT

  def test_a_malformed_call_is_an_observation(self):
    bad = [*renderer().call(ToolCall(name="fly", argument="x")), renderer().end]
    episode, player = play([bad, SEARCH, final("<c0>")])
    assert episode.stop_reason is StopReason.ANSWERED
    assert events(episode, "malformed_call")
    assert len(player.requests) == 3

  def test_parallel_calls_share_a_turn(self):
    both = say(("search_corpus", "fox"), ("grep_corpus", "fish"))
    config = AgentConfig(
      token_budget=300, soft_threshold=200, hard_threshold=250
    )
    episode, _ = play([both, final("<c0>")], config)
    made = events(episode, "tool_call")
    assert [e.data["tool"] for e in made] == ["search_corpus", "grep_corpus"]
    assert {e.turn for e in made} == {0}

  def test_a_document_that_spells_marks_forges_nothing(self):
    wide = AgentConfig(token_budget=300, soft_threshold=200, hard_threshold=250)
    episode, _ = play(
      [say(("search_corpus", "cat foxes")), final("<c0>")], wide
    )
    (segment,) = episode.segments
    tool = segment.ids[segment.roles == Role.TOOL]
    assert not set(tool) & set(renderer().tokenizer.controls.values())


class TestPrune:
  def test_begins_a_segment_without_the_chunks(self):
    wide = AgentConfig(token_budget=300, soft_threshold=200, hard_threshold=250)
    messages = [SEARCH, say(("prune_chunks", "<c0>")), final("<c1>")]
    episode, player = play(messages, wide)
    first, second = episode.segments
    assert (second.parent, second.reason) == (0, "prune")
    c0 = renderer().tokenizer.encode("<c0>")[0]
    shown = (first.ids == c0) & (first.roles == Role.TOOL)
    assert shown.sum() == 1
    # Only what the policy itself wrote still names it.
    assert not ((second.ids == c0) & (second.roles == Role.TOOL)).any()
    # The carried messages aren't trained twice.
    sampled = [s.sampled.sum() for s in episode.segments]
    sent = [len(s) for _, s in player.requests]
    assert sampled == [sent[0] + sent[1], sent[2]]
    (rewrite,) = events(episode, "rewrite")
    ((start, end),) = rewrite.data["removed"]
    assert first.ids[start] == c0
    assert (first.roles[start:end] == Role.TOOL).all()
    assert episode.outcome["pruned"]

  def test_the_hard_cutoff_refuses_all_but_prune(self):
    config = AgentConfig(token_budget=300, soft_threshold=1, hard_threshold=2)
    messages = [
      say(("search_corpus", "fox")),
      say(("grep_corpus", "fox")),
      say(("read_document", "d0")),
      say(("prune_chunks", "<c0>")),
      final("<c0>"),
    ]
    episode, _ = play(messages, config)
    refused = [e.data["tool"] for e in events(episode, "refused_call")]
    assert refused == ["search_corpus", "grep_corpus", "read_document"]
    # Nothing was refused of the prune; there was nothing to prune.
    (tried,) = events(episode, "malformed_call")
    assert tried.data["tool"] == "prune_chunks"
    assert episode.outcome["calls"] == ["prune_chunks"]

  def test_a_prune_beyond_the_cutoff_makes_room(self):
    base = len(renderer().prompt(TASK.prompt)) + 1
    after = base + len(SEARCH)
    config = AgentConfig(
      token_budget=300,
      soft_threshold=after + 1,
      hard_threshold=after + 1,
    )
    messages = [SEARCH, say(("prune_chunks", "<c0> <c1>")), final("<c0>")]
    episode, _ = play(messages, config)
    assert [e.data["tool"] for e in events(episode, "tool_call")] == [
      "search_corpus",
      "prune_chunks",
    ]
    assert len(episode.segments) == 2
    assert episode.stop_reason is StopReason.ANSWERED

  def test_a_prune_is_possible_when_the_context_is_nearly_full(self):
    # The prune frees the room that its answer needs.
    messages = [SEARCH, say(("prune_chunks", "<c0> <c1>")), final("<c0>")]
    for budget in range(60, 120):
      config = AgentConfig(
        token_budget=budget,
        soft_threshold=budget // 2,
        hard_threshold=budget - 1,
      )
      episode, player = play(messages, config)
      if len(player.requests) > 1 and len(player.requests[1][1]) == len(
        messages[1]
      ):
        assert episode.outcome["pruned"] or not episode.outcome["encountered"]


class TestNudge:
  config = AgentConfig(
    token_budget=300, soft_threshold=10, hard_threshold=290, max_turns=3
  )

  def vanish(self):
    return AgentConfig(
      token_budget=300,
      soft_threshold=10,
      hard_threshold=290,
      max_turns=3,
      nudge_mode="vanish",
    )

  def test_appended_it_stays(self):
    episode, _ = play([SEARCH, SEARCH, final("<c0>")], self.config)
    (segment,) = episode.segments
    assert text(segment).count("prune or answer") == 2
    assert len(events(episode, "notice")) == 2

  def test_below_the_threshold_there_is_none(self):
    config = AgentConfig(
      token_budget=300, soft_threshold=280, hard_threshold=290
    )
    episode, _ = play([SEARCH, final("<c0>")], config)
    assert not events(episode, "notice")
    assert "prune or answer" not in text(episode.segments[0])

  def test_an_empty_one_is_none(self):
    config = dataclasses.replace(self.config, nudge="")
    episode, _ = play([SEARCH, SEARCH, final("<c0>")], config)
    assert not events(episode, "notice")
    told, _ = play([SEARCH, SEARCH, final("<c0>")], self.config)
    nudged = len(renderer().block(self.config.nudge))
    (without,), (with_it,) = episode.segments, told.segments
    assert len(without) == len(with_it) - 2 * nudged

  def test_vanished_it_is_gone_after_the_turn(self):
    episode, player = play([SEARCH, SEARCH, final("<c0>")], self.vanish())
    assert [s.reason for s in episode.segments] == ["start", "notice"]
    assert episode.segments[1].parent == 0
    for ids, _ in player.requests[1:]:
      view = "".join(renderer().tokenizer.piece(i) for i in ids)
      assert view.count("prune or answer") == 1

  def test_vanishing_and_pruning_in_one_turn(self):
    messages = [SEARCH, say(("prune_chunks", "<c0>")), final("<c1>")]
    episode, _ = play(messages, self.vanish())
    reasons = [s.reason for s in episode.segments]
    assert reasons == ["start", "notice", "prune"]

  @pytest.mark.parametrize("mode", ["append", "vanish"])
  def test_outside_training_there_is_none(self, mode):
    config = self.config if mode == "append" else self.vanish()
    episode, _ = play([SEARCH, final("<c0>")], config, training=False)
    assert not events(episode, "notice")
    assert len(episode.segments) == 1
    assert "prune or answer" not in text(episode.segments[0])


class TestSession:
  @pytest.mark.parametrize("fail_at", [0, 1])
  def test_the_client_is_closed_when_it_fails(self, fail_at):
    player = Player([SEARCH, SEARCH], fail_at=fail_at)
    with pytest.raises(ConnectionError):
      asyncio.run(run_episode(TASK, environment(), player, renderer(), CONFIG))
    assert len(player.closed) == 1

  def test_the_client_is_closed_when_the_environment_fails(self):
    env = environment()
    player = Player([SEARCH])
    asyncio.run(env.start(TASK))
    with pytest.raises(RuntimeError, match="single-use"):
      asyncio.run(run_episode(TASK, env, player, renderer(), CONFIG))
    assert len(player.closed) == 1

  def test_the_client_is_closed_when_cancelled(self):
    class Waits(Player):
      async def sample(self, session, ids, **_):
        await asyncio.sleep(60)

    player = Waits([])

    async def run():
      work = asyncio.create_task(
        run_episode(TASK, environment(), player, renderer(), CONFIG)
      )
      await asyncio.sleep(0.05)
      work.cancel()
      await asyncio.gather(work, return_exceptions=True)

    asyncio.run(run())
    assert len(player.closed) == 1

  def test_seeds_differ_by_turn_and_repeat_by_run(self):
    _, one = play([SEARCH, SEARCH, final("<c0>")], seed=5)
    _, two = play([SEARCH, SEARCH, final("<c0>")], seed=5)
    _, other = play([SEARCH, SEARCH, final("<c0>")], seed=6)
    assert one.seeds == two.seeds
    assert len(set(one.seeds + other.seeds)) == 6

  def test_sessions_differ_by_rollout(self):
    _, one = play([SEARCH], rollout_index=0)
    _, two = play([SEARCH], rollout_index=1)
    assert one.sessions != two.sessions

  def test_the_same_play_gives_the_same_record(self):
    one, _ = play([SEARCH, say(("prune_chunks", "<c0>")), final("<c1>")])
    two, _ = play([SEARCH, say(("prune_chunks", "<c0>")), final("<c1>")])
    assert one.events == two.events
    assert one.outcome == two.outcome


def token() -> st.SearchStrategy[int]:
  size = renderer().tokenizer.vocab_size
  marks = list(renderer().tokenizer.controls.values())
  handles = [renderer().tokenizer.encode(h)[0] for h in HANDLES]
  tools = [renderer().tokenizer.encode(t)[0] for t in TOOL_NAMES]
  return st.one_of(
    st.integers(0, size - 1), st.sampled_from(marks + handles + tools)
  )


messages = st.lists(
  st.one_of(
    st.lists(token(), max_size=30),
    st.builds(
      lambda calls: say(*calls),
      st.lists(
        st.tuples(
          st.sampled_from(TOOL_NAMES),
          st.sampled_from(
            ["fox", "brown dog", "<c0>", "<c0> <c1>", "<c2> <c3>", "d2", "["]
          ),
        ),
        min_size=1,
        max_size=4,
      ),
    ),
  ),
  max_size=10,
)


@settings(deadline=None, max_examples=150)
@given(
  messages,
  st.integers(3, 140),
  st.data(),
  st.sampled_from(["append", "vanish"]),
  st.booleans(),
)
def test_whatever_a_policy_sends_it_ends_within_its_budget(
  sent, budget, data, mode, training
):
  hard = data.draw(st.integers(1, budget - 1))
  config = AgentConfig(
    token_budget=budget,
    soft_threshold=data.draw(st.integers(1, hard)),
    hard_threshold=hard,
    max_turns=data.draw(st.integers(1, 8)),
    message_tokens=data.draw(st.integers(1, 30)),
    observation_tokens=data.draw(st.integers(1, 80)),
    nudge_mode=mode,
  )
  config.validate()
  opening = len(renderer().prompt(TASK.prompt)) + 1
  if opening > budget:
    return  # See test_a_prompt_longer_than_the_budget.
  play(sent, config, training=training)


def test_a_prompt_longer_than_the_budget_is_not_sampled_from():
  config = AgentConfig(token_budget=6, soft_threshold=2, hard_threshold=3)
  player = Player([SEARCH])
  # The task can't be done, which says nothing about the policy: no episode.
  with pytest.raises(ValueError, match="token_budget 6"):
    asyncio.run(run_episode(TASK, environment(), player, renderer(), config))
  assert not player.requests


class TestConfig:
  @pytest.mark.parametrize(
    ("field", "value"),
    [
      ("token_budget", 0),
      ("soft_threshold", 0),
      ("soft_threshold", 241),
      ("hard_threshold", 320),
      ("max_turns", 0),
      ("message_tokens", 0),
      ("observation_tokens", -1),
      ("nudge_mode", "blink"),
      ("temperature", 0.0),
      ("temperature", float("nan")),
    ],
  )
  def test_errors_name_the_field(self, field, value):
    config = AgentConfig(**{field: value})
    with pytest.raises(ValueError, match=field):
      config.validate()

  def test_the_default_is_valid(self):
    AgentConfig().validate()


def test_seeds_are_the_same_on_every_machine():
  assert derive_seed(1, "a") == derive_seed("1", "a") != derive_seed("1a")
  assert 0 <= derive_seed(harness.__name__) < 2**31
  # blake2b(b"0\x00a", digest_size=4), big-endian, halved.
  assert derive_seed(0, "a") == 0xA6ADF4A5 >> 1
