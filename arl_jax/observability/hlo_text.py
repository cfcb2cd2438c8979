"""The text of an XLA program as computations, instructions and arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s+\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT\s+)?%([\w.\-]+) = (.*)", re.DOTALL)
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of a type.

  Attributes:
    dims: its shape.
    bytes: that it takes, with the padding of its tiled layout.
    in_hbm: whether it lies in main memory.
  """

  dims: tuple[int, ...]
  bytes: int
  in_hbm: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One operation: `%name = type op(operands), attributes`.

  Attributes:
    name: without its %.
    type: of the result, as written.
    op: such as "all-reduce-start".
    operands: names.
    attributes: what follows the operands, as written.
    literal: what the parentheses hold: the value of a constant.
  """

  name: str
  type: str
  op: str
  operands: tuple[str, ...]
  attributes: str
  literal: str

  @functools.cached_property
  def arrays(self) -> tuple[Array, ...]:
    return tuple(_arrays(self.type))

  @property
  def made(self) -> tuple[Array, ...]:
    """What the operation makes, without what its start carries along."""
    if not self.op.endswith("-start") or self.op == "all-reduce-start":
      return self.arrays
    parts = _elements(self.type)
    # A copy starts with (result, operand, ...); others with (operand, result).
    return tuple(_arrays(parts[0 if self.op == "copy-start" else 1]))

  @property
  def index(self) -> int:
    """Which element a get-tuple-element takes."""
    return int(self.attribute("index") or 0)

  @property
  def constant(self) -> int | None:
    """Value of a whole constant."""
    if self.op != "constant" or not re.fullmatch(r"-?\d+", self.literal):
      return None
    return int(self.literal)

  @property
  def branches(self) -> list[str]:
    """Computations that a conditional chooses from."""
    many = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
    if many:
      return _NAME.findall(many[1])
    names = ("true_computation", "false_computation")
    return [called for name in names if (called := self.attribute(name))]

  def attribute(self, name: str) -> str | None:
    """`value` of `name=value`, up to the next comma or space."""
    found = re.search(rf"\b{name}=%?([^,\s]+)", self.attributes)
    return found[1] if found else None

  def numbers(self, name: str) -> list[int]:
    """`[1, 2]` of `name={1,2}`."""
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
    return [int(n) for n in found[1].split(",") if n] if found else []


@dataclasses.dataclass
class Computation:
  """Instructions by name, in the order in which they run.

  Attributes:
    name: without its %.
    instructions: of which each uses only earlier ones.
    root: name of the one whose result is the computation's.
  """

  name: str
  instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
  root: str = ""

  @functools.cached_property
  def parameters(self) -> dict[int, str]:
    return {
      int(i.literal): i.name
      for i in self.instructions.values()
      if i.op == "parameter"
    }

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = {}
    for instruction in self.instructions.values():
      for operand in dict.fromkeys(instruction.operands):
        users.setdefault(operand, []).append(instruction)
    return users

  def operand(self, instruction: Instruction, i: int) -> Instruction:
    return self.instructions[instruction.operands[i]]

  def original(self, i: Instruction) -> Instruction:
    """What an instruction is a copy of."""
    while i.op in ("bitcast", "convert", "copy", "copy-done", "copy-start"):
      i = self.operand(i, 0)
    return i


@dataclasses.dataclass(frozen=True)
class Module:
  """A program.

  Attributes:
    computations: by name.
    entry: name of the one that runs first.
    devices: number of chips that run the program.
  """

  computations: dict[str, Computation]
  entry: str
  devices: int

  def turns(self, inside: Computation, loop: Instruction) -> int | None:
    """How often a loop runs its body, None where the text does not say."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
      return int(known[1])
    condition = self.computations[loop.attribute("condition") or ""]
    body = self.computations[loop.attribute("body") or ""]
    before, after = inside.operand(loop, 0), body.instructions[body.root]

    def fixed(part: Computation, i: Instruction) -> int | None:
      """A number that is the same in each turn."""
      i = part.original(i)
      if i.op == "get-tuple-element" and before.op == "tuple":
        kept = body.operand(after, i.index)
        if kept.op == "get-tuple-element" and kept.index == i.index:
          i = inside.original(inside.operand(before, i.index))
      return i.constant

    test = condition.instructions[condition.root]
    terms = [condition.instructions[name] for name in test.operands]
    if test.op == "fusion":
      inner = self.computations[test.attribute("calls") or ""]
      test = inner.instructions[inner.root]
      outer = dict(zip(inner.parameters.values(), terms, strict=True))
      terms = [outer.get(n) or inner.instructions[n] for n in test.operands]
    if (
      test.op != "compare"
      or test.attribute("direction") != "LT"
      or terms[0].op != "get-tuple-element"
      or before.op != "tuple"
    ):
      return None
    counter = terms[0].index
    start = inside.original(inside.operand(before, counter)).constant
    end = fixed(condition, terms[1])
    following = body.original(body.operand(after, counter))
    if following.op != "add":
      return None
    # A loop that XLA has unrolled, or split in two directions, skips numbers.
    step = fixed(body, body.operand(following, 1))
    if start is None or end is None or not step or step < 0:
      return None
    return max(-(-(end - start) // step), 0)

  def group(self, i: Instruction) -> int:
    """Chips that take part in one collective."""
    mesh = re.search(
      r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", i.attributes
    )
    if mesh:
      # mesh['x'=4,'y'=2] {'x','y':(1)2}: whole axes, or a part of one.
      axes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
      named = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
      return math.prod(int(part or axes[axis]) for axis, part in named)
    found = re.search(r"replica_groups=(\[[\d,]+\]<=|\{[^}]*\})", i.attributes)
    if not found:
      raise ValueError(
        f"%{i.name} has no replica_groups as {{{{0,1}}}}, [1,2]<=[2] or"
        " mesh['x'=2] {'x'}"
      )
    if found[1].startswith("["):
      return int(re.findall(r"\d+", found[1])[-1])
    return len(re.findall(r"\d+", found[1])) or self.devices


def parse(hlo_text: str) -> Module:
  """Reads the text of `jax.stages.Compiled.as_text()`.

  Raises:
    ValueError: the text has no entry computation, or unbalanced parentheses.
  """
  devices, entry = 1, ""
  computations: dict[str, Computation] = {}
  for name in ("replica_count", "num_partitions"):
    found = re.search(rf"\b{name}=(\d+)", hlo_text.split("\n", 1)[0])
    devices *= int(found[1]) if found else 1
  for header, lines in _blocks(hlo_text):
    computation = Computation(header[2])
    for line in lines:
      found = _INSTRUCTION.match(line)
      if found:
        computation.instructions[found[2]] = _parse(found[2], found[3])
        if found[1]:
          computation.root = found[2]
    computations[header[2]] = computation
    if header[1]:
      entry = header[2]
  if not entry:
    raise ValueError("hlo_text has no ENTRY computation; pass as_text() whole")
  return Module(computations, entry, devices)


def _blocks(text: str) -> Iterator[tuple[re.Match[str], list[str]]]:
  """Header and instructions of each computation, one string an instruction."""
  header: re.Match[str] | None = None
  lines: list[str] = []
  for line in text.splitlines():
    if header is None:
      header, lines = _HEADER.match(line), []
    elif line == "}":
      yield header, lines
      header = None
    elif _INSTRUCTION.match(line):
      lines.append(line)
    elif lines:
      # Attributes may hold text with line breaks of its own.
      lines[-1] += line


def _parse(name: str, text: str) -> Instruction:
  kind = _balanced(text) if text.startswith("(") else text.split(" ", 1)[0]
  rest = text[len(kind) :].lstrip()
  op, rest = rest.split("(", 1)
  inner = _balanced("(" + rest)
  literal = inner[1:-1]
  operands = () if op in ("constant", "parameter") else _NAME.findall(literal)
  return Instruction(
    name, kind, op, tuple(operands), rest[len(inner) - 1 :], literal
  )


def _balanced(text: str) -> str:
  """`text` up to the parenthesis that closes its first."""
  depth = 0
  for found in re.finditer(r'[()]|"(?:[^"\\]|\\.)*"', text):
    depth += {"(": 1, ")": -1}.get(found[0], 0)
    if depth == 0:
      return text[: found.end()]
  raise ValueError(f"hlo_text has unbalanced parentheses in {text[:60]!r}")


def _arrays(kind: str) -> Iterator[Array]:
  for dtype, shape, layout in _ARRAY.findall(kind):
    dims = tuple(int(d.lstrip("<=")) for d in shape.split(",") if d)
    bits = re.match(r"[a-z]+(\d+)", dtype)
    width = 8 if dtype == "pred" else int(bits[1]) if bits else 0
    order, _, rest = layout.partition(":")
    # A tile covers the dimensions that lie closest together in memory.
    padded = list(dims)
    tile = re.match(r"T\(([\d,]+)\)", rest)
    if tile and dims:
      minor = [int(d) for d in order.split(",")]
      for d, size in zip(minor, reversed(tile[1].split(",")), strict=False):
        padded[d] = -(-padded[d] // int(size)) * int(size)
    space = re.search(r"S\((\d+)\)", rest)
    yield Array(
      dims, math.prod(padded) * width // 8, space is None or space[1] == "0"
    )


def _elements(kind: str) -> list[str]:
  """Types of the elements of a tuple."""
  parts, depth, first = [], 0, 1
  for found in re.finditer(r"[(){}\[\],]", kind):
    if found[0] in ")}]":
      depth -= 1
    if (found[0] == "," and depth == 1) or (depth == 0 and found.start()):
      parts.append(kind[first : found.start()])
      first = found.end()
    if found[0] in "({[":
      depth += 1
  return parts
