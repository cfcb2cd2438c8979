"""Messages to tokens and back, in a compact chat format.

  <|user|> question <|end|> <|assistant|>
  <|call|> search_corpus words ... <|end|>              sampled by the policy
  <|tool|> results [Token usage: 214/448] <|end|> <|assistant|>
  <c3> <c7> <|end|>                                     final message

A message may hold several calls, each behind its own mark. A message without a
call is final. Rendering only ever appends: what was sampled is kept as ids.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from arl_jax.chat import tokenizer as tok
from arl_jax.chat.replies import MalformedCall
from arl_jax.types import ToolCall

_USAGE = re.compile(r"\[Token usage: (\d+)/(\d+)\]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Message:
  """A parsed message: calls in order, or a final text."""

  calls: tuple[ToolCall | MalformedCall, ...] = ()
  final: str | None = None


class AgentRenderer(Protocol):
  """What an agent's harness needs of a chat format.

  Attributes:
    tokenizer: has `encode`, `decode`, `piece`, `count` and `vocab_size`.
  """

  tokenizer: Any

  @property
  def stop_ids(self) -> tuple[int, ...]: ...

  def block(self, text: str) -> list[int]:
    """A piece of an observation, which may go again as a whole."""

  def prompt(
    self, text: str, tools: Collection[str] | None = None
  ) -> list[int]:
    """All that comes before the policy's first turn.

    Args:
      text: of the opening message.
      tools: that are told of, where the format tells of tools; None for all.
    """

  def open_turn(self) -> list[int]:
    """What stands before everything the policy samples."""

  def open_tool(self, tool: str = "") -> list[int]:
    """What stands between a message of the policy and an observation.

    Args:
      tool: that the message called first; "" if none that there is.
    """

  def close(self) -> list[int]:
    """Ends a message of the policy that was cut off."""

  def close_tool(self) -> list[int]:
    """Ends an observation."""

  def usage(self, used: int, budget: int) -> list[int]:
    """The line that says how full the context is."""

  def calls(self, calls: Sequence[ToolCall]) -> list[int]:
    """A turn's calls as a policy would sample them, end mark included."""

  def answer(self, text: str) -> list[int]:
    """A final message as a policy would sample it, end mark included."""

  def parse(self, ids: Sequence[int], tools: Collection[str]) -> Message:
    """Parses a sampled message."""

  def observed(self, ids: Sequence[int]) -> list[str]:
    """Texts of the observations in a context."""


class Renderer:
  """Renders and parses with one tokenizer."""

  def __init__(self, tokenizer: tok.Tokenizer):
    self.tokenizer = tokenizer
    marks = tokenizer.controls
    self._user, self._tool = marks[tok.USER], marks[tok.TOOL]
    self._call, self.end = marks[tok.CALL], marks[tok.END]
    self._assistant = marks[tok.ASSISTANT]

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return (self.end,)

  def text(self, text: str) -> list[int]:
    """One piece of text; its first word is encoded like any other."""
    text = " ".join(text.split())
    # A symbol such as <c3> stands without a space, as the policy samples it.
    return self.tokenizer.encode(text if text.startswith("<") else " " + text)

  def block(self, text: str) -> list[int]:
    return self.text(text)

  def prompt(
    self, text: str, tools: Collection[str] | None = None
  ) -> list[int]:
    del tools  # The format tells of none.
    return [self._user, *self.text(text), self.end]

  def open_turn(self) -> list[int]:
    """What stands before everything the policy samples."""
    return [self._assistant]

  def open_tool(self, tool: str = "") -> list[int]:
    return [self._tool]

  def close(self) -> list[int]:
    return [self.end]

  def close_tool(self) -> list[int]:
    return [self.end]

  def usage(self, used: int, budget: int) -> list[int]:
    return self.tokenizer.encode(usage_line(used, budget))

  def call(self, call: ToolCall) -> list[int]:
    """A call as a policy would sample it, without the end mark."""
    name = self.tokenizer.encode(call.name)
    return [self._call, *name, *self.text(call.argument)]

  def calls(self, calls: Sequence[ToolCall]) -> list[int]:
    return [*itertools.chain.from_iterable(map(self.call, calls)), self.end]

  def answer(self, text: str) -> list[int]:
    return [*self.text(text), self.end]

  def observed(self, ids: Sequence[int]) -> list[str]:
    """Texts of the observations in a context."""
    texts: list[str] = []
    begun: int | None = None
    for at, token in enumerate(ids):
      if token == self._tool:
        begun = at + 1
      elif token == self.end and begun is not None:
        texts.append(self.tokenizer.decode(ids[begun:at]))
        begun = None
    return texts

  def parse(self, ids: Sequence[int], tools: Collection[str]) -> Message:
    """Parses sampled ids; the end mark may be there or not.

    Anything that isn't exactly a call of a known tool with an argument comes
    back as `MalformedCall`: nothing is guessed.
    """
    ids = [int(i) for i in ids]
    if ids and ids[-1] == self.end:
      ids = ids[:-1]
    if self._call not in ids:
      stray = set(ids) & set(self.tokenizer.controls.values())
      return Message(final="" if stray else self.tokenizer.decode(ids).strip())
    first = ids.index(self._call)
    calls: list[ToolCall | MalformedCall] = []
    if first > 0:
      prose = self.tokenizer.decode(ids[:first])
      calls.append(MalformedCall(text=prose, problem="text before the call"))
    for part in _split(ids[first + 1 :], self._call):
      calls.append(self._parse_call(part, tools))
    return Message(calls=tuple(calls))

  def _parse_call(
    self, ids: list[int], tools: Collection[str]
  ) -> ToolCall | MalformedCall:
    text = self.tokenizer.decode(ids)
    if set(ids) & set(self.tokenizer.controls.values()):
      return MalformedCall(text=text, problem="a mark inside a call")
    # The longest, since one name may begin like another.
    name = max((n for n in tools if text.startswith(n)), key=len, default=None)
    if name is None:
      return MalformedCall(text=text, problem="no such tool")
    rest = text[len(name) :]
    if not rest.strip():
      return MalformedCall(text=text, problem="no argument")
    if rest[0] not in " <":
      return MalformedCall(text=text, problem="no such tool")
    return ToolCall(name=name, argument=rest.strip())


def usage_line(used: int, budget: int) -> str:
  return f"[Token usage: {used}/{budget}]"


def read_usage(texts: Sequence[str]) -> float:
  """Share of the token budget that the newest `usage_line` tells; 0 if none."""
  found = _USAGE.findall(" ".join(texts))
  return int(found[-1][0]) / int(found[-1][1]) if found else 0.0


def usage_symbols(budget: int) -> tuple[str, ...]:
  """Parts of `usage_line` worth a token each."""
  return ("[Token usage: ", f"/{budget}]")


def _split(ids: list[int], mark: int) -> list[list[int]]:
  parts: list[list[int]] = [[]]
  for i in ids:
    if i == mark:
      parts.append([])
    else:
      parts[-1].append(i)
  return parts
