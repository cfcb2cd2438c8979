"""What a model replied: text, reasoning, and calls that were checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from arl_jax.chat.messages import ChatMessage, Tool, ToolCall
from arl_jax.chat.strict_json import parse_object


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MalformedCall:
  """A call that can't be executed, and why."""

  text: str
  problem: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
  """A piece of a reply while it is sampled.

  Attributes:
    kind: content and reasoning come in many pieces; a call, checked or
      malformed, in one.
    text: what is added, or what the malformed call reads.
    call: of a kind "call".
    problem: of a kind "malformed".
  """

  kind: Literal["content", "reasoning", "call", "malformed"]
  text: str = ""
  call: ToolCall | None = None
  problem: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
  """A whole reply. What a malformed call reads isn't part of its content."""

  content: str = ""
  reasoning: str = ""
  tool_calls: tuple[ToolCall, ...] = ()
  malformed: tuple[MalformedCall, ...] = ()

  def message(self) -> ChatMessage:
    """As a message of the history."""
    return ChatMessage(
      role="assistant",
      content=self.content,
      reasoning=self.reasoning,
      tool_calls=self.tool_calls,
    )


def collect(deltas: Iterable[Delta]) -> Reply:
  """The reply that these pieces are."""
  deltas = list(deltas)
  return Reply(
    content="".join(d.text for d in deltas if d.kind == "content"),
    reasoning="".join(d.text for d in deltas if d.kind == "reasoning"),
    tool_calls=tuple(d.call for d in deltas if d.call),
    malformed=tuple(
      MalformedCall(text=d.text, problem=d.problem)
      for d in deltas
      if d.kind == "malformed"
    ),
  )


class CallChecker:
  """Makes calls of texts, or says why there is none; numbers them."""

  def __init__(self, tools: Sequence[Tool], prefix: str):
    self._tools = {tool.name: tool for tool in tools}
    self._prefix, self._count = prefix, 0

  def named(self, name: str, arguments: str) -> Delta:
    """A call whose name stands apart from its arguments."""
    try:
      value, _ = parse_object(arguments)
      return self._call(name, value, arguments.strip())
    except ValueError as error:
      return malformed(f"{name} {arguments}", str(error))

  def whole(self, text: str) -> Delta:
    """A call as an object with exactly name and arguments."""
    try:
      call, spelled = parse_object(text)
      if call.keys() != {"name", "arguments"}:
        raise ValueError("a call must have exactly name and arguments")
      if not isinstance(call["name"], str):
        raise ValueError("the name must be a string")
      if not isinstance(call["arguments"], dict):
        raise ValueError("the arguments must be an object")
      return self._call(call["name"], call["arguments"], spelled["arguments"])
    except ValueError as error:
      return malformed(text, str(error))

  def _call(self, name: str, value: Mapping[str, Any], text: str) -> Delta:
    if name not in self._tools:
      raise ValueError("no such tool")
    schema = self._tools[name].parameters
    for field in schema.get("required", ()):
      if field not in value:
        raise ValueError(f"the argument {field!r:.80} is missing")
    if schema.get("additionalProperties") is False:
      for field in value:
        if field not in schema.get("properties", {}):
          raise ValueError(f"no such argument: {field!r:.80}")
    call_id = f"{self._prefix}{self._count}"
    self._count += 1
    call = ToolCall(id=call_id, name=name, arguments=text)
    return Delta(kind="call", call=call)


def malformed(text: str, problem: str) -> Delta:
  return Delta(kind="malformed", text=text, problem=problem)
