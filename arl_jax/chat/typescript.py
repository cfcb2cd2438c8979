"""Tools as the TypeScript-like declarations that gpt-oss was trained with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from arl_jax.chat.messages import Tool

_IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_TYPES = {
  "string": "string",
  "number": "number",
  "integer": "number",
  "boolean": "boolean",
  "null": "null",
}


def declare(tools: Sequence[Tool]) -> str:
  """The namespace `functions` with all tools."""
  functions = "".join(_function(tool) for tool in tools)
  return f"namespace functions {{\n\n{functions}}} // namespace functions"


def _function(tool: Tool) -> str:
  signature = "()"
  if tool.parameters.get("properties"):
    signature = f"(_: {_object(tool.parameters)})"
  return (
    f"{_comment(tool.description)}type {tool.name} = {signature} => any;\n\n"
  )


def _object(schema: Mapping[str, Any]) -> str:
  listed = schema.get("required")
  names = listed if isinstance(listed, list) else []
  required = {name for name in names if isinstance(name, str)}
  lines = []
  for name, field in schema["properties"].items():
    field = field if isinstance(field, dict) else {}
    key = name if _IDENTIFIER.fullmatch(name) else json.dumps(name)
    optional = "" if name in required else "?"
    lines.append(
      f"{_comment(field.get('description'))}{key}{optional}: {_type(field)},"
      f"{_default(field)}\n"
    )
  return f"{{\n{''.join(lines)}}}"


def _type(schema: Any) -> str:
  """A type; "any" for what TypeScript has no short word for."""
  if not isinstance(schema, dict):
    return "any"
  kind = schema.get("type")
  if isinstance(schema.get("enum"), list) and schema["enum"]:
    text = " | ".join(_json(value) for value in schema["enum"])
  elif isinstance(kind, list):
    # Each once: the same fields under two kinds would double at each level.
    kinds = dict.fromkeys(k for k in kind if isinstance(k, str))
    text = " | ".join(_type({**schema, "type": k}) for k in kinds) or "any"
  elif any(isinstance(schema.get(k), list) for k in ("anyOf", "oneOf")):
    variants = schema.get("anyOf") or schema.get("oneOf") or []
    text = " | ".join(map(_type, variants)) or "any"
  elif kind == "array":
    items = _type(schema.get("items"))
    text = f"({items})[]" if "|" in items else f"{items}[]"
  elif kind == "object":
    fields = isinstance(schema.get("properties"), dict) and schema["properties"]
    text = _object(schema) if fields else "object"
  else:
    text = _TYPES.get(kind, "any") if isinstance(kind, str) else "any"
  return f"{text} | null" if schema.get("nullable") is True else text


def _comment(text: Any) -> str:
  """Lines of a comment, none of which can end it."""
  if not isinstance(text, str) or not text:
    return ""
  return "".join(f"// {line}\n" for line in text.splitlines())


def _default(schema: Mapping[str, Any]) -> str:
  if "default" not in schema:
    return ""
  value = schema["default"]
  bare = isinstance(value, str) and "enum" in schema
  return f" // default: {_one_line(value) if bare else _json(value)}"


def _json(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)


def _one_line(text: str) -> str:
  return " ".join(text.split())
