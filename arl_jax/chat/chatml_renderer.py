"""What `Renderer` does, in the chat format of a published model.

  <|im_start|>system ... tools ... <|im_end|>
  <|im_start|>user question <|im_end|>
  <|im_start|>assistant
  <tool_call> {"name": ..., "arguments": {...}} </tool_call><|im_end|>  sampled
  <|im_start|>user <tool_response> results, a block a line
  [Token usage: 214/448] </tool_response><|im_end|>
  <|im_start|>assistant ...

All calls of a turn are answered in one response, whose blocks come and go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from arl_jax.chat.formats import format_of
from arl_jax.chat.hermes import CALL, CALLED, END, START
from arl_jax.chat.messages import ChatMessage, Tool
from arl_jax.chat.messages import ToolCall as ChatCall
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.renderer import Message, usage_line
from arl_jax.chat.replies import MalformedCall
from arl_jax.types import ToolCall

_RESPONSE, _RESPONDED = "<tool_response>", "</tool_response>"
_ANSWERED = re.compile(f"{_RESPONSE}\n(.*?)\n{_RESPONDED}", re.DOTALL)


class ChatMLRenderer:
  """Renders and parses with the tokenizer of a ChatML model.

  Each tool takes one argument, a text or a list of words, as the only property
  of its JSON schema.
  """

  def __init__(
    self, tokenizer: PretrainedTokenizer, tools: Sequence[Tool], system: str
  ):
    """Takes a tokenizer.

    Args:
      tokenizer: one with the marks of ChatML.
      tools: that the policy may call.
      system: what the policy is told before the question.

    Raises:
      ValueError: the tokenizer lacks these marks, or a tool has not exactly one
        argument.
    """
    self.tokenizer = tokenizer
    self._format = format_of(tokenizer, "qwen")
    self._tools = {tool.name: tool for tool in tools}
    self._argument: dict[str, str] = {}
    for tool in tools:
      properties = list(tool.parameters.get("properties", ()))
      if len(properties) != 1:
        raise ValueError(
          f"tool {tool.name} has the arguments {properties}; there must be one"
        )
      (self._argument[tool.name],) = properties
    self._system = ChatMessage(role="system", content=system)
    self._start = tokenizer.controls[START]
    self.end = tokenizer.controls[END]

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return self._format.stop_ids

  def text(self, text: str) -> list[int]:
    """Of a message."""
    return self.tokenizer.encode(text)

  def block(self, text: str) -> list[int]:
    """One line of an observation."""
    return self.tokenizer.encode(" ".join(text.split()) + "\n")

  def prompt(
    self, text: str, tools: Collection[str] | None = None
  ) -> list[int]:
    question = ChatMessage(role="user", content=text)
    return self._format.render(
      [self._system, question],
      self._offered(self._tools if tools is None else tools),
      add_generation_prompt=False,
    )

  def open_turn(self) -> list[int]:
    """What stands before everything the policy samples."""
    return [self._start, *self.tokenizer.encode("assistant\n")]

  def open_tool(self) -> list[int]:
    """Follows the end mark of the policy's message."""
    encode = self.tokenizer.encode
    return [
      *encode("\n"),
      self._start,
      *self._tagged(f"user\n{_RESPONSE}\n"),
    ]

  def close(self) -> list[int]:
    """Ends a message of the policy that was cut off."""
    return [self.end]

  def close_tool(self) -> list[int]:
    return [
      *self._tagged(f"{_RESPONDED}"),
      self.end,
      *self.tokenizer.encode("\n"),
    ]

  def usage(self, used: int, budget: int) -> list[int]:
    return self.block(usage_line(used, budget))

  def calls(self, calls: Sequence[ToolCall]) -> list[int]:
    """A turn's calls as a policy would sample them, without the end mark."""
    return self._tagged("\n".join(self._written(call) for call in calls))

  def _written(self, call: ToolCall) -> str:
    name = self._argument[call.name]
    kind = self._tools[call.name].parameters["properties"][name]["type"]
    value = call.argument.split() if kind == "array" else call.argument
    body = json.dumps(
      {"name": call.name, "arguments": {name: value}}, ensure_ascii=False
    )
    return f"{CALL}\n{body}\n{CALLED}"

  def parse(self, ids: Sequence[int], tools: Collection[str]) -> Message:
    """Parses sampled ids; the end mark may be there or not.

    Text and thoughts beside calls are the policy's own affair.
    """
    reply = self._format.parse([int(i) for i in ids], self._offered(tools))
    if not (reply.tool_calls or reply.malformed):
      return Message(final=reply.content.strip())
    calls: list[ToolCall | MalformedCall] = list(reply.malformed)
    calls += [self._call(call) for call in reply.tool_calls]
    return Message(calls=tuple(calls))

  def _offered(self, names: Collection[str]) -> list[Tool]:
    return [tool for name, tool in self._tools.items() if name in names]

  def _call(self, call: ChatCall) -> ToolCall | MalformedCall:
    arguments = json.loads(call.arguments)
    name = self._argument[call.name]
    value = arguments.get(name)
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
      value = " ".join(value)
    if set(arguments) != {name} or not isinstance(value, str):
      return MalformedCall(
        text=call.arguments, problem=f"{call.name} takes {name} alone"
      )
    if not value.strip():
      return MalformedCall(text=call.arguments, problem="no argument")
    return ToolCall(name=call.name, argument=value.strip())

  def observed(self, ids: Sequence[int]) -> list[str]:
    """Texts of the tools' answers in a context."""
    text = self.tokenizer.decode(ids, skip_special=False)
    return _ANSWERED.findall(text)

  def _tagged(self, text: str) -> list[int]:
    """Tags are tokens where the vocabulary has them, and nothing else is."""
    controls = self.tokenizer.controls
    tags = (CALL, CALLED, _RESPONSE, _RESPONDED)
    known = [tag for tag in tags if tag in controls]
    if not known:
      return self.tokenizer.encode(text)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, known))})", text):
      if part in known:
        ids.append(controls[part])
      elif part:
        ids += self.tokenizer.encode(part)
    return ids
