"""Conversations of outside harnesses become token-exact episodes."""

import json

import numpy as np
import openai
import pytest

from arl_jax.records import from_json
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.sessions import Sessions
from arl_jax.types import Role
from tests.serving.http_serving import (
  EchoEngine,
  idle,
  post,
  serving,
  tokenizer,
  wait_until,
)
from tests.serving.test_openai_client import CALL, TOOLS


@pytest.fixture(scope="module")
def server():
  with serving(EchoEngine()) as found:
    yield found


class Harness:
  """Speaks nothing but OpenAI's API; its address names the session."""

  def __init__(self, server, session):
    self.server, self.session = server, session
    self.client = openai.OpenAI(
      base_url=f"{server.url}/sessions/{session}/v1",
      api_key="none",
      max_retries=0,
    )
    self.messages = []

  def say(self, text, **more):
    self.messages.append({"role": "user", "content": text})
    return self.turn(**more)

  def turn(self, **more):
    answer = self.client.chat.completions.create(
      model="tiny",
      messages=self.messages,
      extra_body={"return_tokens": True},
      **more,
    )
    (choice,) = answer.choices
    self.messages.append(choice.message.model_dump(exclude_none=True))
    return choice

  def finish(self, **fields):
    self.client.close()
    path = f"/v1/sessions/{self.session}/finish"
    response = post(self.server, path, fields)
    assert response.status_code == 200, response.text
    wait_until(lambda: idle(self.server.service))
    return from_json(response.json())


def spoken(segment):
  return tokenizer().decode(segment.ids.tolist(), skip_special=False)


def runs(segment):
  """Ids of each run of sampled tokens."""
  edges = np.flatnonzero(np.diff([0, *segment.sampled, 0]))
  pairs = zip(edges[::2], edges[1::2], strict=True)
  return [segment.ids[a:b].tolist() for a, b in pairs]


def test_turns_append_to_what_was_sampled(server):
  harness = Harness(server, "plain")
  choices = [harness.say(f"say:answer {i}") for i in range(3)]
  episode = harness.finish(task_id="t1", rollout_index=4)
  (segment,) = episode.segments
  assert (episode.task_id, episode.rollout_index) == ("t1", 4)
  assert episode.turns == 3
  assert runs(segment) == [c.tokens["ids"] for c in choices]
  # Each prompt is exactly what the segment holds up to there.
  for choice in choices:
    prompt = choice.tokens["prompt_ids"]
    assert segment.ids[: len(prompt)].tolist() == prompt
    assert not segment.sampled[len(prompt) - 1]
    assert segment.sampled[len(prompt)]
  assert (segment.roles[segment.sampled] == Role.SAMPLED).all()
  assert (segment.policy_version[segment.sampled] == 0).all()
  np.testing.assert_array_equal(
    segment.experts[segment.sampled, 0, 0], segment.ids[segment.sampled]
  )


def test_tool_calls_and_results(server):
  harness = Harness(server, "tools")
  choice = harness.say(f"say:{CALL}", tools=TOOLS)
  (call,) = choice.message.tool_calls
  harness.messages.append(
    {"role": "tool", "tool_call_id": call.id, "content": "3 say:done"}
  )
  assert "done" in harness.turn(tools=TOOLS).message.content
  (segment,) = harness.finish().segments
  assert len(runs(segment)) == 2
  assert spoken(segment).count("<tool_call>") >= 1


def test_a_cut_message_is_closed_by_the_harness_not_by_the_policy(server):
  harness = Harness(server, "cut")
  assert harness.say("say:0123456789", max_tokens=4).finish_reason == "length"
  harness.say("say:more")
  (segment,) = harness.finish().segments
  first, second = runs(segment)
  assert bytes(first) == b"0123"
  end = len(segment.ids) - segment.sampled[::-1].argmax() - len(second)
  after = segment.ids[:end].tolist()
  assert after.count(257) == 3  # Of two questions and of the cut message.


def test_a_changed_history_begins_a_segment(server):
  harness = Harness(server, "changed")
  harness.say("say:one")
  harness.say("say:two")
  del harness.messages[:2]
  harness.say("say:three")
  episode = harness.finish()
  first, second = episode.segments
  assert (first.parent, second.parent) == (None, 0)
  assert second.reason == "history"
  assert [bytes(r[:-1]) for r in runs(first)] == [b"one", b"two"]
  # What was sampled before is read there, not trained again.
  assert [bytes(r[:-1]) for r in runs(second)] == [b"three"]
  assert "two" in spoken(second)


def test_a_reply_that_was_edited_begins_a_segment(server):
  harness = Harness(server, "edited")
  harness.say("say:one")
  harness.messages[-1]["content"] = "won"
  harness.say("say:two")
  assert len(harness.finish().segments) == 2


def test_other_settings_begin_a_segment(server):
  harness = Harness(server, "settings")
  harness.say("say:one")
  harness.say("say:two", temperature=0.5)
  first, second = harness.finish().segments
  assert (first.temperature, second.temperature) == (1.0, 0.5)


def test_two_agents_in_one_session(server):
  harness = Harness(server, "agents")
  harness.say("say:main one")
  main, harness.messages = harness.messages, []
  harness.say("say:helper one")
  helper, harness.messages = harness.messages, main
  harness.say("say:main two")
  harness.messages = helper
  harness.say("say:helper two")
  first, second = harness.finish().segments
  assert [len(runs(s)) for s in (first, second)] == [2, 2]


def test_every_sampled_token_is_trained_once(server):
  harness = Harness(server, "once")
  sampled = 0
  for i in range(5):
    choice = harness.say(f"say:reply {i}", stream=False)
    sampled += len(choice.tokens["ids"])
    if i % 2:
      del harness.messages[:2]
  assert harness.finish().trained_tokens == sampled


def test_streams_are_recorded_the_same(server):
  for session, stream in (("whole", False), ("parts", True)):
    body = {
      "messages": [{"role": "user", "content": "say:abc"}],
      "session": session,
      "stream": stream,
    }
    assert post(server, "/v1/chat/completions", body).status_code == 200
  records = []
  for session in ("whole", "parts"):
    episode = post(server, f"/v1/sessions/{session}/finish").json()
    records.append(json.dumps(episode["segments"]))
  assert records[0] == records[1]


def test_token_prompts_are_joined_too(server):
  prompt = [*b"say:abc"]
  fields = {"session": "ids", "return_tokens": True}
  answer = post(server, "/v1/completions", {"prompt": prompt, **fields})
  ids = answer.json()["choices"][0]["tokens"]["ids"]
  longer = [*prompt, *ids, *b" say:de"]
  post(server, "/v1/completions", {"prompt": longer, **fields})
  episode = from_json(post(server, "/v1/sessions/ids/finish").json())
  (segment,) = episode.segments
  assert segment.ids[: len(longer)].tolist() == longer
  assert [bytes(r[:-1]) for r in runs(segment)] == [b"abc", b"de"]


def test_a_filtered_sample_isn_t_recorded(server):
  body = {
    "messages": [{"role": "user", "content": "x"}],
    "session": "filtered",
    "top_p": 0.5,
  }
  response = post(server, "/v1/chat/completions", body)
  assert response.status_code == 400
  assert "top_p" in response.json()["error"]["message"]
  post(server, "/v1/sessions/filtered/finish")


def test_reward_and_outcome(server):
  harness = Harness(server, "reward")
  harness.say("say:x")
  episode = harness.finish(
    stop_reason="turn_limit",
    outcome={"score": 2},
    reward={"total": 0.5, "parts": {"a": 0.5}},
  )
  assert episode.stop_reason.value == "turn_limit"
  assert episode.outcome == {"score": 2}
  assert episode.reward.total == 0.5


@pytest.mark.parametrize(
  ("fields", "param"),
  [
    ({"stop_reason": "tired"}, "stop_reason"),
    ({"reward": {"total": "high"}}, "reward"),
    ({"outcome": []}, "outcome"),
    ({"rollout_index": -1}, "rollout_index"),
    ({"score": 1}, "score"),
  ],
)
def test_a_wrong_end_loses_nothing(server, fields, param):
  harness = Harness(server, "wrong")
  harness.say("say:x")
  response = post(server, "/v1/sessions/wrong/finish", fields)
  assert response.status_code == 400
  assert response.json()["error"]["param"] == param
  assert harness.finish().turns == 1


def test_what_isn_t_there(server):
  response = post(server, "/v1/sessions/nobody/finish")
  assert response.status_code == 404
  assert "nobody" in response.json()["error"]["message"]


def test_bounds():
  with serving(
    EchoEngine(), max_sessions=2, max_session_tokens=60, session_seconds=3600
  ) as server:

    def ask(session):
      body = {
        "messages": [{"role": "user", "content": "say:" + "x" * 40}],
        "session": session,
      }
      return post(server, "/v1/chat/completions", body)

    assert ask("a").status_code == ask("b").status_code == 200
    full = ask("c")
    assert full.status_code == 429
    assert "max_sessions" in full.json()["error"]["message"]
    long = ask("a")
    assert long.status_code == 400
    assert long.json()["error"]["param"] == "session"
    for session in "ab":
      assert post(server, f"/v1/sessions/{session}/finish").status_code == 200
    assert ask("c").status_code == 200


def test_idle_sessions_are_forgotten_and_busy_ones_are_not():
  now = [0.0]
  closed = []
  config = ServingConfig(session_seconds=10)
  sessions = Sessions(config, closed.append, clock=lambda: now[0])
  turns = {}
  for name in ("a", "b", "c"):
    turns[name] = sessions.use(name).plain([1, 2], 1.0)
  sessions.get("b").abandon(turns["b"])
  sessions.get("c").abandon(turns["c"])
  now[0] = 9.0
  sessions.use("c")
  now[0] = 11.0
  sessions.expire()
  assert closed == ["b"]
  sessions.get("a").abandon(turns["a"])
  sessions.expire()
  assert closed == ["b", "a"]
  assert (len(sessions), sessions.expired) == (1, 2)
