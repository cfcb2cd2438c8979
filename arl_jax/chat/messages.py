"""Conversations and tools as OpenAI's API has them, strictly parsed.

What a client sends is JSON that a stranger wrote: each field is of the type it
must be, or a ValueError names the path to it, such as `messages[2].content`.
A field that nobody here reads is refused rather than left out in silence.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from arl_jax.chat.strict_json import check_text, measure, parse_object

_MAX_MESSAGES = 8192
_MAX_CHARS = 1 << 23  # Of all texts of a conversation.
_MAX_PARTS = 1024
_MAX_CALLS = 128
_MAX_NAME = 256
_MAX_TOOLS = 256
_MAX_TOOL = 1 << 17  # Characters of one tool.
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {
  "assistant": {"tool_calls", "reasoning_content", "reasoning"},
  "tool": {"tool_call_id"},
}
# What clients send back without a meaning, and a place for what a server adds.
_IGNORED = {"annotations", "arl"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
  """A call of a function; `arguments` is the JSON text of an object."""

  id: str
  name: str
  arguments: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
  """One message.

  Attributes:
    role: system, developer, user, assistant or tool.
    content: its text; parts are joined.
    reasoning: what an assistant thought before.
    tool_calls: what an assistant calls.
    tool_call_id: the call that a tool answers.
    name: of the tool that answers, else what the client calls the author.
  """

  role: str
  content: str = ""
  reasoning: str = ""
  tool_calls: tuple[ToolCall, ...] = ()
  tool_call_id: str = ""
  name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
  """A function that the model may call; `parameters` is a JSON schema."""

  name: str
  description: str = ""
  parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def parse_messages(
  value: Any, *, where: str = "messages"
) -> tuple[ChatMessage, ...]:
  """Parses the messages of a request.

  Args:
    value: a list of objects, as a JSON parser gives it.
    where: what errors call it.

  Raises:
    ValueError: naming the path, what is there, and what must be.
  """
  messages: list[ChatMessage] = []
  calls: dict[str, str] = {}  # Open calls: id -> the tool's name.
  left = _MAX_CHARS
  for path, item in _items(value, where, 1, _MAX_MESSAGES):
    message = _message(item, path)
    if message.role == "tool":
      if message.tool_call_id not in calls:
        raise ValueError(
          f"{path}.tool_call_id: {message.tool_call_id!r:.80} must be an id of"
          " the tool_calls that these tool messages follow"
        )
      name = calls[message.tool_call_id]
      message = dataclasses.replace(message, name=name)
    else:
      calls = {call.id: call.name for call in message.tool_calls}
    left -= len(message.content) + len(message.reasoning)
    left -= sum(len(call.arguments) for call in message.tool_calls)
    if left < 0:
      raise ValueError(
        f"{where}: more than {_MAX_CHARS} characters up to {path}"
      )
    messages.append(message)
  return tuple(messages)


def parse_tools(value: Any, *, where: str = "tools") -> tuple[Tool, ...]:
  """Parses the tools of a request; None is no tools.

  Raises:
    ValueError: as `parse_messages`; also for a name that is there twice.
  """
  if value is None:
    return ()
  tools: dict[str, Tool] = {}
  for path, item in _items(value, where, 0, _MAX_TOOLS):
    tool = _tool(item, path)
    if tool.name in tools:
      raise ValueError(
        f"{path}.function.name: {tool.name!r} is there twice; names must differ"
      )
    tools[tool.name] = tool
  return tuple(tools.values())


def message_json(message: ChatMessage) -> dict[str, Any]:
  """The message as OpenAI's API writes it, without fields that are empty."""
  value: dict[str, Any] = {"role": message.role, "content": message.content}
  if message.tool_calls:
    value["content"] = message.content or None
    value["tool_calls"] = [
      {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
      }
      for call in message.tool_calls
    ]
  if message.reasoning:
    value["reasoning_content"] = message.reasoning
  if message.tool_call_id:
    value["tool_call_id"] = message.tool_call_id
  elif message.name:
    value["name"] = message.name
  return value


def tool_json(tool: Tool) -> dict[str, Any]:
  """The tool as OpenAI's API writes it."""
  return {
    "type": "function",
    "function": {
      "name": tool.name,
      "description": tool.description,
      "parameters": dict(tool.parameters),
    },
  }


def is_echo(message: ChatMessage, reply: ChatMessage) -> bool:
  """Whether a client sent back what it was replied.

  Clients drop reasoning, and some write the arguments of a call anew: equal
  JSON is enough.
  """
  return (
    message.role == reply.role == "assistant"
    and message.content == reply.content
    and message.reasoning in ("", reply.reasoning)
    and len(message.tool_calls) == len(reply.tool_calls)
    and all(map(_same_call, message.tool_calls, reply.tool_calls))
  )


def _same_call(one: ToolCall, other: ToolCall) -> bool:
  if (one.id, one.name) != (other.id, other.name):
    return False
  if one.arguments == other.arguments:
    return True
  # As texts: 1, 1.0 and true are equal to Python, not to a tool.
  texts = [
    json.dumps(parse_object(call.arguments)[0], sort_keys=True)
    for call in (one, other)
  ]
  return texts[0] == texts[1]


def _message(item: Any, path: str) -> ChatMessage:
  fields = _object(item, path)
  role = fields.get("role")
  if role not in _ROLES:
    raise ValueError(
      f"{path}.role: {role!r:.80}, must be one of {', '.join(_ROLES)}"
    )
  known = {"role", "content", "name"} | _FIELDS.get(role, set()) | _IGNORED
  for name, found in fields.items():
    empty = found is None or (name == "refusal" and found == "")
    if name not in known and not empty:
      at = f".{name}" if name.isidentifier() else f"[{name!r}]"
      raise ValueError(
        f"{path}{at:.80}: not a field of a {role} message that is read here"
      )
  calls = _calls(fields.get("tool_calls"), f"{path}.tool_calls")
  content = _content(fields, f"{path}.content", optional=role == "assistant")
  call_id = ""
  if role == "tool":
    call_id = _string(fields, "tool_call_id", path, _MAX_NAME)
  return ChatMessage(
    role=role,
    content=content,
    reasoning=_reasoning(fields, path) if role == "assistant" else "",
    tool_calls=calls,
    tool_call_id=call_id,
    name=_optional_string(fields, "name", path, _MAX_NAME),
  )


def _content(fields: Mapping[str, Any], path: str, *, optional: bool) -> str:
  found = fields.get("content")
  if found is None and optional:
    return ""
  if isinstance(found, str):
    return _text(found, path, _MAX_CHARS)
  if not isinstance(found, list):
    raise ValueError(
      f"{path}: {_kind(found)}, must be a string or a list of text parts"
    )
  texts = []
  for at, item in _items(found, path, 0, _MAX_PARTS):
    part = _object(item, at)
    if part.get("type") != "text":
      raise ValueError(
        f"{at}.type: {part.get('type')!r:.80}, must be 'text': nothing else is"
        " supported"
      )
    texts.append(_string(part, "text", at, _MAX_CHARS, empty=True))
  return "".join(texts)


def _reasoning(fields: Mapping[str, Any], path: str) -> str:
  """Servers call it by either name; some write both."""
  names = ("reasoning_content", "reasoning")
  one, other = (
    _optional_string(fields, name, path, _MAX_CHARS) for name in names
  )
  if one and other and one != other:
    raise ValueError(
      f"{path}.reasoning: differs from reasoning_content; must be one text"
    )
  return one or other


def _calls(value: Any, where: str) -> tuple[ToolCall, ...]:
  if value is None:
    return ()
  calls: dict[str, ToolCall] = {}
  for path, item in _items(value, where, 0, _MAX_CALLS):
    fields = _object(item, path)
    _function_type(fields, path)
    function = _object(fields.get("function"), f"{path}.function")
    call_id = _string(fields, "id", path, _MAX_NAME)
    if call_id in calls:
      raise ValueError(f"{path}.id: {call_id!r} is there twice")
    at = f"{path}.function"
    arguments = _string(function, "arguments", at, _MAX_CHARS)
    try:
      parse_object(arguments)
    except ValueError as error:
      raise ValueError(
        f"{at}.arguments: must be the text of a JSON object: {error}"
      ) from None
    calls[call_id] = ToolCall(
      id=call_id, name=_tool_name(function, at), arguments=arguments
    )
  return tuple(calls.values())


def _tool(item: Any, path: str) -> Tool:
  fields = _object(item, path)
  _function_type(fields, path)
  path = f"{path}.function"
  function = _object(fields.get("function"), path)
  name = _tool_name(function, path)
  description = _optional_string(function, "description", path, _MAX_TOOL)
  parameters = function.get("parameters")
  if parameters is None:
    parameters = {}
  path = f"{path}.parameters"
  _object(parameters, path)
  try:
    measure(parameters, _MAX_TOOL)
    check_text(parameters)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None
  if parameters.get("type", "object") != "object":
    raise ValueError(f"{path}.type: must be 'object'")
  if not isinstance(parameters.get("properties", {}), dict):
    raise ValueError(f"{path}.properties: must be an object")
  required = parameters.get("required", [])
  if not isinstance(required, list) or not all(
    isinstance(field, str) for field in required
  ):
    raise ValueError(f"{path}.required: must be a list of strings")
  return Tool(name=name, description=description, parameters=parameters)


def _function_type(fields: Mapping[str, Any], path: str) -> None:
  if fields.get("type") != "function":
    raise ValueError(
      f"{path}.type: {fields.get('type')!r:.80}, must be 'function'"
    )


def _tool_name(fields: Mapping[str, Any], path: str) -> str:
  name = _string(fields, "name", path, _MAX_NAME)
  if not _TOOL_NAME.fullmatch(name):
    raise ValueError(
      f"{path}.name: {name!r:.80}, must be 1 to 64 of a-z, A-Z, 0-9, _ and -"
    )
  return name


def _items(
  value: Any, where: str, least: int, most: int
) -> list[tuple[str, Any]]:
  if not isinstance(value, list):
    raise ValueError(f"{where}: {_kind(value)}, must be a list")
  if not least <= len(value) <= most:
    raise ValueError(
      f"{where}: {len(value)} entries, must be {least} to {most}"
    )
  return [(f"{where}[{i}]", item) for i, item in enumerate(value)]


def _object(value: Any, path: str) -> Mapping[str, Any]:
  if not isinstance(value, dict):
    raise ValueError(f"{path}: {_kind(value)}, must be an object")
  return value


def _string(
  fields: Mapping[str, Any],
  name: str,
  path: str,
  limit: int,
  *,
  empty: bool = False,
) -> str:
  found = fields.get(name)
  if not isinstance(found, str):
    raise ValueError(f"{path}.{name}: {_kind(found)}, must be a string")
  if not found and not empty:
    raise ValueError(f"{path}.{name}: is empty")
  return _text(found, f"{path}.{name}", limit)


def _optional_string(
  fields: Mapping[str, Any], name: str, path: str, limit: int
) -> str:
  if fields.get(name) is None:
    return ""
  return _string(fields, name, path, limit, empty=True)


def _text(value: str, path: str, limit: int) -> str:
  if len(value) > limit:
    raise ValueError(
      f"{path}: {len(value)} characters, must be at most {limit}"
    )
  try:
    check_text(value)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None
  return value


def _kind(value: Any) -> str:
  if value is None:
    return "absent"
  kinds = {dict: "an object", list: "a list", str: "a string", bool: "a bool"}
  return kinds.get(type(value), f"a {type(value).__name__}")
