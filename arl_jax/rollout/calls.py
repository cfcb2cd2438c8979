"""An engine's calls as messages to the other hosts of its replica.

A message is a kind and numbers in network byte order, in a layout of its own
for each kind. Reading one bounds every count before anything is made of it, and
takes nothing that is left over. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arl_jax.rollout.request import Sampling

# Bytes of a message, and of a text in it, at most.
MAX_BYTES, MAX_TEXT_BYTES = 1 << 24, 1 << 12


@dataclasses.dataclass(frozen=True, slots=True)
class Renew:
  """Empties all slots."""


@dataclasses.dataclass(frozen=True, slots=True)
class Extend:
  """Appends tokens.

  Attributes:
    weights: number of the weights, as in `Fetch`.
    rows: slot -> (tokens of the slot that stay, ids to append).
  """

  weights: int
  rows: Mapping[int, tuple[int, Sequence[int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class CopyPrefix:
  """Puts the first `length` tokens of a slot into another one."""

  source: int
  target: int
  length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Clear:
  """Empties a slot."""

  slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
  """Lets a slot sample; stop strings are the scheduler's and don't travel."""

  slot: int
  sampled: int
  how: Sampling


@dataclasses.dataclass(frozen=True, slots=True)
class Generate:
  """Samples in the named slots, with so many steps and drafts a step."""

  weights: int
  steps: int
  drafts: int
  slots: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
  """Stops whatever runs in a slot."""

  slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
  """Asks for a published version; answered by `Taken` or `Refused`.

  Attributes:
    weights: number that other messages call it by.
    version: that is published.
  """

  weights: int
  version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
  """These weights aren't needed any more."""

  weights: int


@dataclasses.dataclass(frozen=True, slots=True)
class End:
  """Nothing more comes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
  """A host has the weights, verified and placed.

  Attributes:
    weights: number, as in `Fetch`.
    version: that it found.
    lineage: of that version.
    checksum: of that version.
  """

  weights: int
  version: int
  lineage: str
  checksum: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
  """A host can't have the weights, and why."""

  weights: int
  why: str


Call = (
  Renew
  | Extend
  | CopyPrefix
  | Clear
  | Start
  | Generate
  | Stop
  | Fetch
  | Drop
  | End
)
Answer = Taken | Refused
Message = Call | Answer

# A message's kind is its place here, counted from 1. Those of plain numbers
# have the layout of their fields.
_KINDS: tuple[type[Any], ...] = (
  *(Renew, Extend, CopyPrefix, Clear, Start, Generate, Stop),
  *(Fetch, Drop, End, Taken, Refused),
)
_NUMBERS = {
  Renew: "",
  CopyPrefix: "III",
  Clear: "I",
  Stop: "I",
  Fetch: "Iq",
  Drop: "I",
  End: "",
}
_HOW = "IIIdIddI"


def pack(message: Message) -> bytes:
  """The message as bytes.

  Raises:
    ValueError: it is too long, or a number in it is out of range.
  """
  kind = bytes([_KINDS.index(type(message)) + 1])
  try:
    body = kind + b"".join(_parts(message))
  except struct.error as error:
    raise ValueError(f"{message} can't be sent: {error}") from error
  if len(body) > MAX_BYTES:
    raise ValueError(
      f"a message of {len(body)} bytes is above {MAX_BYTES}; take smaller"
      " engine.prefill_rows or engine.prefill_chunk"
    )
  return body


def parse(body: bytes) -> Message:
  """The message that `pack` made these bytes of.

  Raises:
    ValueError: says why they are none.
  """
  if not body or len(body) > MAX_BYTES:
    raise ValueError(f"a message has {len(body)} bytes, not 1 to {MAX_BYTES}")
  if not 1 <= body[0] <= len(_KINDS):
    raise ValueError(f"kind {body[0]} is none of 1 to {len(_KINDS)}")
  cls = _KINDS[body[0] - 1]
  rest = _Rest(body)
  if cls in _NUMBERS:
    message = cls(*rest.numbers(_NUMBERS[cls]))
  else:
    message = _READ[cls](rest)
  rest.check_empty()
  return message


def _parts(message: Message) -> list[bytes]:
  if isinstance(message, Extend):
    return [
      struct.pack("!IH", message.weights, len(message.rows)),
      *(
        struct.pack("!II", slot, stay) + _list("I", ids)
        for slot, (stay, ids) in message.rows.items()
      ),
    ]
  if isinstance(message, Start):
    return [_start(message)]
  if isinstance(message, Generate):
    shape = (message.weights, message.steps, message.drafts)
    return [struct.pack("!III", *shape), _list("I", message.slots)]
  if isinstance(message, Taken):
    numbers = struct.pack("!Iq", message.weights, message.version)
    return [numbers, _text(message.lineage), _text(message.checksum)]
  if isinstance(message, Refused):
    return [struct.pack("!I", message.weights), _text(message.why)]
  layout = _NUMBERS[type(message)]
  values = (getattr(message, f.name) for f in dataclasses.fields(message))
  return [struct.pack(f"!{layout}", *values)]


def _start(message: Start) -> bytes:
  how = message.how
  numbers = struct.pack(
    f"!{_HOW}",
    message.slot,
    message.sampled,
    how.max_tokens,
    how.temperature,
    how.top_k,
    how.top_p,
    how.min_p,
    how.seed,
  )
  return b"".join(
    [
      numbers,
      _list("I", how.stop_ids),
      _list("I", how.forbidden),
      _list("I", list(how.logit_bias)),
      _list("d", list(how.logit_bias.values())),
    ]
  )


def _list(code: str, values: Sequence[float]) -> bytes:
  return struct.pack(f"!I{len(values)}{code}", len(values), *values)


def _text(text: str) -> bytes:
  # Cut between two characters.
  data = text.encode(errors="replace")[:MAX_TEXT_BYTES]
  data = data.decode(errors="ignore").encode()
  return struct.pack("!I", len(data)) + data


class _Rest:
  """What is left to be read of a message, after its kind."""

  def __init__(self, body: bytes):
    self._body, self._at = body, 1

  def numbers(self, layout: str) -> tuple[Any, ...]:
    form = struct.Struct(f"!{layout}")
    return form.unpack(self._take(form.size))

  def many(self, code: str) -> list[Any]:
    (count,) = self.numbers("I")
    return list(self.numbers(f"{self._within(count, code)}{code}"))

  def text(self) -> str:
    (size,) = self.numbers("I")
    if size > MAX_TEXT_BYTES:
      raise ValueError(f"a text of {size} bytes is above {MAX_TEXT_BYTES}")
    # UnicodeDecodeError is a ValueError.
    return self._take(size).decode()

  def check_empty(self) -> None:
    if self._at != len(self._body):
      raise ValueError(f"{len(self._body) - self._at} bytes are left over")

  def _within(self, count: int, code: str) -> int:
    """The count of a list, checked before memory is taken for it."""
    if count * struct.calcsize(f"!{code}") > len(self._body) - self._at:
      raise ValueError(f"a list of {count} is longer than its message")
    return count

  def _take(self, size: int) -> bytes:
    if size > len(self._body) - self._at:
      raise ValueError(f"{len(self._body)} bytes are too few for the message")
    self._at += size
    return self._body[self._at - size : self._at]


def _read_extend(rest: _Rest) -> Extend:
  weights, count = rest.numbers("IH")
  rows: dict[int, tuple[int, list[int]]] = {}
  for _ in range(count):
    slot, stay = rest.numbers("II")
    rows[slot] = (stay, rest.many("I"))
  if len(rows) < count or not all(ids for _, ids in rows.values()):
    raise ValueError("a slot is named twice, or has no ids")
  if not rows:
    raise ValueError("no slot is named")
  return Extend(weights, rows)


def _read_start(rest: _Rest) -> Start:
  slot, sampled, most, temperature, top_k, top_p, min_p, seed = rest.numbers(
    _HOW
  )
  stop_ids, forbidden = rest.many("I"), rest.many("I")
  biased, bias = rest.many("I"), rest.many("d")
  if len({*biased}) != len(bias) or len(biased) != len(bias):
    raise ValueError(f"{len(bias)} biases are of {len({*biased})} ids")
  numbers = (temperature, top_p, min_p, *bias)
  if not all(math.isfinite(x) for x in numbers):
    raise ValueError(f"{numbers} aren't finite")
  how = Sampling(
    max_tokens=most,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    min_p=min_p,
    seed=seed,
    stop_ids=tuple(stop_ids),
    forbidden=tuple(forbidden),
    logit_bias=dict(zip(biased, bias, strict=True)),
  )
  return Start(slot, sampled, how)


def _read_generate(rest: _Rest) -> Generate:
  weights, steps, drafts = rest.numbers("III")
  return Generate(weights, steps, drafts, rest.many("I"))


def _read_taken(rest: _Rest) -> Taken:
  weights, version = rest.numbers("Iq")
  return Taken(weights, version, rest.text(), rest.text())


def _read_refused(rest: _Rest) -> Refused:
  (weights,) = rest.numbers("I")
  return Refused(weights, rest.text())


_READ: dict[type[Any], Callable[[_Rest], Any]] = {
  Extend: _read_extend,
  Start: _read_start,
  Generate: _read_generate,
  Taken: _read_taken,
  Refused: _read_refused,
}
