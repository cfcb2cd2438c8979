"""The official client of OpenAI against our server."""

import base64

import numpy as np
import openai
import pytest

from tests.serving.http_serving import (
  EchoEngine,
  idle,
  serving,
  tokenizer,
  wait_until,
)

TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "add",
      "description": "Adds.",
      "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
      },
    },
  }
]
CALL = (
  '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server():
  with serving(EchoEngine()) as found:
    yield found


@pytest.fixture
def client(server):
  with openai.OpenAI(
    base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
  ) as found:
    yield found
  wait_until(lambda: idle(server.service))


def ask(client, text, **more):
  return client.chat.completions.create(
    model="tiny", messages=[{"role": "user", "content": text}], **more
  )


class TestChat:
  def test_a_reply(self, client):
    answer = ask(client, "say:hello wörld 🦜")
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "hello wörld 🦜"
    assert choice.finish_reason == "stop"
    # A token a byte, and the mark of the end.
    sampled = len("hello wörld 🦜".encode()) + 1
    assert answer.usage.completion_tokens == sampled
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + sampled

  def test_a_stream_says_the_same(self, client):
    with ask(
      client,
      "say:hello wörld 🦜",
      stream=True,
      stream_options={"include_usage": True},
    ) as stream:
      parts = list(stream)
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text == "hello wörld 🦜"
    reasons = [p.choices[0].finish_reason for p in parts if p.choices]
    assert reasons[-1] == "stop"
    assert not any(reasons[:-1])
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == len(text.encode()) + 1
    assert len(parts) > 5

  def test_max_tokens(self, client):
    answer = ask(client, "say:0123456789", max_tokens=4)
    assert answer.choices[0].message.content == "0123"
    assert answer.choices[0].finish_reason == "length"
    newer = ask(client, "say:0123456789", max_completion_tokens=4)
    assert newer.choices[0].message.content == "0123"

  @pytest.mark.parametrize("stream", [False, True])
  def test_stop_strings_cut_the_text(self, client, stream):
    answer = ask(client, "say:one, two, three", stop=["two"], stream=stream)
    if stream:
      text = "".join(p.choices[0].delta.content or "" for p in answer)
      assert text == "one, "
    else:
      assert answer.choices[0].message.content == "one, "
      assert answer.choices[0].finish_reason == "stop"

  def test_choices_have_seeds_of_their_own(self, client):
    answer = ask(client, "say:<seed>", n=3, seed=7)
    texts = [c.message.content for c in answer.choices]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert texts[0] == "7"
    assert len(set(texts)) == 3
    again = ask(client, "say:<seed>", n=3, seed=7)
    assert [c.message.content for c in again.choices] == texts

  def test_streamed_choices_don_t_mix(self, client):
    parts = list(ask(client, "say:<seed>", n=3, seed=7, stream=True))
    whole = ask(client, "say:<seed>", n=3, seed=7)
    for choice in whole.choices:
      text = "".join(
        p.choices[0].delta.content or ""
        for p in parts
        if p.choices[0].index == choice.index
      )
      assert text == choice.message.content

  def test_log_probs_are_those_of_sampled_tokens(self, client):
    answer = ask(client, "say:ab", logprobs=True)
    entries = answer.choices[0].logprobs.content
    assert [e.token for e in entries] == ["a", "b", "<|im_end|>"]
    # The engine's log-prob is minus the version of its cache.
    assert [e.logprob for e in entries] == [0, 0, 0]
    assert bytes(entries[0].bytes) == b"a"

  def test_everything_that_was_recorded(self, client):
    answer = ask(client, "say:ab", extra_body={"return_tokens": True})
    tokens = answer.choices[0].tokens
    assert tokens["ids"] == [*b"ab", 257]
    prompt = tokenizer().decode(tokens["prompt_ids"], skip_special=False)
    assert prompt.endswith("say:ab<|im_end|>\n<|im_start|>assistant\n")
    assert tokens["versions"] == tokens["cache_versions"] == [0, 0, 0]
    assert tokens["finish"] == "stop_id"
    experts = np.frombuffer(
      base64.b64decode(tokens["experts"]["base64"]), "<i2"
    ).reshape(tokens["experts"]["shape"])
    np.testing.assert_array_equal(experts[:, 0, 0], tokens["ids"])

  def test_streamed_tokens_are_the_same(self, client):
    more = {"return_tokens": True}
    whole = ask(client, "say:ab 🦜 cd", extra_body=more).choices[0].tokens
    parts = list(ask(client, "say:ab 🦜 cd", extra_body=more, stream=True))
    told = [p.choices[0].tokens for p in parts]
    assert told[0] == {"prompt_ids": whole["prompt_ids"]}
    for name in ("ids", "logprobs", "versions"):
      joined = [x for t in told[1:] for x in t[name]]
      assert joined == whole[name]


class TestTools:
  def test_a_call(self, client):
    answer = ask(client, f"say:I add.{CALL}", tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.function.name == "add"
    assert call.function.arguments == '{"a": 1, "b": 2}'
    assert message.content.strip() == "I add."

  def test_calls_in_a_stream(self, client):
    parts = list(ask(client, f"say:{CALL}{CALL}", tools=TOOLS, stream=True))
    calls = [c for p in parts for c in p.choices[0].delta.tool_calls or ()]
    assert [c.index for c in calls] == [0, 1]
    assert len({c.id for c in calls}) == 2
    assert parts[-1].choices[0].finish_reason == "tool_calls"

  def test_a_malformed_call_is_said_to_be_one(self, client):
    bad = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    answer = ask(client, f"say:{bad}", tools=TOOLS)
    message = answer.choices[0].message
    assert not message.tool_calls
    assert "add" in message.content
    assert answer.choices[0].finish_reason == "stop"
    (problem,) = message.arl["malformed_calls"]
    assert "b" in problem

  def test_without_tools_a_call_is_text(self, client):
    answer = ask(client, f"say:{CALL}", tools=TOOLS, tool_choice="none")
    assert not answer.choices[0].message.tool_calls
    assert '"add"' in answer.choices[0].message.content


class TestCompletions:
  def test_a_text(self, client):
    answer = client.completions.create(model="tiny", prompt="x say:abc")
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].finish_reason == "stop"

  def test_token_ids_in_and_out(self, client):
    answer = client.completions.create(
      model="tiny",
      prompt=[*b"say:abc"],
      logprobs=0,
      extra_body={"return_tokens": True},
    )
    (choice,) = answer.choices
    assert choice.tokens["ids"] == [*b"abc", 257]
    assert choice.tokens["prompt_ids"] == [*b"say:abc"]
    assert choice.logprobs.tokens == ["a", "b", "c", "<|im_end|>"]
    assert choice.logprobs.token_logprobs == [0, 0, 0, 0]

  def test_own_ends_replace_the_tokenizer_s(self, client):
    def ids(stop_token_ids):
      more = {"return_tokens": True, "stop_token_ids": stop_token_ids}
      answer = client.completions.create(
        model="tiny", prompt="say:abc", max_tokens=9, extra_body=more
      )
      return answer.choices[0].tokens["ids"]

    assert ids([98]) == [*b"ab"]
    assert ids(None) == [*b"abc", 257]
    with pytest.raises(openai.APIError):
      # Nothing ends it, and the script has no more to say.
      ids([1])

  def test_prompts_at_once(self, client):
    answer = client.completions.create(
      model="tiny", prompt=["say:a", "say:<seed>"], n=2, seed=3
    )
    texts = [c.text for c in answer.choices]
    assert texts[:2] == ["a", "a"]
    assert texts[2] != texts[3]

  def test_a_stream(self, client):
    parts = client.completions.create(
      model="tiny", prompt="say:a 🦜 b", stream=True
    )
    assert "".join(p.choices[0].text for p in parts) == "a 🦜 b"


class TestErrors:
  def test_an_unknown_model(self, client):
    with pytest.raises(openai.NotFoundError, match="tiny"):
      client.completions.create(model="gpt", prompt="x")

  def test_a_prompt_beyond_the_cache(self, client):
    with pytest.raises(openai.BadRequestError) as error:
      ask(client, "x" * 4000)
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "messages"

  def test_models(self, client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
