"""What an author proposes, before anything of it is believed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from arl_jax.data.synthesis.quotes import Quote

# Stands between the clues and the question of a prompt.
CLUE_BREAK = " ; "
# Of a task of one hop; each further hop has one more.
FIRST_CLUES = 3


class Refused(Exception):
  """A draft that becomes no task.

  Attributes:
    reason: one of few, what is counted.
    example: what it was about, in short.
  """

  def __init__(self, reason: str, example: str = ""):
    super().__init__(reason)
    self.reason, self.example = reason, " ".join(example.split())[:200]


class AuthorFailed(OSError):
  """What an author needs can't be reached: says nothing about a draft."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Clue:
  """A hint, and the chunk that it was written from."""

  text: str
  chunk_id: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Item:
  """A chunk that supports the answer, with quotes that say how.

  Attributes:
    chunk_id: of the chunk.
    clue_quotes: parts of the clues that the chunk answers to.
    item_quotes: parts of the chunk that answer to them.
    truth_quotes: parts of the chunk that hold the answer.
  """

  chunk_id: str
  clue_quotes: tuple[str, ...] = ()
  item_quotes: tuple[str, ...] = ()
  truth_quotes: tuple[str, ...] = ()

  @property
  def quotes(self) -> list[Quote]:
    """All quotes, by kind."""
    kinds = {
      "clue": self.clue_quotes,
      "item": self.item_quotes,
      "truth": self.truth_quotes,
    }
    return [
      Quote(kind=kind, chunk_id=self.chunk_id, text=text)
      for kind, texts in kinds.items()
      for text in texts
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
  """A task as its author proposes it.

  Attributes:
    clues: three of three documents, and one more for each further hop.
    question: what is asked.
    truth: the answer.
    items: chunks that support it.
    bridges: answers of the earlier hops, which the prompt doesn't name.
  """

  clues: tuple[Clue, ...]
  question: str
  truth: str
  items: tuple[Item, ...]
  bridges: tuple[str, ...] = ()

  @property
  def hops(self) -> int:
    return len(self.bridges) + 1

  @property
  def prompt(self) -> str:
    return CLUE_BREAK.join((*(c.text for c in self.clues), self.question))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
  """What a task may be made of.

  Attributes:
    documents: ids that it may use.
    hops: that it shall have in the end.
    draw: of all that is left to chance.
  """

  documents: frozenset[str]
  hops: int
  draw: random.Random


@runtime_checkable
class TaskAuthor(Protocol):
  """The part of task generation that needs ideas.

  Each method raises `Refused` if it finds nothing, and `AuthorFailed` if
  something other than the author is at fault.

  Attributes:
    generator: name and version, kept with each task.
  """

  @property
  def generator(self) -> str: ...

  async def explore(self, request: Request) -> Draft:
    """Proposes a task of one hop."""

  async def distract(
    self, draft: Draft, candidates: Sequence[str]
  ) -> Sequence[str]:
    """Chooses chunk ids, all of them candidates, that don't help to answer."""

  async def extend(self, draft: Draft, request: Request) -> Draft:
    """Proposes the same task with a hop more, whose bridge is the truth."""
