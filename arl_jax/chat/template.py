"""Chat templates: jinja2 that a stranger wrote, in a sandbox with bounds.

The sandbox keeps a template from Python. The bounds keep it from memory and
time without end: rounds and calls are counted, texts are measured before they
are made, and filters and methods that no known template needs aren't there.
"""

from __future__ import annotations

import contextvars
import datetime
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import ext, filters, nodes, sandbox, visitor

_MAX_SOURCE = 1 << 20
# Characters that one rendering writes, and of any text it makes on the way.
_MAX_TEXT = 1 << 24
# Loop rounds and calls of one rendering.
_MAX_STEPS = 1 << 20
# What anything but a text counts for, in characters.
_OTHER = 16
_MAX_POWER = 64
_MAX_BITS = 1024
_MAX_INDENT = 16
# fmt: off
_FILTERS = (
  "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
  "first", "float", "groupby", "int", "items", "last", "length", "list",
  "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round",
  "safe", "select", "selectattr", "sort", "title", "trim", "unique", "upper",
  "wordcount",
)
_TEXT_METHODS = (
  "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum",
  "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric",
  "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
  "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
  "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
  "title", "upper",
)
# fmt: on
_GLOBALS = ("dict", "namespace", "range")


class ChatTemplate:
  """One compiled template, with what transformers offers to it."""

  def __init__(self, source: str):
    """Raises ValueError if `source` is too long or isn't jinja2."""
    if len(source) > _MAX_SOURCE:
      raise ValueError(
        f"chat template: {len(source)} characters, must be at most"
        f" {_MAX_SOURCE}"
      )
    self.source = source
    environment = _Environment()
    try:
      tree = _Rewriter().visit(environment.parse(source))
      tree.set_environment(environment)
      self._template = jinja2.Template.from_code(
        environment,
        environment.compile(tree),
        environment.make_globals(None),
      )
    except Exception as error:  # Also RecursionError, of deep nesting.
      raise _problem(error) from error

  def render(self, variables: Mapping[str, Any]) -> str:
    """Renders the template.

    Raises:
      ValueError: the template raises an error, leaves the sandbox, or needs
        more text or steps than any conversation should.
    """
    token = _budget.set(_Budget())
    try:
      return _concat(self._template.generate(**variables))
    except Exception as error:  # A template may raise any.
      raise _problem(error) from error
    finally:
      _budget.reset(token)


class _Budget:
  """What one rendering may still use."""

  def __init__(self) -> None:
    self._steps, self._text = _MAX_STEPS, _MAX_TEXT

  def step(self) -> None:
    self._steps -= 1
    if self._steps < 0:
      raise ValueError(f"more than {_MAX_STEPS} loop rounds and calls")

  def write(self, size: int) -> None:
    self._text -= size
    _check_text(_MAX_TEXT - self._text)


_budget: contextvars.ContextVar[_Budget | None] = contextvars.ContextVar(
  "budget", default=None
)


def _step() -> None:
  # Constants are computed while a template is compiled; nothing loops there.
  if budget := _budget.get():
    budget.step()


def _check_text(size: int) -> None:
  if size > _MAX_TEXT:
    raise ValueError(f"a text of more than {_MAX_TEXT} characters")


def _measured(value: Any) -> Any:
  """`value`; ValueError if it reads as too long a text.

  A list may hold another one twice, and that a third one twice.
  """
  pending, size = [value], 0
  while pending:
    top = pending.pop()
    if isinstance(top, Mapping):
      pending += [*top.keys(), *top.values()]
    elif isinstance(top, (list, tuple, set)):
      pending += top
    size += len(top) if isinstance(top, str) else _OTHER
    _check_text(size + len(pending))
  return value


def _written(value: Any) -> Any:
  if budget := _budget.get():
    budget.write(len(value) if isinstance(value, str) else 1)
  return _measured(value)


def _concat(parts: Iterable[str]) -> str:
  parts = list(parts)
  _check_text(sum(map(len, parts)))
  return "".join(parts)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
  """Refuses what could take memory or time without end."""

  intercepted_binops = frozenset({"+", "*", "**", "%"})
  concat = staticmethod(_concat)

  def __init__(self) -> None:
    super().__init__(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[_Generation, ext.loopcontrols],
      finalize=_written,
    )
    self.filters = {name: self.filters[name] for name in _FILTERS} | {
      "_counted": _counted,
      "indent": _indent,
      "join": _join,
      "replace": _replace,
      "string": lambda value: str(_measured(value)),
      "tojson": _tojson,
    }
    self.globals = {name: self.globals[name] for name in _GLOBALS} | {
      "raise_exception": _raise_exception,
      "strftime_now": _strftime_now,
    }

  def wrap_str_format(self, value: Any) -> None:
    return None  # Formats aren't among the methods of a text.

  def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
    if isinstance(obj, (str, bytes)) and attr not in _TEXT_METHODS:
      return False
    return super().is_safe_attribute(obj, attr, value)

  def call(self, context: Any, function: Any, /, *args: Any, **kw: Any) -> Any:
    _step()
    text = getattr(function, "__self__", None)
    # `kw` has just what jinja2 adds for itself: texts take nothing by name.
    if isinstance(text, str):
      if function.__name__ == "join":
        (values,) = args
        return _join(self, values, text)
      if function.__name__ == "replace":
        return _replace(text, *args)
    return super().call(context, function, *args, **kw)

  def call_binop(
    self, context: Any, operator: str, left: Any, right: Any
  ) -> Any:
    sizes = [len(x) for x in (left, right) if hasattr(x, "__len__")]
    numbers = [abs(x) for x in (left, right) if isinstance(x, (int, float))]
    if operator == "**" and max(numbers, default=0) > _MAX_POWER:
      raise ValueError(f"** of a number above {_MAX_POWER}")
    if operator == "*":
      bits = sum(int(x).bit_length() for x in numbers)
      if bits > _MAX_BITS:
        raise ValueError(f"a product of more than {_MAX_BITS} bits")
      _check_text(sum(sizes) * int(max(numbers, default=0)))
    if operator == "+":
      _check_text(sum(sizes))
    if operator == "%" and isinstance(left, str):
      raise ValueError("% of a text isn't allowed")
    return super().call_binop(context, operator, left, right)


class _Rewriter(visitor.NodeTransformer):
  """Leads past `_Environment` what a sandbox doesn't see."""

  def visit_For(self, node: nodes.For) -> nodes.Node:
    self.generic_visit(node)
    node.iter = _filter(node.iter, "_counted")
    return node

  def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
    self.generic_visit(node)
    total: nodes.Expr | None = None
    for part in node.nodes:
      text = _filter(part, "string")
      total = nodes.Add(total, text, lineno=node.lineno) if total else text
    return total or node


class _Generation(ext.Extension):
  """{% generation %}: marks what the assistant writes; only its body counts."""

  tags = {"generation"}  # noqa: RUF012 - as the base class has it.

  def parse(self, parser: Any) -> nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return nodes.Scope(body, lineno=line)


def _filter(node: Any, name: str) -> nodes.Filter:
  return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
  for value in values:
    _step()
    yield value


@jinja2.pass_environment
def _join(
  environment: jinja2.Environment,
  values: Iterable[Any],
  d: str = "",
  attribute: str | int | None = None,
) -> str:
  if attribute is not None:
    values = map(filters.make_attrgetter(environment, attribute), values)
  parts = [str(_measured(value)) for value in _counted(values)]
  _check_text(sum(map(len, parts)) + len(d) * len(parts))
  return d.join(parts)


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
  text, old, new = str(text), str(old), str(new)
  limit = -1 if count is None else count
  found = text.count(old) if limit < 0 else min(text.count(old), limit)
  _check_text(len(text) + found * len(new))
  return text.replace(old, new, limit)


def _indent(
  text: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
  size = len(width) if isinstance(width, str) else width
  _check_text(len(text) + size * (text.count("\n") + 1))
  return filters.do_indent(text, width, first, blank)


def _tojson(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """JSON without jinja2's own escapes of <, > and &: models never saw them."""
  if isinstance(indent, int) and indent > _MAX_INDENT:
    raise ValueError(f"indent {indent}, must be at most {_MAX_INDENT}")
  return json.dumps(
    _measured(value),
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _problem(error: Exception) -> ValueError:
  text = " ".join(str(error).split())[:300] or type(error).__name__
  return ValueError(f"chat template: {text}")
