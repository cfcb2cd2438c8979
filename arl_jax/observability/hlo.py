"""What one chip computes, moves and sends, read from XLA's optimized program.

XLA's own cost analysis counts the body of a loop once and knows nothing of
collectives, so a model whose layers are scanned looks one layer deep. `account`
reads the same text and multiplies loops out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from arl_jax.observability.hlo_text import (
  Array,
  Computation,
  Instruction,
  parse,
)

COLLECTIVES = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
)

# Names for values that exist already, or work that is counted elsewhere.
_FREE = frozenset({
  "add-dependency", "after-all", "bitcast", "constant", "domain",
  "get-dimension-size", "get-tuple-element", "opt-barrier", "parameter",
  "partition-id", "replica-id", "tuple",
})  # fmt: skip

# Custom calls that mark something for the compiler and compute nothing.
_MARKERS = frozenset({
  "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone",
  "AsyncCollectiveStart", "ConcatBitcast", "MoveToDevice", "MoveToHost",
  "SPMDFullToShardShape", "SPMDShardToFullShape", "Sharding",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
  """Totals of one run of the program on one chip.

  Attributes:
    flops: two for each multiply-add of dots and convolutions, inside fusions
      too, and what custom calls say of themselves. Elementwise work is left
      out.
    hbm_bytes: operands and results of each operation that lie in main memory,
      with the padding of their tiled layout. Slices, gathers and scatters move
      what they select; updates in place move the update twice, or once in a
      fusion that computes it. A fusion reads each operand once and never its
      inner values. A custom call moves what it says, else its operands and
      results.
    collective_bytes: bytes a chip sends, by kind, in a group of g chips, where
      size is that of the larger of operand and result: (g - 1)/g size for
      all-gather, reduce-scatter and all-to-all, twice that for all-reduce, the
      operand for collective-permute. Sizes of ragged-all-to-all are known only
      as it runs: (g - 1)/g of the smaller of operand and result is what goes
      out if rows fill it evenly over the group.
    opaque_calls: how often each custom call without a cost of its own runs;
      their FLOPs are missing from `flops`.
    unknown_loops: loops counted once, for want of a known number of turns.
  """

  flops: int
  hbm_bytes: int
  collective_bytes: Mapping[str, int]
  opaque_calls: Mapping[str, int]
  unknown_loops: tuple[str, ...]


def account(hlo_text: str) -> Account:
  """Adds up the text of `jax.stages.Compiled.as_text()`.

  Conditionals count as their branch of most FLOPs, then of most bytes.

  Raises:
    ValueError: the text has no entry computation, or writes the groups of a
      collective in an unknown way.
  """
  total = _Program(hlo_text).total()
  return Account(
    flops=total.flops,
    hbm_bytes=total.hbm,
    collective_bytes={k: total.sent[k] for k in COLLECTIVES if k in total.sent},
    opaque_calls=dict(sorted(total.opaque.items())),
    unknown_loops=tuple(dict.fromkeys(total.loops)),
  )


@dataclasses.dataclass
class _Cost:
  flops: int = 0
  hbm: int = 0
  sent: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  opaque: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  loops: list[str] = dataclasses.field(default_factory=list)

  def add(self, other: _Cost, times: int = 1) -> None:
    self.flops += times * other.flops
    self.hbm += times * other.hbm
    for name, n in other.sent.items():
      self.sent[name] += times * n
    for name, n in other.opaque.items():
      self.opaque[name] += times * n
    self.loops += other.loops


class _Program:
  """The computations of a module, and their costs."""

  def __init__(self, text: str):
    self._module = parse(text)
    self._computations = self._module.computations
    self._costs: dict[tuple[str, bool], _Cost] = {}

  def total(self) -> _Cost:
    return self._cost(self._module.entry, fused=False)

  def _cost(self, name: str, fused: bool) -> _Cost:
    """Of one run. Inside a fusion no value reaches main memory."""
    if (name, fused) not in self._costs:
      cost = _Cost()
      computation = self._computations[name]
      for instruction in computation.instructions.values():
        self._add(cost, computation, instruction, fused)
      self._costs[name, fused] = cost
    return self._costs[name, fused]

  def _add(
    self, cost: _Cost, inside: Computation, i: Instruction, fused: bool
  ) -> None:
    if i.op in _FREE or i.op.endswith(("-done", "-update")):
      return
    base = i.op.removesuffix("-start")
    if i.op == "while":
      turns = self._module.turns(inside, i)
      if turns is None:
        cost.loops.append(i.name)
        turns = 1
      for part in ("body", "condition"):
        called = i.attribute(part)
        assert called is not None
        cost.add(self._cost(called, fused), turns)
    elif i.op == "conditional":
      branches = [self._cost(name, fused) for name in i.branches]
      cost.add(max(branches, key=lambda c: (c.flops, c.hbm)))
    elif i.op in ("call", "async-start"):
      called = i.attribute("to_apply") or i.attribute("calls")
      assert called is not None
      cost.add(self._cost(called, fused))
    elif i.op == "fusion":
      called = i.attribute("calls")
      assert called is not None
      cost.add(self._cost(called, fused=True))
      cost.hbm += 0 if fused else self._fusion_bytes(inside, i, called)
    elif i.op == "custom-call":
      self._add_custom_call(cost, inside, i, fused)
    else:
      if base in COLLECTIVES:
        self._add_collective(cost, inside, i, base)
      elif i.op == "dot":
        cost.flops += _dot_flops(inside, i)
      elif i.op == "convolution":
        cost.flops += _convolution_flops(inside, i)
      cost.hbm += 0 if fused else _moved(inside, i)

  def _add_custom_call(
    self, cost: _Cost, inside: Computation, i: Instruction, fused: bool
  ) -> None:
    target = (i.attribute("custom_call_target") or "").strip('"')
    if target in _MARKERS:
      return
    said = dict(
      re.findall(r'"(flops|bytes_accessed)":"?(\d+)', _estimate(i.attributes))
    )
    cost.flops += int(said.get("flops", 0))
    if not said:
      # All kernels of Pallas have one target; their instruction has the name.
      kernel = target == "tpu_custom_call"
      name = re.sub(r"\.\d+$", "", i.name) if kernel else target
      cost.opaque[name] += 1
    if not fused:
      cost.hbm += int(said.get("bytes_accessed", 0)) or _moved(inside, i)

  def _add_collective(
    self, cost: _Cost, inside: Computation, i: Instruction, kind: str
  ) -> None:
    if _is_echo(inside, i):
      return
    operands = [inside.instructions[name] for name in i.operands]
    result = sum(a.bytes for a in i.made)
    if kind == "collective-permute":
      cost.sent[kind] += sum(a.bytes for a in operands[0].arrays)
      return
    group = self._module.group(i)
    if kind == "ragged-all-to-all":
      size = min(sum(a.bytes for a in operands[0].arrays), result)
      cost.sent[kind] += size * (group - 1) // group
      return
    size = max(sum(a.bytes for o in operands for a in o.arrays), result)
    if kind == "all-reduce" and _is_sliced(inside, i):
      kind = "reduce-scatter"
    cost.sent[kind] += (
      (2 if kind == "all-reduce" else 1) * size * (group - 1) // group
    )

  def _fusion_bytes(
    self, inside: Computation, i: Instruction, called: str
  ) -> int:
    body = self._computations[called]
    if "AsyncCollectiveDone" in body.instructions[body.root].attributes:
      return 0
    total = 0
    for number, name in enumerate(i.operands):
      arrays = inside.instructions[name].arrays
      if len(arrays) == 1 and not arrays[0].in_hbm:
        continue
      whole = sum(a.bytes for a in arrays if a.in_hbm)
      total += min(whole, self._read(body, body.parameters[number], whole))
    written = self._written(body, body.root)
    for array, size in zip(i.arrays, written, strict=True):
      total += min(size, array.bytes) if array.in_hbm else 0
    return total

  def _read(self, body: Computation, name: str, whole: int) -> int:
    """Bytes that a fused computation reads of one of its values."""
    total = 0
    for user in body.users.get(name, []):
      first = user.operands[0] == name
      if user.op in ("bitcast", "reshape"):
        total += self._read(body, user.name, whole)
      elif first and user.op in ("dynamic-slice", "slice", "gather"):
        total += sum(a.bytes for a in user.arrays)
      elif user.op == "fusion":
        inner = self._computations[user.attribute("calls") or ""]
        for number, operand in enumerate(user.operands):
          if operand == name:
            total += self._read(inner, inner.parameters[number], whole)
      elif not (
        user.op == "tuple"
        or (first and user.op == "dynamic-update-slice")
        or _is_echo(body, user)
      ):
        return whole
    return total

  def _written(self, body: Computation, name: str) -> Iterator[int]:
    """Bytes of each result that a fused computation does not find in place."""
    i = body.instructions[name]
    if i.op == "tuple":
      for operand in i.operands:
        yield from self._written(body, operand)
    elif i.op == "fusion":
      inner = self._computations[i.attribute("calls") or ""]
      yield from self._written(inner, inner.root)
    elif i.op in ("bitcast", "reshape"):
      yield from self._written(body, i.operands[0])
    elif i.op == "dynamic-update-slice":
      yield sum(a.bytes for a in body.operand(i, 1).arrays)
    elif i.op == "parameter" or _is_echo(body, i):
      yield from (0 for _ in i.arrays)
    else:
      yield from (a.bytes for a in i.arrays)


def _is_echo(inside: Computation, i: Instruction) -> bool:
  """Whether a collective is counted elsewhere.

  A TPU may spread one over a chain of fusions, with a copy of it in each. The
  first copy goes to a call that starts it.
  """
  if "chain_id=" not in i.attributes:
    return False
  return not any(
    "AsyncCollectiveStart" in user.attributes
    for user in inside.users.get(i.name, [])
  )


def _moved(inside: Computation, i: Instruction) -> int:
  """Bytes that an operation outside fusions reads and writes."""

  def size(arrays: Iterable[Array]) -> int:
    return sum(a.bytes for a in arrays if a.in_hbm)

  operands = [inside.instructions[name].arrays for name in i.operands]
  result = i.made
  selected = sum(a.bytes for a in result)
  if i.op in ("dynamic-slice", "slice", "gather", "slice-start"):
    read = selected if size(operands[0]) else 0
    return read + size(result) + sum(size(o) for o in operands[1:])
  if i.op == "dynamic-update-slice":
    written = sum(a.bytes for a in operands[1]) if size(result) else 0
    return size(operands[1]) + written
  if i.op == "scatter":
    count = (len(operands) - 1) // 2
    # Rows are read, added to and written.
    rows = sum(size(o) for o in operands[count + 1 :])
    return 3 * rows + size(operands[count])
  return sum(size(o) for o in operands) + size(result)


def _estimate(attributes: str) -> str:
  found = re.search(r'"cost_estimate":\{[^}]*\}', attributes)
  return found[0] if found else ""


def _is_sliced(inside: Computation, i: Instruction) -> bool:
  """Whether each chip keeps a part only: how a TPU writes reduce-scatter."""
  users = inside.users.get(i.name, [])
  return any(
    user.op == "dynamic-slice"
    or (user.op in ("bitcast", "reshape") and _is_sliced(inside, user))
    for user in users
  )


def _dot_flops(inside: Computation, i: Instruction) -> int:
  left = inside.operand(i, 0).arrays[0].dims
  summed = math.prod(left[d] for d in i.numbers("lhs_contracting_dims"))
  return 2 * math.prod(i.arrays[0].dims) * summed


def _convolution_flops(inside: Computation, i: Instruction) -> int:
  left = inside.operand(i, 0).arrays[0].dims
  right = inside.operand(i, 1).arrays[0].dims
  labels = (i.attribute("dim_labels") or "").replace("->", "_").split("_")
  from_left = dict(zip(labels[0], left, strict=True))
  from_right = dict(zip(labels[1], right, strict=True))
  result = dict(zip(labels[2], i.arrays[0].dims, strict=True))
  products = from_left["b"] * from_left["f"] * from_right["o"]
  for group in ("feature_group_count", "batch_group_count"):
    products //= int(i.attribute(group) or 1)
  found = re.search(r"window=\{([^}]*)\}", i.attributes)
  window = dict(part.split("=") for part in (found[1].split() if found else []))

  def of(name: str, d: int, default: str) -> str:
    return window[name].split("x")[d] if name in window else default

  for d in range(len(left) - 2):
    label = str(d)
    products *= _positions(
      from_left[label],
      from_right[label],
      result[label],
      int(of("stride", d, "1")),
      int(of("pad", d, "0_0").split("_")[0]),
      int(of("lhs_dilate", d, "1")),
      int(of("rhs_dilate", d, "1")),
    )
  return 2 * products


@functools.lru_cache(maxsize=1024)
def _positions(
  size: int,
  kernel: int,
  result: int,
  stride: int,
  pad: int,
  dilation: int,
  kernel_dilation: int,
) -> int:
  """Products along one dimension that do not fall on padding or between.

  A TPU writes batched and transposed dots as convolutions with windows of
  which few positions count.
  """
  if kernel == 1 and stride == dilation == 1 and pad == 0:
    return min(size, result)
  last = (size - 1) * dilation
  return sum(
    0 <= at <= last and at % dilation == 0
    for k in range(kernel)
    for at in range(
      k * kernel_dilation - pad,
      k * kernel_dilation - pad + result * stride,
      stride,
    )
  )
