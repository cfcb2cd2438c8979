"""The program that docs/chat.md shows."""

import pathlib
import re

import pytest

from arl_jax.chat.messages import ChatMessage

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "chat.md").read_text("utf-8")
REQUEST = {
  "messages": [{"role": "user", "content": "hello"}],
  "tools": [{"type": "function", "function": {"name": "look"}}],
}


@pytest.mark.parametrize("name", ["chatml", "qwen", "harmony"])
def test_the_program_shown(name, request):
  tokenizer = request.getfixturevalue(name)
  said = {
    "harmony": "<|channel|>commentary to=functions.look<|message|>{}<|call|>"
  }.get(name, '<tool_call>{"name": "look", "arguments": {}}</tool_call>')

  def answers(reply):
    (call,) = reply.tool_calls
    answer = ChatMessage(
      role="tool", content="red", name=call.name, tool_call_id=call.id
    )
    return [answer]

  names = {
    "tokenizer": tokenizer,
    "request": REQUEST,
    "sample": lambda ids, stop_ids: tokenizer.encode(said, allow_special=True),
    "answers": answers,
  }
  (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
  exec(code, names)
  text = tokenizer.decode(names["ids"], skip_special=False)
  assert text.count(said) == 1
  assert text.index(said) < text.index("red")
