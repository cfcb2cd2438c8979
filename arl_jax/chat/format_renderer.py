"""What renderers of published chat formats have in common."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from arl_jax.chat.formats import ChatFormat
from arl_jax.chat.messages import ChatMessage, Tool
from arl_jax.chat.messages import ToolCall as ChatCall
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.renderer import Message, usage_line
from arl_jax.chat.replies import MalformedCall
from arl_jax.types import ToolCall


class FormatRenderer:
  """The part of an `AgentRenderer` that follows from a `ChatFormat`.

  Each tool takes one argument, a text or a list of words, as the only property
  of its JSON schema.
  """

  def __init__(
    self,
    tokenizer: PretrainedTokenizer,
    chat_format: ChatFormat,
    tools: Sequence[Tool],
    system: str,
  ):
    """Takes a tokenizer.

    Args:
      tokenizer: of the model.
      chat_format: that it speaks.
      tools: that the policy may call.
      system: what the policy is told before the question.

    Raises:
      ValueError: a tool has not exactly one argument.
    """
    self.tokenizer = tokenizer
    self._format = chat_format
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

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return self._format.stop_ids

  def block(self, text: str) -> list[int]:
    """One line of an observation."""
    return self.tokenizer.encode(" ".join(text.split()) + "\n")

  def usage(self, used: int, budget: int) -> list[int]:
    return self.block(usage_line(used, budget))

  def prompt(
    self, text: str, tools: Collection[str] | None = None
  ) -> list[int]:
    question = ChatMessage(role="user", content=text)
    return self._format.render(
      [self._system, question],
      self._offered(self._tools if tools is None else tools),
      add_generation_prompt=False,
    )

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

  def _arguments(self, call: ToolCall) -> dict[str, str | list[str]]:
    """Of a call, as its schema has them."""
    name = self._argument[call.name]
    kind = self._tools[call.name].parameters["properties"][name]["type"]
    return {name: call.argument.split() if kind == "array" else call.argument}

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
