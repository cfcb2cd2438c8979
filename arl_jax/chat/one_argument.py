"""Tools that take one argument: a text or a list of words."""

from __future__ import annotations

import json
from collections.abc import Sequence

from arl_jax.chat.messages import Tool
from arl_jax.chat.messages import ToolCall as ChatCall
from arl_jax.chat.replies import MalformedCall
from arl_jax.types import ToolCall


class OneArgument:
  """Calls with a text, as environments have them, and with JSON.

  Attributes:
    tools: by their names.
  """

  def __init__(self, tools: Sequence[Tool]):
    """Takes tools whose JSON schemas have one property each.

    Raises:
      ValueError: a tool has not exactly one argument.
    """
    self.tools = {tool.name: tool for tool in tools}
    self._argument: dict[str, str] = {}
    for tool in tools:
      properties = list(tool.parameters.get("properties", ()))
      if len(properties) != 1:
        raise ValueError(
          f"tool {tool.name} has the arguments {properties}; there must be one"
        )
      (self._argument[tool.name],) = properties

  def arguments(self, call: ToolCall) -> dict[str, str | list[str]]:
    """Of a call, as its schema has them."""
    name = self._argument[call.name]
    kind = self.tools[call.name].parameters["properties"][name]["type"]
    return {name: call.argument.split() if kind == "array" else call.argument}

  def call(self, call: ChatCall) -> ToolCall | MalformedCall:
    """Of a known tool, with the text that its JSON holds."""
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
