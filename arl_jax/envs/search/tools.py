"""What a policy is told of the search tools."""

from __future__ import annotations

from collections.abc import Sequence

from arl_jax.chat.messages import Tool


def _tool(name: str, description: str, argument: str, kind: str, what: str):
  value: dict[str, object] = {"type": kind, "description": what}
  if kind == "array":
    value["items"] = {"type": "string"}
  return Tool(
    name=name,
    description=description,
    parameters={
      "type": "object",
      "properties": {argument: value},
      "required": [argument],
      "additionalProperties": False,
    },
  )


TOOLS = (
  _tool(
    "search_corpus",
    "Finds passages by meaning and by words. Passages that an earlier search"
    " showed are left out.",
    "query",
    "string",
    "what to look for",
  ),
  _tool(
    "grep_corpus",
    "Finds passages that a regular expression (RE2) matches, whatever case.",
    "pattern",
    "string",
    "the expression",
  ),
  _tool(
    "read_document",
    "Shows passages of one document, the most relevant first.",
    "doc_id",
    "string",
    "id of the document, or of one of its passages",
  ),
  _tool(
    "prune_chunks",
    "Takes passages out of your context, to make room. They still count as"
    " seen.",
    "chunk_ids",
    "array",
    "ids of passages that don't help",
  ),
)

TOOL_NAMES = tuple(tool.name for tool in TOOLS)

SYSTEM = (
  "You find the passages of a corpus that answer a question. Search, read, and"
  " take what doesn't help out of your context with prune_chunks: each result"
  " ends with how full it is. Passages have ids such as <c3>. When you have"
  " found enough, reply without a tool call: list the ids of the passages that"
  " answer the question, the best first, each with a reason."
)


def check_tools(names: Sequence[str], where: str = "tools") -> None:
  """Raises ValueError unless they are tools, at least one and each once.

  Args:
    names: of tools.
    where: what the message calls them.
  """
  for name in names:
    if name not in TOOL_NAMES:
      known = ", ".join(TOOL_NAMES)
      raise ValueError(f"{where} has {name!r}; there are {known}")
  if not names or len(set(names)) < len(names):
    raise ValueError(f"{where} is {list(names)}, not at least one, each once")
