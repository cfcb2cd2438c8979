"""A checkpoint's own template: appended to where it allows that."""

import pytest

from arl_jax.chat.formats import format_of
from arl_jax.chat.messages import ChatMessage, ToolCall
from arl_jax.chat.replies import Reply
from arl_jax.chat.template_format import NoAppend, TemplateFormat

USER = ChatMessage(role="user", content="hello")
CALL = ToolCall(id="c", name="look", arguments='{"at": "x"}')
SEEN = ChatMessage(role="tool", content="red", tool_call_id="c", name="look")


def said(content="So.", reasoning="", *calls):
  return ChatMessage(
    role="assistant", content=content, reasoning=reasoning, tool_calls=calls
  )


@pytest.fixture
def chat(qwen):
  return format_of(qwen, "template")


def test_it_renders_and_appends_what_the_built_in_format_does(
  qwen, chat, tools
):
  built_in = format_of(qwen, "qwen")
  history = [USER, said(), USER, said("", "", CALL)]
  for end in ([], [qwen.controls["<|im_end|>"]], [qwen.controls["<think>"]]):
    for new in ([SEEN], [SEEN, SEEN, USER], [USER]):
      for effort in (None, "high"):
        prompt = chat.render(history[:-1], tools, effort=effort)
        assert prompt == built_in.render(history[:-1], tools, effort=effort)
        ids = [*prompt, *qwen.encode("x"), *end]
        assert chat.append(
          ids, history, new, tools, effort=effort
        ) == built_in.append(ids, history, new, tools, effort=effort)


def test_reasoning_that_stays_and_that_is_dropped(qwen, chat, tools):
  history = [USER, said("So.", "Hm.", CALL)]
  ids = [*chat.render([USER], tools), *qwen.encode("x")]
  # Thoughts stay until the user speaks.
  added = chat.append(ids, history, [SEEN], tools)
  assert qwen.decode(added, skip_special=False) == (
    "<|im_end|>\n<|im_start|>user\n<tool_response>\nred\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\n"
  )
  with pytest.raises(NoAppend, match="drops the reasoning of the turn"):
    chat.append(ids, history, [SEEN, USER], tools)
  later = [*history, SEEN, said("Red.")]
  with pytest.raises(NoAppend, match="earlier turns anew"):
    chat.append(ids, later, [USER], tools)
  assert chat.append(ids, later, [SEEN], tools)


def test_thoughts_that_the_prompt_closed_are_gone_later(chat):
  ids = chat.render([USER], effort="none")
  with pytest.raises(NoAppend, match="anew"):
    chat.append(ids, [USER, said()], [USER], effort="none")


FLAT = (
  "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content | trim }}"
  "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}"
  "{{ '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def flat(make_tokenizer, template=FLAT, ends=()):
  tokenizer = make_tokenizer(MARKS, ends=ends, template=template)
  return tokenizer, format_of(tokenizer, "template")


def test_the_end_of_a_turn_is_the_templates(make_tokenizer):
  tokenizer, chat = flat(make_tokenizer)
  assert chat.stop_ids == (tokenizer.controls["<|endoftext|>"],)
  ids = chat.render([USER])
  for sampled, text in (
    ("a", "<|endoftext|>\n<|im_start|>user: b\n<|im_start|>assistant: "),
    ("a<|endoftext|>", "\n<|im_start|>user: b\n<|im_start|>assistant: "),
  ):
    got = chat.append(
      [*ids, *tokenizer.encode(sampled, allow_special=True)],
      [USER, said("a")],
      [ChatMessage(role="user", content=" b ")],
    )
    assert got == tokenizer.encode(text, allow_special=True)


def test_content_that_is_dropped_or_has_no_end(make_tokenizer):
  ids = [5]
  _, chat = flat(make_tokenizer, FLAT.replace("<|endoftext|>", ""))
  # Without a mark of its own, the next turn's ends this one.
  assert chat.stop_ids == (1,)
  _, chat = flat(make_tokenizer, FLAT.replace("<|", "("))
  assert chat.stop_ids == ()
  with pytest.raises(NoAppend, match="no end after the turn"):
    chat.append(ids, [USER, said()], [USER])
  template = FLAT.replace(
    "m.content", "(m.content if m.role == 'user' else '-')"
  )
  _, chat = flat(make_tokenizer, template)
  with pytest.raises(NoAppend, match="drops the content"):
    chat.append(ids, [USER, said()], [USER])
  _, chat = flat(make_tokenizer, "{{ messages | length }}" + FLAT)
  with pytest.raises(NoAppend, match="anew"):
    chat.append(ids, [USER, said()], [USER])


def test_calls_that_a_template_does_not_know(make_tokenizer):
  _, chat = flat(make_tokenizer)
  with pytest.raises(NoAppend, match="drops the arguments"):
    chat.append([5], [USER, said("a", "", CALL)], [SEEN])


def test_thoughts_are_content_where_the_template_has_none(make_tokenizer):
  tokenizer, chat = flat(make_tokenizer)
  ids = tokenizer.encode("<think>a</think>b")
  assert chat.parse(ids) == Reply(content="<think>a</think>b")


def test_thoughts_that_the_prompt_opens(make_tokenizer):
  template = (
    FLAT.removesuffix("{% endif %}")
    + "{% if enable_thinking is not false %}<think>\n{% endif %}{% endif %}"
  )
  tokenizer, chat = flat(make_tokenizer, template)
  ids = tokenizer.encode("\na\n</think>\n\nb")
  assert chat.parse(ids) == Reply(reasoning="a", content="b")
  assert chat.parse(ids, effort="high") == Reply(reasoning="a", content="b")
  assert chat.parse(ids, effort="none").reasoning == ""


def test_a_template_of_harmony(make_tokenizer):
  marks = (
    *("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"),
    *("<|end|>", "<|message|>", "<|call|>"),
  )
  template = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
  )
  tokenizer = make_tokenizer(marks, ends=("<|return|>",), template=template)
  chat = TemplateFormat(tokenizer)
  assert {tokenizer.piece(i) for i in chat.stop_ids} == {
    "<|return|>",
    "<|call|>",
  }
  final = "<|channel|>final<|message|>a"
  for end, forced in (("<|return|>", ""), ("<|end|>", ""), ("", "<|end|>")):
    ids = tokenizer.encode(final + end, allow_special=True)
    assert chat.parse(ids) == Reply(content="a")
    added = chat.append(ids, [USER, said("a")], [USER])
    assert tokenizer.decode(added, skip_special=False) == (
      forced + "<|start|>user<|message|>hello<|end|><|start|>assistant"
    )


def test_the_name_of_the_developer(make_tokenizer):
  tokenizer, chat = flat(make_tokenizer)
  asked = [ChatMessage(role="developer", content="a")]
  text = tokenizer.decode(chat.render(asked), skip_special=False)
  assert text.startswith("<|im_start|>system: a")
  _, chat = flat(make_tokenizer, FLAT + "{# developer #}")
  assert "developer: a" in tokenizer.decode(chat.render(asked))


def test_templates_at_fault(make_tokenizer):
  tokenizer = make_tokenizer(MARKS, ends=())
  with pytest.raises(ValueError, match="has no template"):
    format_of(tokenizer, "template")
  _, chat = flat(make_tokenizer, "{{ raise_exception('no tools') }}")
  assert chat.stop_ids == ()
  assert chat.parse([5]) == Reply(content="#")
  with pytest.raises(ValueError, match="no tools"):
    chat.render([USER])
  with pytest.raises(ValueError, match="no tools"):
    chat.append([5], [USER, said()], [USER])
