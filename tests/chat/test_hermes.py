"""ChatML with tags: what is rendered, appended and parsed."""

import pytest

from arl_jax.chat.formats import format_of
from arl_jax.chat.messages import ChatMessage, ToolCall
from arl_jax.chat.replies import MalformedCall, Reply

USER = ChatMessage(role="user", content="hello")
CALLS = tuple(
  ToolCall(id=f"call_{i}", name="look", arguments=text)
  for i, text in enumerate(['{"at": "x"}', '{"at":  "é", "how": "far"}'])
)
CALLING = ChatMessage(
  role="assistant", content="So.", reasoning="Hm.", tool_calls=CALLS
)
SEEN = ChatMessage(role="tool", content="red", tool_call_id="c", name="look")
CALLED = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
SIGNATURES = (
  '{"type": "function", "function": {"name": "look", "description": "Looks at'
  ' a place.", "parameters": {"type": "object", "properties": {"at": {"type":'
  ' "string", "description": "The place."}, "how": {"type": "string", "enum":'
  ' ["near", "far"], "default": "near"}}, "required": ["at"]}}}\n'
  '{"type": "function", "function": {"name": "wait", "description": "",'
  ' "parameters": {}}}'
)


@pytest.fixture(params=["qwen", "chatml", "smollm2"])
def tokenizer(request):
  return request.getfixturevalue(request.param)


@pytest.fixture
def chat(tokenizer):
  return format_of(tokenizer, "qwen")


def same(tokenizer, ids, text):
  assert tokenizer.decode(ids, skip_special=False) == text
  # Marks are tokens, and so is everything between them.
  assert ids == tokenizer.encode(text, allow_special=True)


def test_a_system_turn_and_its_default(tokenizer, chat):
  system = ChatMessage(role="developer", content="Be brief.")
  text = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nhello<|im_end|>\n"
  )
  opened = text + "<|im_start|>assistant\n"
  same(tokenizer, chat.render([system, USER]), opened)
  messages = [system, USER]
  same(tokenizer, chat.render(messages, add_generation_prompt=False), text)
  default = tokenizer.decode(chat.render([USER]), skip_special=False)
  assert default.startswith("<|im_start|>")
  assert default.endswith(
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
  )
  assert ("SmolLM" in default) == (tokenizer.vocab_size == 49152)


def test_calls_and_answers(tokenizer, chat):
  system = ChatMessage(role="system", content="")
  messages = [system, USER, CALLING, SEEN, SEEN, USER]
  same(
    tokenizer,
    chat.render(messages),
    "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nSo.\n" + CALLED + "\n"
    '<tool_call>\n{"name": "look", "arguments": {"at":  "é", "how": "far"}}\n'
    "</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\nred\n</tool_response>\n"
    "<tool_response>\nred\n</tool_response><|im_end|>\n"
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
  )


def test_tools(tokenizer, chat, tools):
  system = ChatMessage(role="system", content="Be brief.")
  ids = chat.render([system, USER], tools, add_generation_prompt=False)
  text = tokenizer.decode(ids, skip_special=False)
  assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
  assert f"<tools>\n{SIGNATURES}\n</tools>" in text
  assert text.endswith(
    "</tool_call><|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
  )
  same(tokenizer, ids, text)


def test_thoughts_are_closed_at_once(qwen):
  chat = format_of(qwen, "qwen")
  ids = chat.render([USER], effort="none")
  text = qwen.decode(ids, skip_special=False)
  assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
  added = chat.append([*ids, 2], [USER, CALLING], [SEEN], effort="none")
  text = qwen.decode(added, skip_special=False)
  assert text.endswith("<think>\n\n</think>\n\n")
  assert chat.parse(qwen.encode("So."), effort="none") == Reply(content="So.")


@pytest.mark.parametrize("cut", [True, False])
def test_append(tokenizer, chat, cut):
  ids = chat.render([USER])
  # Not as it would be encoded: letter by letter.
  for letter in "hello":
    ids += tokenizer.encode(letter)
  end = tokenizer.controls["<|im_end|>"]
  if not cut:
    ids.append(end)
  added = chat.append(ids, [USER, ChatMessage(role="assistant")], [SEEN, USER])
  if cut:
    assert added.pop(0) == end
  same(
    tokenizer,
    added,
    "\n<|im_start|>user\n<tool_response>\nred\n</tool_response><|im_end|>\n"
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
  )


def test_the_end_of_a_text_is_not_the_end_of_a_turn(chatml):
  chat = format_of(chatml)
  end, text_end = (chatml.controls[f"<|{n}|>"] for n in ("im_end", "endoftext"))
  assert chat.stop_ids == (end, text_end)
  ids = [*chat.render([USER]), text_end]
  assert chat.append(ids, [USER, USER], [USER])[0] == end


@pytest.mark.parametrize(
  ("text", "reply"),
  [
    ("", Reply()),
    ("hello", Reply(content="hello")),
    ("\nhello\n\n", Reply(content="\nhello\n\n")),
    ("\n", Reply(content="\n")),
    ("<think>\nHm.\n\n</think>\n\nSo.", Reply(content="So.", reasoning="Hm.")),
    ("\n<think>Hm.</think>So.", Reply(content="So.", reasoning="Hm.")),
    ("<think>\n\n</think>\n\nSo.\n", Reply(content="So.\n")),
    ("<think>Hm.\n<tool_call>", Reply(reasoning="Hm.\n<tool_call>")),
    # Only at the start.
    ("So. <think>Hm.</think>", Reply(content="So. <think>Hm.</think>")),
    (
      "<think>a</think><think>b</think>",
      Reply(reasoning="a", content="<think>b</think>"),
    ),
    (CALLED, Reply(tool_calls=CALLS[:1])),
    ("\n" + CALLED + "\n", Reply(tool_calls=CALLS[:1])),
    (
      '<think>\nHm.\n</think>\n\nSo.\n\n<tool_call>{ "arguments":'
      ' {"at": "x"},"name": "look"}</tool_call>\n'
      '<tool_call>{"name": "look", "arguments": {"at":  "é", "how": "far"}}'
      "</tool_call>",
      Reply(content="So.\n", reasoning="Hm.", tool_calls=CALLS),
    ),
    (f"a\n{CALLED}\nb\n", Reply(content="a\nb\n", tool_calls=CALLS[:1])),
    ("a </tool", Reply(content="a </tool")),
    ("a <tool_respons", Reply(content="a <tool_respons")),
  ],
)
def test_replies(tokenizer, chat, tools, text, reply):
  ids = tokenizer.encode(text, allow_special=True)
  end = tokenizer.controls["<|im_end|>"]
  for sampled in (ids, [*ids, end], [*ids, end, *ids]):
    assert chat.parse(sampled, tools) == reply


def test_without_tools_nothing_is_a_call(tokenizer, chat):
  ids = tokenizer.encode(f"a\n{CALLED}", allow_special=True)
  assert chat.parse(ids) == Reply(content=f"a\n{CALLED}")


@pytest.mark.parametrize(
  ("body", "problem"),
  [
    ("", "not a JSON object"),
    ("look(x)", "not a JSON object"),
    ('{"name": "look"}', "exactly name and arguments"),
    (
      '{"name": "look", "arguments": {"at": ""}, "id": 1}',
      "exactly name and arguments",
    ),
    ('{"name": 1, "arguments": {}}', "the name must be a string"),
    ('{"name": "look", "arguments": "{}"}', "arguments must be an object"),
    ('{"name": "lok", "arguments": {}}', "no such tool"),
    ('{"name": "look", "arguments": {"how": "far"}}', "'at' is missing"),
    (
      '{"name": "look", "arguments": {"at": 1, "at": 2}}',
      "'at' is there twice",
    ),
    ('{"name": "look", "arguments": {"at": NaN}}', "NaN isn't JSON"),
    ('{"name": "look", "arguments": {"at": "x"}', "',' must stand"),
    ('{"name": "look", "arguments": ' + '{"a":' * 99, "nested deeper than 32"),
    ('{"name": "look", "name": "wait", "arguments": {}}', "'name' is there"),
  ],
)
def test_malformed_calls(tokenizer, chat, tools, body, problem):
  text = f"a\n<tool_call>\n{body}\n</tool_call>\n{CALLED}"
  got = chat.parse(tokenizer.encode(text, allow_special=True), tools)
  assert (got.content, got.tool_calls) == ("a", CALLS[:1])
  (bad,) = got.malformed
  assert bad.text == f"\n{body}\n"
  assert problem in bad.problem


@pytest.mark.parametrize(
  ("text", "bad"),
  [
    (f"<tool_call>{{{CALLED}", ("{", "another call begins in it")),
    (
      f"{CALLED}</tool_call>",
      ("</tool_call>", "the end of a call without its"),
    ),
    (f"{CALLED}<tool_call>{{}}", ("{}", "cut off before its end")),
    (
      f'{CALLED}<tool_call>{{"<|im_start|>": 1}}</tool_call>',
      ('{"<|im_start|>": 1}', "a mark inside a call"),
    ),
  ],
)
def test_calls_out_of_shape(tokenizer, chat, tools, text, bad):
  got = chat.parse(tokenizer.encode(text, allow_special=True), tools)
  assert got.tool_calls == CALLS[:1]
  assert [m.text for m in got.malformed] == [bad[0]]
  assert got.malformed[0].problem.startswith(bad[1])


def test_arguments_that_a_schema_closes(qwen, tools):
  closed = dict(tools[0].parameters) | {"additionalProperties": False}
  tool = type(tools[0])(name="look", parameters=closed)
  text = CALLED.replace('"x"}', '"x", "no": 1}')
  ids = qwen.encode(text, allow_special=True)
  chat = format_of(qwen)
  assert chat.parse(ids, [tool]).malformed[0].problem == (
    "no such argument: 'no'"
  )
  assert not chat.parse(ids, tools).malformed


def test_text_that_spells_a_tag_is_none_where_tags_are_tokens(qwen, tools):
  chat = format_of(qwen)
  got = chat.parse(qwen.encode(CALLED), tools)
  assert got == Reply(content=CALLED)
  got = chat.parse(qwen.encode("<think>x</think>"))
  assert got == Reply(content="<think>x</think>")


def test_a_call_longer_than_any_should_be(qwen, tools, monkeypatch):
  monkeypatch.setattr("arl_jax.chat.strict_json.MAX_CHARS", 44)
  text = CALLED.replace('"x"', '"xxx"')
  (bad,) = (
    format_of(qwen)
    .parse(qwen.encode(text + CALLED, allow_special=True), tools)
    .malformed
  )
  assert isinstance(bad, MalformedCall)
  assert "characters, must be at most 44" in bad.problem


def test_the_prefix_of_call_ids(qwen, tools):
  ids = qwen.encode(CALLED * 2, allow_special=True)
  got = format_of(qwen).parse(ids, tools, call_prefix="r7_")
  assert [call.id for call in got.tool_calls] == ["r7_0", "r7_1"]


def test_a_rendered_reply_parses_back(tokenizer, chat, tools):
  ids = chat.render([CALLING], tools, add_generation_prompt=False)
  start = chat.render([], tools)
  turn = ids[len(start) :]
  reply = chat.parse(turn, tools)
  assert reply.message() == CALLING
