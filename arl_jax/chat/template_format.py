"""The format that a checkpoint's own template writes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from arl_jax.chat import harmony
from arl_jax.chat.hermes import HermesParser
from arl_jax.chat.messages import ChatMessage, Tool, message_json, tool_json
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.stream import ReplyReader, StreamParser

# Stand-ins for what an assistant said, that any filter leaves as they are.
_REASONING, _CONTENT, _ARGUMENT = "arlReasoning7x", "arlContent7x", "arlValue7x"
_OPEN_THOUGHTS = re.compile(r"<think>\s*\Z")


class NoAppend(Exception):
  """The template would write the past anew: begin a new segment."""


class TemplateFormat(ReplyReader):
  """Renders with the template, parses by the marks that are there.

  A turn is appended where the template leaves what came before as it is.
  Where it drops reasoning, say, there is nothing to append, and that is said.
  """

  name = "template"

  def __init__(self, tokenizer: PretrainedTokenizer):
    """Raises ValueError if there is no template, or it is none."""
    if tokenizer.chat_template is None:
      raise ValueError("chat format template: the tokenizer has no template")
    self._tokenizer = tokenizer
    source = tokenizer.chat_template
    self._developer = "developer" in source
    # To other templates, thoughts are a part of the content.
    self._thoughts = "think" in source or "reasoning" in source
    self._harmony = harmony.CHANNEL in source and all(
      mark in tokenizer.controls for mark in harmony.MARKS
    )
    names = sorted(tokenizer.controls, key=len, reverse=True)
    self._mark = re.compile("|".join(map(re.escape, names)) or r"(?!)")
    controls = tokenizer.controls
    if self._harmony:
      # One reply is several messages: the end of one doesn't end the turn.
      family = (harmony.RETURN, harmony.CALL)
      stops = [*(controls[mark] for mark in family), *tokenizer.eos_ids]
      self._family = {*family, harmony.END}
    else:
      stops = [*tokenizer.eos_ids, *self._turn_end()]
      self._family = set[str]()
    self.stop_ids = tuple(dict.fromkeys(stops))
    # What may stand at the end of a turn.
    stopping = {name for name, i in controls.items() if i in stops}
    self._ends = stopping | self._family

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
      ValueError: the template fails on it, or a text has no encoding.
    """
    text = self._write(
      messages, tools, effort, add_generation_prompt=add_generation_prompt
    )
    return self._tokenizer.encode_guarded(text)

  def append(
    self,
    ids: Sequence[int],
    history: Sequence[ChatMessage],
    new: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    effort: str | None = None,
  ) -> list[int]:
    """Ids to add to `ids`, which end with a sampled turn, whole or cut off.

    Args:
      ids: all so far.
      history: what they say; the sampled reply is last.
      new: messages to add.
      tools: as they were.
      effort: as it was.

    Raises:
      NoAppend: the template, with `new`, writes something before them anew.
      ValueError: as `render`.
    """
    before, reply = history[:-1], history[-1]
    base = self._write(before, tools, effort, add_generation_prompt=False)
    opened = self._write(before, tools, effort)
    stand_in, spelled = _stand_in(reply)
    whole = self._write([*before, stand_in, *new], tools, effort)
    if not opened.startswith(base) or not whole.startswith(opened):
      raise NoAppend("the template writes earlier turns anew")
    at = len(opened)
    for what, text in spelled:
      found = whole.find(text, at)
      if found < 0:
        raise NoAppend(f"the template drops the {what} of the turn")
      at = found + len(text)
    marks = self._mark.finditer(whole, at)
    end = next((m for m in marks if m[0] in self._ends), None)
    if end is None:
      raise NoAppend("the template writes no end after the turn")
    added = self._tokenizer.encode_guarded(whole[end.start() :])
    return added[1:] if self._ended(ids, end[0]) else added

  def parser(
    self,
    tools: Sequence[Tool] = (),
    *,
    call_prefix: str = "call_",
    effort: str | None = None,
  ) -> StreamParser:
    """A parser of one reply that is yet to be sampled."""
    if self._harmony:
      return harmony.HarmonyParser(
        self._tokenizer, tools=tools, call_prefix=call_prefix
      )
    return HermesParser(
      self._tokenizer,
      ends=self.stop_ids,
      tools=tools,
      call_prefix=call_prefix,
      thoughts=self._thoughts,
      thinking=self._thoughts and self._opens_thoughts(effort),
    )

  def _write(
    self,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    effort: str | None,
    *,
    add_generation_prompt: bool = True,
  ) -> str:
    variables: dict[str, Any] = {}
    if effort is not None:
      variables = {
        "enable_thinking": effort != "none",
        "reasoning_effort": effort,
      }
    return self._tokenizer.render_guarded(
      [self._values(message) for message in messages],
      tools=[tool_json(tool) for tool in tools] or None,
      add_generation_prompt=add_generation_prompt,
      variables=variables,
    )

  def _values(self, message: ChatMessage) -> dict[str, Any]:
    """The message as templates read it: arguments are objects."""
    values = message_json(message)
    values["content"] = message.content
    if message.role == "developer" and not self._developer:
      values["role"] = "system"
    if message.role == "tool":
      values["name"] = message.name
    if message.reasoning:
      values["thinking"] = message.reasoning
    for call in values.get("tool_calls", ()):
      function = call["function"]
      function["arguments"] = json.loads(function["arguments"])
    return values

  def _turn_end(self) -> list[int]:
    """The mark right behind what an assistant says."""
    said = ChatMessage(role="assistant", content=_CONTENT)
    asked = ChatMessage(role="user", content="?")
    try:
      text = self._write([asked, said, asked], (), None)
    except ValueError:
      return []  # A conversation may be what it can write, or not.
    _, _, after = text.partition(_CONTENT)
    found = self._mark.match(after.lstrip())
    return [self._tokenizer.controls[found[0]]] if found else []

  def _opens_thoughts(self, effort: str | None) -> bool:
    asked = [ChatMessage(role="user", content="?")]
    try:
      text = self._write(asked, (), effort)
    except ValueError:
      return False
    return bool(_OPEN_THOUGHTS.search(text))

  def _ended(self, ids: Sequence[int], mark: str) -> bool:
    """Whether a sample has what the template writes as `mark`."""
    same = self._family if mark in self._family else {mark}
    return any(ids[-1:] == [self._tokenizer.controls[m]] for m in same)


def _stand_in(
  reply: ChatMessage,
) -> tuple[ChatMessage, list[tuple[str, str]]]:
  """A turn of the same shape, and its texts in the order of a template."""
  spelled = []
  reasoning = content = ""
  if reply.reasoning:
    reasoning = _REASONING
    spelled.append(("reasoning", reasoning))
  if reply.content or not reply.tool_calls:
    content = _CONTENT
    spelled.append(("content", content))
  calls = []
  for i, call in enumerate(reply.tool_calls):
    value = f"{_ARGUMENT}{i}x"
    spelled.append(("arguments", value))
    arguments = json.dumps({"value": value})
    calls.append(type(call)(id=call.id, name=call.name, arguments=arguments))
  turn = ChatMessage(
    role="assistant",
    content=content,
    reasoning=reasoning,
    tool_calls=tuple(calls),
  )
  return turn, spelled
