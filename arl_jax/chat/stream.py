"""Sampled ids as marks and text, one token at a time.

A parser reads token by token, whatever pieces the ids come in: what it says of
a reply can't depend on how it was streamed.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Sequence
from typing import Literal

from arl_jax.chat.messages import Tool
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.replies import CallChecker, Delta, Reply, collect

_UNKNOWN = "\ufffd"  # What bytes read as that are no UTF-8, or not yet.
_LONGEST = 3  # Bytes of a character that isn't whole.
# Tokens that may wait before those whose text is certain are let go.
_MAX_WAIT = 8


class Detokenizer:
  """Text of tokens that come one by one; no half character is ever said."""

  def __init__(self, tokenizer: PretrainedTokenizer):
    self._tokenizer = tokenizer
    # Tokens that were said last, since some decoders look back; those that
    # wait; and what was said of both.
    self._context: list[int] = []
    self._waiting: list[int] = []
    self._said = ""

  def step(self, token: int) -> str:
    """What is certain now; all the text that came is the text of all tokens."""
    self._waiting.append(token)
    text = self._read([*self._context, *self._waiting])
    certain = text
    if text.endswith(_UNKNOWN):
      known = text.rstrip(_UNKNOWN)
      certain = text[: max(len(known), len(text) - _LONGEST)]
    fresh = certain[len(self._said) :]
    if certain is text:
      self._context, self._waiting = self._waiting, []
      self._said = self._read(self._context)
    else:
      self._said += fresh
      if len(self._waiting) > _MAX_WAIT:
        self._let_go(text)
    return fresh

  def flush(self) -> str:
    """What still waits; the next token begins a new text."""
    text = self._read([*self._context, *self._waiting]) if self._waiting else ""
    rest = text[len(self._said) :]
    self._context, self._waiting, self._said = [], [], ""
    return rest

  def _let_go(self, text: str) -> None:
    """Forgets the tokens before a place where the text can be cut."""
    count = len(self._waiting)
    for at in range(count - _LONGEST, count - _MAX_WAIT, -1):
      head = self._read([*self._context, *self._waiting[:at]])
      rest = self._waiting[at:]
      if self._said.startswith(head) and head + self._read(rest) == text:
        self._context, self._waiting = [], rest
        self._said = self._said[len(head) :]
        return

  def _read(self, ids: list[int]) -> str:
    return self._tokenizer.decode(ids, skip_special=False)


class StreamParser(abc.ABC):
  """Reads a reply while it is sampled; subclasses know a family's marks."""

  def __init__(
    self,
    tokenizer: PretrainedTokenizer,
    *,
    tags: Collection[str],
    ends: Collection[int],
    checker: CallChecker,
  ):
    """Begins a reply.

    Args:
      tokenizer: of the model.
      tags: marks of the family. One that the tokenizer has no token for is
        looked for in the text.
      ends: ids after which nothing is read.
      checker: of calls.
    """
    self._tokenizer = tokenizer
    self._names = {i: name for name, i in tokenizer.controls.items()}
    self._ends = frozenset(ends)
    self._checker = checker
    self._detokenizer = Detokenizer(tokenizer)
    spelled = sorted(set(tags) - tokenizer.controls.keys())
    self._tags = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
    self._starts = {tag[:n] for tag in spelled for n in range(1, len(tag))}
    self._longest = max(map(len, spelled), default=0)
    self._held = ""  # May be the beginning of a tag.
    self._out: list[Delta] = []
    self._over = False

  def feed(self, ids: Sequence[int]) -> list[Delta]:
    """Takes further sampled ids; pieces of the reply that are certain now."""
    for token in map(int, ids):
      self._take(token)
    return self._taken()

  def finish(self) -> list[Delta]:
    """The rest, when nothing more is sampled for whatever reason."""
    if not self._over:
      self._stop()
    return self._taken()

  @abc.abstractmethod
  def _on_text(self, text: str) -> None:
    """Takes a text that isn't empty and has no mark."""

  @abc.abstractmethod
  def _on_mark(self, name: str, text: str) -> None:
    """Takes a mark; as a mere text it reads `text`."""

  @abc.abstractmethod
  def _on_end(self) -> None:
    """Says what is left, at the end of the reply."""

  def _say(self, kind: Literal["content", "reasoning"], text: str) -> None:
    if text:
      self._out.append(Delta(kind=kind, text=text))

  def _take(self, token: int) -> None:
    # A model may have more rows than tokens; they read as nothing.
    if self._over or not 0 <= token < 1 << 32:
      return
    if token in self._ends:
      self._stop()
    elif (name := self._names.get(token)) is not None:
      self._flush()
      self._on_mark(name, self._tokenizer.decode([token]))
    else:
      self._scan(self._detokenizer.step(token))

  def _stop(self) -> None:
    self._flush()
    self._over = True
    self._on_end()

  def _flush(self) -> None:
    self._scan(self._detokenizer.flush())
    held, self._held = self._held, ""
    if held:
      self._on_text(held)

  def _scan(self, text: str) -> None:
    """Finds tags in the text; the beginning of one is held back."""
    if not text:
      return
    text, at = self._held + text, 0
    for match in self._tags.finditer(text):
      if match.start() > at:
        self._on_text(text[at : match.start()])
      self._on_mark(match[0], match[0])
      at = match.end()
    keep = min(len(text) - at, self._longest - 1)
    while keep > 0 and text[-keep:] not in self._starts:
      keep -= 1
    cut = len(text) - max(keep, 0)
    self._held = text[cut:]
    if cut > at:
      self._on_text(text[at:cut])

  def _taken(self) -> list[Delta]:
    """What was said since the last time, texts of a kind joined."""
    joined: list[Delta] = []
    texts: list[str] = []
    for delta in self._out:
      plain = delta.kind in ("content", "reasoning")
      if plain and joined and joined[-1].kind == delta.kind:
        texts.append(delta.text)
        continue
      _close(joined, texts)
      joined.append(delta)
      texts = [delta.text]
    _close(joined, texts)
    self._out = []
    return joined


def _close(joined: list[Delta], texts: list[str]) -> None:
  if len(texts) > 1:
    joined[-1] = Delta(kind=joined[-1].kind, text="".join(texts))


class ReplyReader(abc.ABC):
  """What formats have in common: whole replies are read as streamed ones."""

  @abc.abstractmethod
  def parser(
    self,
    tools: Sequence[Tool] = (),
    *,
    call_prefix: str = "call_",
    effort: str | None = None,
  ) -> StreamParser:
    """`parse` for ids that are yet to come, piece by piece."""

  def parse(
    self,
    ids: Sequence[int],
    tools: Sequence[Tool] = (),
    *,
    call_prefix: str = "call_",
    effort: str | None = None,
  ) -> Reply:
    """What sampled ids say; never raises.

    Args:
      ids: what was sampled, with or without the end mark.
      tools: the only ones that can be called.
      call_prefix: calls are named by it and a number.
      effort: as it was rendered.
    """
    parser = self.parser(tools, call_prefix=call_prefix, effort=effort)
    return collect([*parser.feed(ids), *parser.finish()])
