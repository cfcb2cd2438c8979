"""ChatML, with thoughts and calls between tags: SmolLM2, Qwen and others.

  <|im_start|>system ... <|im_end|>
  <|im_start|>user ... <|im_end|>
  <|im_start|>assistant
  <think> ... </think> text <tool_call> {"name": ..., "arguments": {...}}
  </tool_call><|im_end|>                                 sampled
  <|im_start|>user <tool_response> ... </tool_response><|im_end|>

Some vocabularies have tokens for the tags, and then nothing else is a tag; in
others they are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from arl_jax.chat.messages import ChatMessage, Tool, tool_json
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.replies import CallChecker, malformed
from arl_jax.chat.stream import ReplyReader, StreamParser

START, END = "<|im_start|>", "<|im_end|>"
_THINK, _THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
_RESPONSE, _RESPONDED = "<tool_response>", "</tool_response>"
# The words that these models were trained with; others are another prompt.
_TOOLS_BEFORE = (
  "# Tools\n\nYou may call one or more functions to assist with the user query."
  "\n\nYou are provided with function signatures within <tools></tools> XML"
  " tags:\n<tools>\n"
)
_TOOLS_AFTER = (
  "\n</tools>\n\nFor each function call, return a json object with function"
  " name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
  '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

# Text that is encoded as it is, and ids of marks.
_Part = str | int


class HermesFormat(ReplyReader):
  """Renders and parses for one tokenizer.

  Reasoning that messages carry is kept, so that turns always append; published
  templates drop it once the user speaks again.
  """

  def __init__(
    self,
    tokenizer: PretrainedTokenizer,
    *,
    name: str,
    default_system: str = "",
    thinks: bool = False,
  ):
    """Takes a tokenizer.

    Args:
      tokenizer: one with the marks of ChatML.
      name: of the format.
      default_system: the system's text where a conversation has none.
      thinks: the model thinks unless its thoughts are closed at once.

    Raises:
      ValueError: it hasn't these marks.
    """
    missing = [m for m in (START, END) if m not in tokenizer.controls]
    if missing:
      raise ValueError(
        f"chat format {name}: the tokenizer lacks the marks {missing}"
      )
    self.name = name
    self._tokenizer = tokenizer
    self._default_system = default_system
    self._thinks = thinks
    self._start = tokenizer.controls[START]
    self._end = tokenizer.controls[END]
    self.stop_ids = tuple(dict.fromkeys((self._end, *tokenizer.eos_ids)))

  def render(
    self,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
    effort: str | None = None,
  ) -> list[int]:
    """Ids of a conversation.

    Raises:
      ValueError: a text has no encoding.
    """
    messages, system = list(messages), self._default_system
    if messages and messages[0].role in ("system", "developer"):
      system = messages.pop(0).content
      parts = self._system(system, tools)
    else:
      parts = self._system(system, tools) if system or tools else []
    parts += self._turns(messages)
    if add_generation_prompt:
      parts += self._open(effort)
    return self._encode(parts)

  def append(
    self,
    ids: Sequence[int],
    history: Sequence[ChatMessage],
    new: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    effort: str | None = None,
  ) -> list[int]:
    """Ids to add to `ids`, which end with a sampled turn, whole or cut off."""
    del history, tools  # What they say is in `ids`.
    parts: list[_Part] = [] if ids[-1:] == [self._end] else [self._end]
    parts += ["\n", *self._turns(new), *self._open(effort)]
    return self._encode(parts)

  def parser(
    self,
    tools: Sequence[Tool] = (),
    *,
    call_prefix: str = "call_",
    effort: str | None = None,
  ) -> StreamParser:
    """A parser of one reply that is yet to be sampled."""
    del effort  # If thoughts are closed at once, none begins either.
    return HermesParser(
      self._tokenizer,
      ends=self.stop_ids,
      tools=tools,
      call_prefix=call_prefix,
    )

  def _system(self, text: str, tools: Sequence[Tool]) -> list[_Part]:
    parts: list[_Part] = [text]
    if tools:
      signatures = [
        json.dumps(tool_json(tool), ensure_ascii=False) for tool in tools
      ]
      parts += ["\n\n"] if text else []
      parts += [_TOOLS_BEFORE, "\n".join(signatures)]
      # These instructions spell tags, and mean them.
      spelled = re.split(f"({CALL}|{CALLED})", _TOOLS_AFTER)
      parts += [self._tag(p) if i % 2 else p for i, p in enumerate(spelled)]
    return self._turn("system", parts)

  def _turns(self, messages: Sequence[ChatMessage]) -> list[_Part]:
    parts: list[_Part] = []
    for i, message in enumerate(messages):
      if message.role == "assistant":
        parts += self._turn("assistant", self._assistant(message))
      elif message.role != "tool":
        role = "user" if message.role == "user" else "system"
        parts += self._turn(role, [message.content])
      elif i == 0 or messages[i - 1].role != "tool":
        last = i
        while last < len(messages) and messages[last].role == "tool":
          last += 1
        parts += self._turn("user", self._responses(messages[i:last]))
    return parts

  def _responses(self, messages: Sequence[ChatMessage]) -> list[_Part]:
    parts: list[_Part] = []
    for message in messages:
      parts += ["\n"] if parts else []
      parts += [self._tag(_RESPONSE), f"\n{message.content}\n"]
      parts.append(self._tag(_RESPONDED))
    return parts

  def _assistant(self, message: ChatMessage) -> list[_Part]:
    parts: list[_Part] = []
    if message.reasoning:
      parts += [self._tag(_THINK), f"\n{message.reasoning}\n"]
      parts += [self._tag(_THOUGHT), "\n\n"]
    parts.append(message.content)
    for i, call in enumerate(message.tool_calls):
      parts += ["\n"] if i or message.content else []
      # The name has no sign that JSON would escape.
      text = f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'
      parts += [self._tag(CALL), text, self._tag(CALLED)]
    return parts

  def _turn(self, role: str, parts: Sequence[_Part]) -> list[_Part]:
    return [self._start, f"{role}\n", *parts, self._end, "\n"]

  def _open(self, effort: str | None) -> list[_Part]:
    parts: list[_Part] = [self._start, "assistant\n"]
    if effort == "none" and self._thinks:
      parts += [self._tag(_THINK), "\n\n", self._tag(_THOUGHT), "\n\n"]
    return parts

  def _tag(self, name: str) -> _Part:
    return self._tokenizer.controls.get(name, name)

  def _encode(self, parts: Sequence[_Part]) -> list[int]:
    """Text between two marks is encoded as a whole, as it is elsewhere."""
    ids: list[int] = []
    texts: list[str] = []
    for part in [*parts, None]:
      if isinstance(part, str):
        texts.append(part)
        continue
      text, texts = "".join(texts), []
      if text:
        ids += self._tokenizer.encode(text)
      if part is not None:
        ids.append(part)
    return ids


class HermesParser(StreamParser):
  """Reads <think> at the start, <tool_call> where tools are offered."""

  def __init__(
    self,
    tokenizer: PretrainedTokenizer,
    *,
    ends: Sequence[int],
    tools: Sequence[Tool],
    call_prefix: str,
    thoughts: bool = True,
    thinking: bool = False,
  ):
    """Begins a reply.

    Args:
      tokenizer: of the model.
      ends: ids after which nothing is read.
      tools: that can be called.
      call_prefix: calls are named by it and a number.
      thoughts: they are told apart from content.
      thinking: the prompt has opened them.
    """
    tags = [
      *((_THINK, _THOUGHT) if thoughts else ()),
      *((CALL, CALLED) if tools else ()),
    ]
    checker = CallChecker(tools, call_prefix)
    super().__init__(tokenizer, tags=tags, ends=ends, checker=checker)
    self._tools = bool(tools)
    self._thoughts, self._thinking = thoughts, thinking
    self._in_call = self._spoilt = False
    self._call: list[str] = []  # Text of the call that is open.
    self._fresh = True  # Nothing but newlines yet, of this piece of text.
    self._trim = thinking  # Newlines before this piece mean nothing.
    self._newlines = ""  # May belong to the tag that follows.
    self._written = False  # There is content.
    self._called = False

  def _on_text(self, text: str) -> None:
    if self._in_call:
      self._call.append(text)
      return
    if self._fresh and self._trim:
      text = text.lstrip("\n")
    body = text.rstrip("\n")
    if body:
      self._write(self._newlines + body)
      self._newlines = ""
    self._newlines += text[len(body) :]

  def _write(self, text: str) -> None:
    if self._thinking:
      self._say("reasoning", text)
    else:
      # Texts on both sides of a call.
      again = self._fresh and self._written
      self._say("content", "\n" + text if again else text)
      self._written = True
    self._fresh = False

  def _on_mark(self, name: str, text: str) -> None:
    if self._in_call:
      self._on_mark_in_call(name)
    elif self._thinking:
      if name == _THOUGHT:
        self._thinking = False
        self._begin_piece()
      elif text:
        self._on_text(text)
    elif name == _THINK and self._thoughts and self._at_start():
      self._thinking = True
      self._begin_piece()
    elif name == CALL and self._tools:
      # The newline before the tag is the format's.
      if not self._fresh and len(self._newlines) > 1:
        self._write(self._newlines[:-1])
      self._in_call = self._called = True
    elif name == CALLED and self._tools:
      self._called = True
      self._out.append(malformed(CALLED, "the end of a call without its start"))
    elif text:
      self._on_text(text)

  def _at_start(self) -> bool:
    return self._fresh and not (self._trim or self._called)

  def _on_mark_in_call(self, name: str) -> None:
    if name == CALLED:
      self._close("")
    elif name == CALL:
      self._close("another call begins in it")
      self._in_call = True
    else:
      self._call.append(name)
      self._spoilt = True

  def _close(self, problem: str) -> None:
    text = "".join(self._call)
    if self._spoilt:
      problem = "a mark inside a call"
    self._out.append(
      malformed(text, problem) if problem else self._checker.whole(text)
    )
    self._in_call, self._spoilt, self._call = False, False, []
    self._begin_piece()

  def _begin_piece(self) -> None:
    self._fresh, self._trim, self._newlines = True, True, ""

  def _on_end(self) -> None:
    if self._in_call:
      self._close("cut off before its end")
    elif self._newlines and not (self._fresh and self._trim):
      self._write(self._newlines)
