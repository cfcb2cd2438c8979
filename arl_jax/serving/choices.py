"""One choice of an answer: tokens as they come, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

from arl_jax.chat.replies import Delta
from arl_jax.serving.stream import Stream, joined
from arl_jax.serving.text_stream import StopCut, TextStream
from arl_jax.types import Sample

# Kinds of deltas that come in pieces.
_TEXTS = ("content", "reasoning")


class Reader(Protocol):
  """Turns tokens into what they say, as they come."""

  def feed(self, ids: Sequence[int]) -> list[Delta]: ...

  def finish(self) -> list[Delta]: ...


class PlainReader:
  """Tokens that are mere text."""

  def __init__(self, decode: Callable[[list[int]], str]):
    self._text = TextStream(decode)

  def feed(self, ids: Sequence[int]) -> list[Delta]:
    return _content(self._text.feed(ids))

  def finish(self) -> list[Delta]:
    return _content(self._text.feed((), last=True))


class Choice:
  """What one request samples, read.

  Attributes:
    index: of the choice.
    deltas: everything that was said so far.
    begun: whether a stream's first part was sent.
    called: calls that were said so far.
  """

  def __init__(
    self,
    index: int,
    stream: Stream,
    reader: Reader,
    stop_strings: Iterable[str],
    on_part: Callable[[Sample], Any],
  ):
    """Reads a stream.

    Args:
      index: of the choice.
      stream: its tokens.
      reader: what they say.
      stop_strings: content, or reasoning, ends before the first of them.
      on_part: told of all tokens as they come.
    """
    self.index, self.stream, self.begun = index, stream, False
    self.deltas: list[Delta] = []
    self.called = 0
    self._kind: Literal["content", "reasoning", "call", "malformed"] = "content"
    self._reader, self._cut = reader, StopCut(tuple(stop_strings))
    self._on_part = on_part
    self._parts: list[Sample] = []

  async def __anext__(self) -> tuple[Sample, list[Delta]]:
    """The next tokens and what can be said with them; see `Stream`."""
    part = await anext(self.stream)
    self._parts.append(part)
    self._on_part(part)
    deltas = self._reader.feed(part.ids.tolist())
    if part.finish is not None:
      deltas += self._reader.finish()
    deltas = self._until_stop(deltas, last=part.finish is not None)
    self.deltas += deltas
    self.called += sum(d.call is not None for d in deltas)
    return part, deltas

  def __aiter__(self) -> Choice:
    return self

  @property
  def sample(self) -> Sample:
    """All tokens so far, at least one part."""
    return joined(self._parts)

  @property
  def text(self) -> str:
    """Content as a client sees it, calls that couldn't be read included."""
    told = ("content", "malformed")
    return "".join(d.text for d in self.deltas if d.kind in told)

  @property
  def reasoning(self) -> str:
    return "".join(d.text for d in self.deltas if d.kind == "reasoning")

  @property
  def calls(self) -> tuple[Any, ...]:
    return tuple(d.call for d in self.deltas if d.call is not None)

  @property
  def finish_reason(self) -> str:
    """In OpenAI's words."""
    if self._parts[-1].finish == "length":
      return "length"
    return "tool_calls" if self.calls else "stop"

  def _until_stop(self, deltas: list[Delta], *, last: bool) -> list[Delta]:
    said: list[Delta] = []
    for delta in deltas:
      if delta.kind != self._kind:
        # What came before it is whole.
        said += self._said("", last=True)
        self._kind = delta.kind
      said += self._said(delta.text) if delta.kind in _TEXTS else [delta]
    if last:
      said += self._said("", last=True)
    return said

  def _said(self, text: str, *, last: bool = False) -> list[Delta]:
    if self._kind not in _TEXTS:
      return []
    found = self._cut.feed(text, last=last)
    return [Delta(kind=self._kind, text=found)] if found else []


def _content(text: str) -> list[Delta]:
  return [Delta(kind="content", text=text)] if text else []
