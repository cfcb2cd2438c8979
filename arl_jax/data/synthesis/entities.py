"""What texts name, and which texts name the same."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection

from arl_jax.data.synthesis.domains import Domain
from arl_jax.data.synthesis.forms import squeeze
from arl_jax.data.synthesis.quotes import without_links
from arl_jax.envs.search.index import IndexCorpus

# An entry of a list is a sentence, too.
_ENTRY = r"(?:[-*+•]|\d{1,3}[.)])[ \t]"
_SENTENCE_END = re.compile(rf"(?<=[.!?;:])\s+|\n\s*\n|\n[ \t]*(?={_ENTRY})")
_BEGINNING = re.compile(rf"\s*{_ENTRY}\s*")
# Letters and digits of an entity; longer ones are no names.
_KEY_CHARS = (4, 60)
# What often begins a sentence, and so seems part of a name.
_OPENINGS = frozenset(
  re.findall(
    r"\w+",
    "a after all an and as at but by each every for from her his if in it its"
    " my no on our see since some that the their these this those to we when"
    " where while with you your",
  )
)


@dataclasses.dataclass(frozen=True, slots=True)
class Mention:
  """Where a sentence names something.

  Attributes:
    start: first character.
    end: behind the last.
    key: letters and digits of the name, the same for all writings.
    kind: index in the domain's entities.
  """

  start: int
  end: int
  key: str
  kind: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sentence:
  """One line of a chunk's text, with what it names from left to right."""

  text: str
  mentions: tuple[Mention, ...]


@dataclasses.dataclass(slots=True)
class Entity:
  """Something that the corpus names.

  Attributes:
    text: as it's written first.
    kind: index in the domain's entities.
    chunks: by document, positions of the chunks that name it.
  """

  text: str
  kind: int
  chunks: dict[str, list[int]]


class EntityReader:
  """Finds what a domain's texts name."""

  def __init__(self, domain: Domain):
    self._kinds = [re.compile(kind.pattern) for kind in domain.entities]
    self._skipped = [re.compile(pattern) for pattern in domain.boilerplate]

  def sentences(self, text: str) -> tuple[Sentence, ...]:
    """Sentences of a text that name something, in order.

    Without boilerplate, links and marks of lists: a piece of one is still a
    quote of the text.
    """
    lines = (
      "\n" if any(p.search(line) for p in self._skipped) else line
      for line in text.splitlines()
    )
    found = []
    plain_text = without_links("\n".join(lines))
    for sentence in _SENTENCE_END.split(plain_text):
      plain = " ".join(sentence[_beginning(sentence) :].split())
      if mentions := self.mentions(plain):
        found.append(Sentence(plain, mentions))
    return tuple(found)

  def mentions(self, sentence: str) -> tuple[Mention, ...]:
    """What a sentence names; of two that overlap, the kind that comes first."""
    found: list[Mention] = []
    for kind, pattern in enumerate(self._kinds):
      for match in pattern.finditer(sentence):
        start, end = _trimmed(sentence, *match.span())
        # What is left of a name may be none.
        if start > match.start() and not pattern.fullmatch(
          sentence, start, end
        ):
          continue
        key = squeeze(sentence[start:end])
        if not _KEY_CHARS[0] <= len(key) <= _KEY_CHARS[1]:
          continue
        if all(end <= m.start or start >= m.end for m in found):
          found.append(Mention(start, end, key, kind))
    return tuple(sorted(found, key=lambda m: m.start))


def _beginning(sentence: str) -> int:
  match = _BEGINNING.match(sentence)
  return match.end() if match else 0


def _trimmed(sentence: str, start: int, end: int) -> tuple[int, int]:
  """Without words in front that begin a sentence."""
  while True:
    word, space, _ = sentence[start:end].partition(" ")
    if not space or word.lower() not in _OPENINGS:
      return start, end
    start += len(word) + 1


class EntityGraph:
  """Entities of some documents; those they share link them.

  Args:
    corpus: whose chunks are read.
    domain: says what is an entity.
    documents: ids of those that count.
    most_documents: an entity in more of them is common and names nothing.
  """

  def __init__(
    self,
    corpus: IndexCorpus,
    domain: Domain,
    documents: Collection[str],
    *,
    most_documents: int = 12,
  ):
    self._corpus = corpus
    self._reader = EntityReader(domain)
    self._most = most_documents
    self.entities: dict[str, Entity] = {}
    self.sentences = functools.lru_cache(maxsize=4096)(self._read)
    self.links = functools.lru_cache(maxsize=16)(self._links)
    for position, chunk in enumerate(corpus.chunks):
      if chunk.doc_id in documents:
        self._add(position, chunk.doc_id)

  def _read(self, position: int) -> tuple[Sentence, ...]:
    """Sentences of the chunk at a position, with what they name."""
    return self._reader.sentences(self._corpus.chunks[position].text)

  def _add(self, position: int, document: str) -> None:
    for sentence in self._read(position):
      for mention in sentence.mentions:
        entity = self.entities.get(mention.key)
        if entity is None:
          text = sentence.text[mention.start : mention.end]
          entity = Entity(text, mention.kind, {})
          self.entities[mention.key] = entity
        chunks = entity.chunks.setdefault(document, [])
        if not chunks or chunks[-1] != position:
          chunks.append(position)

  def mentions(self, sentence: str) -> tuple[Mention, ...]:
    """What a piece of a sentence names."""
    return self._reader.mentions(sentence)

  def _links(self, least: int) -> tuple[str, ...]:
    """Keys of entities in at least so many documents, but not too many."""
    return tuple(
      sorted(
        key
        for key, entity in self.entities.items()
        if least <= len(entity.chunks) <= self._most
      )
    )
