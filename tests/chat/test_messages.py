"""Conversations and tools from strangers' JSON."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.chat.messages import (
  ChatMessage,
  Tool,
  ToolCall,
  is_echo,
  message_json,
  parse_messages,
  parse_tools,
)


def call(name="look", arguments='{"at": "x"}', call_id="c1", **more):
  function = {"name": name, "arguments": arguments}
  return {"id": call_id, "type": "function", "function": function, **more}


USER = {"role": "user", "content": "hi"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call()]}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "seen"}


def test_a_conversation():
  # What the official client sends back has fields without a value.
  echoed = CALLING | {
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "reasoning_content": "Hm.",
  }
  got = parse_messages(
    [
      {"role": "developer", "content": [{"type": "text", "text": "Be "}]},
      {"role": "user", "content": "é", "name": "ann"},
      echoed,
      ANSWER,
      {"role": "assistant", "content": [], "reasoning": "So."},
    ]
  )
  assert got == (
    ChatMessage(role="developer", content="Be "),
    ChatMessage(role="user", content="é", name="ann"),
    ChatMessage(
      role="assistant",
      reasoning="Hm.",
      tool_calls=(ToolCall(id="c1", name="look", arguments='{"at": "x"}'),),
    ),
    # The tool's name is the call's.
    ChatMessage(role="tool", content="seen", tool_call_id="c1", name="look"),
    ChatMessage(role="assistant", reasoning="So."),
  )


def test_parts_are_joined():
  parts = [{"type": "text", "text": t} for t in ("a", "", "\nb")]
  (got,) = parse_messages([{"role": "user", "content": parts}])
  assert got.content == "a\nb"


def test_both_names_of_reasoning():
  both = {"role": "assistant", "reasoning": "x", "reasoning_content": "x"}
  assert parse_messages([both])[0].reasoning == "x"


@pytest.mark.parametrize(
  ("messages", "path"),
  [
    (None, "messages: absent, must be a list"),
    ({}, "messages: an object, must be a list"),
    ([], "messages: 0 entries, must be 1 to"),
    (["hi"], r"messages\[0\]: a string, must be an object"),
    ([{}], r"messages\[0\]\.role: None, must be one of system"),
    ([USER, {"role": "robot", "content": ""}], r"messages\[1\]\.role: 'robot'"),
    ([{"role": ["user"], "content": ""}], r"messages\[0\]\.role: \['user'\]"),
    (
      [{"role": "user"}],
      r"messages\[0\]\.content: absent, must be a string or",
    ),
    ([{"role": "user", "content": 3}], r"messages\[0\]\.content: a int"),
    ([{"role": "user", "content": ["a"]}], r"content\[0\]: a string, must be"),
    (
      [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
      r"messages\[0\]\.content\[0\]\.type: 'image_url', must be 'text'",
    ),
    (
      [{"role": "user", "content": [{"type": "text", "text": 1}]}],
      r"content\[0\]\.text: a int, must be a string",
    ),
    ([USER | {"name": 1}], r"messages\[0\]\.name: a int"),
    ([USER | {"name": "n" * 300}], r"messages\[0\]\.name: 300 characters"),
    ([USER | {"tool_calls": [call()]}], r"messages\[0\]\.tool_calls: not a"),
    ([USER | {"contents": "x"}], r"messages\[0\]\.contents: not a field"),
    ([CALLING | {"function_call": {}}], r"function_call: not a field"),
    ([CALLING | {"refusal": "no"}], r"refusal: not a field"),
    ([CALLING | {"audio": {"id": "a"}}], r"audio: not a field"),
    ([CALLING | {"tool_calls": {}}], r"messages\[0\]\.tool_calls: an object"),
    ([CALLING | {"tool_calls": [1]}], r"tool_calls\[0\]: a int"),
    (
      [CALLING | {"tool_calls": [call(), call()]}],
      r"messages\[0\]\.tool_calls\[1\]\.id: 'c1' is there twice",
    ),
    ([CALLING | {"tool_calls": [call(type="x")]}], r"\[0\]\.type: 'x'"),
    ([CALLING | {"tool_calls": [call(call_id="")]}], r"\[0\]\.id: is empty"),
    ([CALLING | {"tool_calls": [call(function=1)]}], r"\.function: a int"),
    ([CALLING | {"tool_calls": [call(name="a.b")]}], r"\.name: 'a\.b', must"),
    ([CALLING | {"tool_calls": [call(name="a\n")]}], r"function\.name: "),
    (
      [CALLING | {"tool_calls": [call(arguments="[]")]}],
      r"function\.arguments: must be the text of a JSON object: not a JSON",
    ),
    ([CALLING | {"tool_calls": [call(arguments={})]}], r"arguments: an object"),
    (
      [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}],
      r"messages\[0\]\.reasoning: differs",
    ),
    ([USER, ANSWER], r"messages\[1\]\.tool_call_id: 'c1' must be an id"),
    ([CALLING, USER, ANSWER], r"messages\[2\]\.tool_call_id: 'c1' must be"),
    (
      [CALLING, ANSWER | {"tool_call_id": None}],
      r"\[1\]\.tool_call_id: absent",
    ),
    ([USER | {"content": "a\ud800"}], r"messages\[0\]\.content: half of a"),
    ([USER] * 10_000, "messages: 10000 entries"),
    ([USER | {"content": "x" * (9 << 20)}], r"messages\[0\]\.content: 9437184"),
    (
      [USER | {"content": "x" * (3 << 20)}] * 3,
      r"messages: more than 8388608 characters up to messages\[2\]",
    ),
  ],
)
def test_messages_at_fault(messages, path):
  with pytest.raises(ValueError, match=path) as error:
    parse_messages(messages)
  assert len(str(error.value)) < 400


FUNCTION = {
  "name": "look",
  "description": "Looks.",
  "parameters": {"type": "object", "properties": {}, "required": []},
  "strict": True,
}


def tool(**changes):
  return {"type": "function", "function": FUNCTION | changes}


def test_tools():
  assert parse_tools(None) == ()
  assert parse_tools([]) == ()
  bare = {"type": "function", "function": {"name": "wait"}}
  assert parse_tools([tool(), bare]) == (
    Tool(name="look", description="Looks.", parameters=FUNCTION["parameters"]),
    Tool(name="wait"),
  )


def deep():
  value = {}
  for _ in range(100_000):
    value = {"properties": value}
  return value


@pytest.mark.parametrize(
  ("tools", "path"),
  [
    ({}, "tools: an object, must be a list"),
    ([1], r"tools\[0\]: a int"),
    ([{"type": "retrieval"}], r"tools\[0\]\.type: 'retrieval'"),
    ([{"type": "function"}], r"tools\[0\]\.function: absent"),
    ([tool(name="")], r"tools\[0\]\.function\.name: is empty"),
    ([tool(name="a b")], r"tools\[0\]\.function\.name: 'a b', must be 1 to 64"),
    ([tool(name="é")], r"function\.name: 'é'"),
    ([tool(name="a" * 65)], r"function\.name: 'aaa"),
    ([tool(), tool()], r"tools\[1\]\.function\.name: 'look' is there twice"),
    ([tool(description=[])], r"function\.description: a list"),
    ([tool(parameters=[])], r"function\.parameters: a list"),
    ([tool(parameters={"type": "array"})], r"parameters\.type: must be"),
    ([tool(parameters={"properties": []})], r"parameters\.properties: must be"),
    ([tool(parameters={"required": "at"})], r"parameters\.required: must be"),
    ([tool(parameters={"required": [1]})], r"parameters\.required: must be"),
    ([tool(parameters=deep())], r"parameters: nested deeper"),
    ([tool(parameters={"a": "x" * 200_000})], r"parameters: must be at most"),
    ([tool(parameters={"a": float("inf")})], r"parameters: inf isn't"),
    ([tool(parameters={"\ud800": 1})], r"parameters: half of"),
    ([tool()] * 300, "tools: 300 entries"),
  ],
)
def test_tools_at_fault(tools, path):
  with pytest.raises(ValueError, match=path) as error:
    parse_tools(tools)
  assert len(str(error.value)) < 400


json_values = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(max_size=4),
  lambda v: (
    st.lists(v, max_size=3)
    | st.dictionaries(
      st.sampled_from(
        ["role", "content", "tool_calls", "id", "type", "function", "text"]
      ),
      v | st.sampled_from(["user", "assistant", "tool", "text", "function"]),
    )
  ),
  max_leaves=12,
)


@settings(deadline=None)
@given(json_values)
def test_nothing_but_a_value_error(value):
  for parse in (parse_messages, parse_tools):
    with contextlib.suppress(ValueError):
      parse(value)


def test_an_error_is_one_line_that_can_be_encoded():
  with pytest.raises(ValueError, match="not a field") as error:
    parse_messages([USER | {"a\n\ud800": 1}])
  assert "\n" not in str(error.value)
  assert str(error.value).encode()


def test_messages_come_back_from_their_json():
  messages = parse_messages(
    [USER, CALLING | {"reasoning": "Hm."}, ANSWER, USER | {"name": "ann"}]
  )
  again = [message_json(message) for message in messages]
  assert parse_messages(json.loads(json.dumps(again))) == messages


REPLY = ChatMessage(
  role="assistant",
  content="a",
  reasoning="r",
  tool_calls=(ToolCall(id="c1", name="f", arguments='{"x": 1, "y": [2]}'),),
)


@pytest.mark.parametrize(
  ("changes", "same"),
  [
    ({}, True),
    ({"reasoning_content": None}, True),
    ({"reasoning_content": "other"}, False),
    ({"content": "b"}, False),
    ({"content": None}, False),
    ({"tool_calls": None}, False),
    ({"tool_calls": [call("f", '{"y":[2],"x":1}')]}, True),
    ({"tool_calls": [call("f", '{"x": true, "y": [2]}')]}, False),
    ({"tool_calls": [call("g", '{"x": 1, "y": [2]}')]}, False),
    ({"tool_calls": [call("f", '{"x": 1, "y": [2]}', "c2")]}, False),
    ({"arl": {"tokens": [1]}}, True),
  ],
)
def test_echoes(changes, same):
  (message,) = parse_messages([message_json(REPLY) | changes])
  assert is_echo(message, REPLY) is same
