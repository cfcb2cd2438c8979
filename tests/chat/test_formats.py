"""What holds for every format, and which one a tokenizer gets."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.chat.formats import FORMATS, format_of
from arl_jax.chat.messages import ChatMessage, Tool, ToolCall
from arl_jax.chat.replies import Delta, Reply, collect
from arl_jax.chat.stream import Detokenizer

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<|im_end|>", "<|im_start|>", "<|start|>", "<|end|>", "<|call|>")
SPELLED = (*MARKS, "<tool_call>", "</think>", "</tool_response>", "<|message|>")
TOOLS = (
  Tool(name="look", parameters={"type": "object", "required": ["at"]}),
  Tool(name="wait", description="Waits."),
)

texts = st.lists(
  st.sampled_from([*SPELLED, "a", "é", "🙂", "\n", " ", "<|", "hello"])
  | st.characters(exclude_categories=["Cs"]),
  max_size=8,
).map("".join)
keys = st.sampled_from(["at", "é", *MARKS])
arguments = st.sampled_from(
  ['{"at": "x"}', '{"at":[1]}', '{"<|im_end|>": "<|im_start|>", "at": 0}']
)
calls = st.lists(
  st.builds(
    ToolCall,
    id=st.just("c"),
    name=st.sampled_from(["look", "wait"]),
    arguments=arguments,
  ),
  max_size=2,
)


def message(role, **fields):
  return st.builds(ChatMessage, role=st.just(role), content=texts, **fields)


assistants = message("assistant", reasoning=texts, tool_calls=calls.map(tuple))
others = (
  message("user")
  | message("system")
  | message("developer")
  | message("tool", name=st.just("look"), tool_call_id=st.just("c"))
)
conversations = st.lists(others | assistants, max_size=6)
tool_lists = st.sampled_from([(), TOOLS])


@pytest.fixture(params=["chatml", "qwen", "harmony", "smollm2"])
def tokenizer(request):
  return request.getfixturevalue(request.param)


@pytest.fixture
def chat(tokenizer):
  return format_of(tokenizer)


@pytest.mark.parametrize("name", ["chatml", "qwen", "harmony"])
@settings(deadline=None, max_examples=60)
@given(before=conversations, after=st.lists(others, min_size=1), data=st.data())
def test_a_turn_appended_is_a_turn_rendered(name, request, before, after, data):
  chat = format_of(request.getfixturevalue(name))
  tools = data.draw(tool_lists)
  reply = data.draw(assistants)
  start = chat.render(before, tools)
  whole = chat.render([*before, reply, *after], tools)
  told = chat.render([*before, reply], tools, add_generation_prompt=False)
  assert whole[: len(start)] == start
  # The turn as a model would sample it: up to its end, and cut off before it.
  end = len(told) if name == "harmony" else len(told) - 1
  added = chat.append(told[:end], [*before, reply], after, tools)
  assert told[:end] + added == whole
  cut = told[: end - 1]
  ends = [told[end - 1], *chat.append(told[:end], [reply], after)]
  if name == "harmony" and reply.tool_calls:
    # A call that was cut off is a message that was cut off.
    ends[0] = chat._marks["<|end|>"]
  assert chat.append(cut, [*before, reply], after, tools) == ends


@pytest.mark.parametrize("name", ["chatml", "qwen", "harmony"])
@settings(deadline=None, max_examples=60)
@given(messages=conversations, tools=tool_lists)
def test_no_text_forges_a_mark(name, request, messages, tools):
  """As many marks as the same conversation has with harmless texts."""
  tokenizer = request.getfixturevalue(name)
  chat = format_of(tokenizer)
  marks = set(tokenizer.controls.values())
  plain = [
    dataclasses.replace(
      m,
      content=m.content and "x",
      reasoning=m.reasoning and "x",
      tool_calls=tuple(
        dataclasses.replace(c, arguments='{"at": 1}') for c in m.tool_calls
      ),
    )
    for m in messages
  ]
  got, want = (
    [i for i in chat.render(ms, tools) if i in marks]
    for ms in (messages, plain)
  )
  assert got == want


@settings(deadline=None, max_examples=60)
@given(text=texts, key=texts)
def test_nor_does_one_through_a_template(qwen, text, key):
  chat = format_of(qwen, "template")
  marks = set(qwen.controls.values())

  def count(text, key):
    schema = {"type": "object", "properties": {key: {"description": text}}}
    tool = Tool(name="look", description=text, parameters=schema)
    call = ToolCall(id="c", name="look", arguments='{"<|im_end|>": 1}')
    messages = [
      ChatMessage(role="user", content=text),
      ChatMessage(role="assistant", content="x", tool_calls=(call,)),
      ChatMessage(role="tool", content=text, tool_call_id="c", name="look"),
    ]
    return sum(i in marks for i in chat.render(messages, [tool]))

  assert count(text, key) == count("x", "y")


def pieces(ids, cuts):
  edges = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
  return [ids[a:b] for a, b in itertools.pairwise(edges)]


def streamed(chat, parts, tools):
  parser = chat.parser(tools)
  deltas = [delta for part in parts for delta in parser.feed(part)]
  return [*deltas, *parser.finish()]


PARTS = (
  *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\n\n", "é"),
  *("<|im_end|>", "hello", " the", "🙂", "<", "<|", "</", "tool_call>", "�"),
  *("<|channel|>analysis", "<|channel|>final", "<|message|>", "<|end|>"),
  *("<|start|>assistant", "<|call|>", "<|return|>", " to=functions.look"),
  *("<|channel|>commentary", "<|constrain|>json", '{"at": "é"}', "wait"),
  '{"name": "look", "arguments": {"at": "🙂"}}',
  '{"name": "wait", "arguments": {}}',
)
written = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)
cuts = st.lists(st.integers(0, 200), max_size=6)


@pytest.mark.parametrize("name", ["chatml", "qwen", "harmony"])
@settings(deadline=None, max_examples=60)
@given(text=written, cuts=cuts, tools=tool_lists, special=st.booleans())
def test_a_stream_says_what_the_whole_says(
  name, request, text, cuts, tools, special
):
  tokenizer = request.getfixturevalue(name)
  chat = format_of(tokenizer)
  ids = tokenizer.encode(text, allow_special=special)
  whole = chat.parse(ids, tools)
  for parts in (pieces(ids, cuts), [[i] for i in ids]):
    assert collect(streamed(chat, parts, tools)) == whole


@pytest.mark.parametrize("name", ["chatml", "qwen", "harmony"])
@settings(deadline=None, max_examples=60)
@given(data=st.data(), cuts=cuts, tools=tool_lists)
def test_any_ids_are_read(name, request, data, cuts, tools):
  tokenizer = request.getfixturevalue(name)
  chat = format_of(tokenizer)
  # Also rows of the model that have no token.
  tokens = st.integers(0, tokenizer.vocab_size + 5) | st.integers(0, 20)
  ids = data.draw(st.lists(tokens, max_size=30))
  whole = chat.parse(ids, tools)
  assert collect(streamed(chat, pieces(ids, cuts), tools)) == whole
  assert all(call.name in ("look", "wait") for call in whole.tool_calls)


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_plain_text_is_content_as_it_is(chat_of_bytes, text):
  chat, tokenizer = chat_of_bytes
  deltas = streamed(chat, [[i] for i in tokenizer.encode(text)], ())
  assert collect(deltas).content == text
  assert all(delta.text for delta in deltas)


@pytest.fixture(scope="session")
def chat_of_bytes(qwen):
  return format_of(qwen), qwen


def test_half_a_character_and_half_a_mark_are_never_said(chatml):
  parser = format_of(chatml).parser(TOOLS)
  said = []
  for i in chatml.encode('a🙂 <tool_x <tool_call>{"name": "wait", "arg'):
    said += [delta.text for delta in parser.feed([i])]
  assert said == [
    *("a", "🙂", " "),
    *("<tool_x", " "),
  ]
  rest = chatml.encode('uments": {}}</tool_call>')
  (delta,) = parser.feed(rest)
  call = ToolCall(id="call_0", name="wait", arguments="{}")
  assert delta == Delta(kind="call", call=call)
  assert parser.finish() == []
  assert parser.finish() == []


def test_bytes_that_are_no_text(chatml):
  byte = chatml.encode("é")[1]  # The second of two bytes.
  chat = format_of(chatml)
  assert chat.parse([byte] * 30).content == "\ufffd" * 30
  got = chat.parse([byte, *chatml.encode("hello🙂")])
  assert got.content == "\ufffdhello🙂"
  first = chatml.encode("é")[0]
  assert chat.parse([*chatml.encode("a"), first]).content == "a\ufffd"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(9, 9 + 256 + 8), max_size=60))
def test_any_bytes_read_as_they_do_together(qwen, ids):
  detokenizer = Detokenizer(qwen)
  said = [detokenizer.step(i) for i in ids]
  assert "".join([*said, detokenizer.flush()]) == qwen.decode(ids)


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_texts_of_a_real_tokenizer(smollm2, text):
  detokenizer = Detokenizer(smollm2)
  ids = smollm2.encode(text)
  said = [detokenizer.step(i) for i in ids]
  assert "".join([*said, detokenizer.flush()]) == smollm2.decode(ids)


def test_a_megabyte(harmony):
  text = "hello <|im_end|><|end|> the 🙂\n" * (1 << 15)
  assert len(text.encode()) > 1 << 20
  message = ChatMessage(role="tool", content=text, tool_call_id="c", name="f")
  reply = ChatMessage(role="assistant", content="x")
  added = format_of(harmony).append([5], [reply], [message])
  marks = set(harmony.controls.values())
  assert sum(i in marks for i in added) < 10
  assert harmony.decode(added, skip_special=False).count(text) == 1


def test_half_a_surrogate_pair_is_refused(chat):
  for role in ("system", "user", "assistant", "tool"):
    with pytest.raises(ValueError, match="has no encoding"):
      chat.render([ChatMessage(role=role, content="\ud800", name="look")])


def test_automatic_choice(chatml, qwen, harmony, smollm2, make_tokenizer):
  found = [format_of(t).name for t in (chatml, qwen, harmony, smollm2)]
  assert found == ["chatml", "qwen", "harmony", "chatml"]
  # A template that writes something else comes first.
  for change in (("user", "human"), ("# Tools", "# Functions")):
    template = qwen.chat_template.replace(*change)
    marks = tuple(qwen.controls)
    other = make_tokenizer(marks, ends=(), template=template)
    assert format_of(other).name == "template"
    assert format_of(other, "qwen").name == "qwen"


def test_what_a_template_says_where_nobody_said_anything(make_tokenizer):
  template = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nI am <|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
  )
  tokenizer = make_tokenizer(CHATML, ends=(), template=template)
  chat = format_of(tokenizer)
  assert chat.name == "chatml"
  ids = chat.render([ChatMessage(role="user", content="a")])
  assert tokenizer.decode(ids, skip_special=False) == (
    "<|im_start|>system\nI am <|im_end|>\n"
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
  )


def test_tools_in_the_same_words_as_the_template(qwen):
  template = format_of(qwen, "template")
  messages = [ChatMessage(role="user", content="a")]
  assert format_of(qwen).render(messages, TOOLS) == template.render(
    messages, TOOLS
  )


def test_smollm2_writes_what_its_template_does(smollm2):
  messages = [
    ChatMessage(role="user", content="a\n<|im_end|>"),
    ChatMessage(role="assistant", content="b"),
    ChatMessage(role="user", content="c"),
  ]
  built_in, template = format_of(smollm2), format_of(smollm2, "template")
  assert built_in.name == "chatml"
  assert built_in.stop_ids == template.stop_ids == (2,)
  plain = [dataclasses.replace(messages[0], content="a"), *messages[1:]]
  assert built_in.render(plain) == template.render(plain)
  ids = [*built_in.render(messages[:1]), *smollm2.encode("b"), 2]
  assert built_in.append(ids, messages[:2], messages[2:]) == template.append(
    ids, messages[:2], messages[2:]
  )


def test_what_no_format_fits(chatml, make_tokenizer):
  bare = make_tokenizer(("<s>",), ends=())
  assert FORMATS == ("auto", "chatml", "qwen", "harmony", "template")
  for name, problem in (
    ("auto", "marks of no known family"),
    ("chatml", r"lacks the marks \['<\|im_start\|>', '<\|im_end\|>'\]"),
    ("harmony", "lacks the marks"),
    ("template", "has no template"),
    ("llama", "chat format 'llama', must be one of auto, chatml"),
  ):
    with pytest.raises(ValueError, match=problem):
      format_of(bare, name)
  assert format_of(chatml).parse([]) == Reply()
