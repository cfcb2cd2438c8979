"""An author without a model: tasks from what documents name in common.

An entity that three documents name, and few others, is the answer of a first
hop: each clue is a piece of a sentence about it, in which a mark stands for it.
A further hop goes to another document that names the last answer, and asks for
something that its sentence names beside it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from arl_jax.data.synthesis.domains import Domain
from arl_jax.data.synthesis.draft import (
  CLUE_BREAK,
  FIRST_CLUES,
  Clue,
  Draft,
  Item,
  Refused,
  Request,
)
from arl_jax.data.synthesis.entities import EntityGraph, Mention, Sentence
from arl_jax.data.synthesis.forms import holds, squeeze
from arl_jax.data.synthesis.verify import MAX_DISTRACTORS
from arl_jax.envs.search.environment import neutralised
from arl_jax.envs.search.index import IndexCorpus

GENERATOR = "mined/1"

# Words with this many letters say what a clue is about.
_LETTERS = 4
_FEWEST_LONG_WORDS = 3
# Of the words of a clue, those of letters alone.
_PLAIN_SHARE = 0.6
_PUNCTUATION = ".,;:!?()[]{}\"'`*_<>|"
# Entities beside the last answer that are tried for a further hop.
_TRIES = 24


class MinedAuthor:
  """A `TaskAuthor` that follows links between documents.

  Args:
    corpus: that tasks are about.
    domain: what its texts name, and how tasks read.
    most_documents: that may name the entity of a first hop.
  """

  generator = GENERATOR

  def __init__(
    self, corpus: IndexCorpus, domain: Domain, *, most_documents: int = 12
  ):
    self._corpus, self._domain = corpus, domain
    self._most = most_documents
    self._graphs: dict[frozenset[str], EntityGraph] = {}

  def _graph(self, documents: frozenset[str]) -> EntityGraph:
    if documents not in self._graphs:
      self._graphs[documents] = EntityGraph(
        self._corpus, self._domain, documents, most_documents=self._most
      )
    return self._graphs[documents]

  async def explore(self, request: Request) -> Draft:
    """See `TaskAuthor`."""
    graph, draw = self._graph(request.documents), request.draw
    # A further hop needs one more document that names the answer.
    keys = graph.links(FIRST_CLUES + (request.hops > 1))
    if not keys:
      raise Refused("no_shared_entity")
    key = draw.choice(keys)
    entity = graph.entities[key]
    documents = sorted(entity.chunks)
    draw.shuffle(documents)
    pieces = []
    for document in documents:
      if piece := self._piece(graph, entity.chunks[document], key, draw):
        pieces.append(piece)
      if len(pieces) == FIRST_CLUES:
        break
    else:
      raise Refused("no_clue", f"{entity.text} in {', '.join(documents)}")
    return Draft(
      clues=tuple(self._clue(p, text) for p, text, _ in pieces),
      question=self._question(entity.kind, 1, draw),
      truth=entity.text,
      items=tuple(self._item(*piece) for piece in pieces),
    )

  async def distract(
    self, draft: Draft, candidates: Sequence[str]
  ) -> Sequence[str]:
    """The candidates that are most similar."""
    return candidates[:MAX_DISTRACTORS]

  async def extend(self, draft: Draft, request: Request) -> Draft:
    """See `TaskAuthor`."""
    graph, draw = self._graph(request.documents), request.draw
    key = squeeze(draft.truth)
    last = draft.hops + 1 >= request.hops
    marks = {
      squeeze(name): f"[{n}]"
      for n, name in enumerate((*draft.bridges, draft.truth), 1)
    }
    mark = f"[{draft.hops + 1}]"
    places = self._places(graph, key, draft, draw)
    for position, sentence, other in places:
      if other.key in marks:
        continue
      entity = graph.entities[other.key]
      # The next hop leaves this chunk through it.
      if not last and not 2 <= len(entity.chunks) <= self._most:
        continue
      if self._is_known(entity.text, draft):
        continue
      found = self._cut(
        graph, sentence, {**marks, other.key: mark}, (key, other.key), draw
      )
      if found is None:
        continue
      text, window = found
      items = tuple(
        Item(
          chunk_id=item.chunk_id,
          clue_quotes=item.clue_quotes,
          item_quotes=item.item_quotes,
        )
        for item in draft.items
      )
      return Draft(
        clues=(*draft.clues, self._clue(position, text)),
        question=self._question(entity.kind, draft.hops + 1, draw),
        truth=entity.text,
        items=(*items, self._item(position, text, window)),
        bridges=(*draft.bridges, draft.truth),
      )
    raise Refused("no_further_document", draft.truth)

  def _places(
    self, graph: EntityGraph, key: str, draft: Draft, draw: random.Random
  ) -> Iterator[tuple[int, Sentence, Mention]]:
    """Sentences elsewhere that name the entity, and what else each names."""
    used = {self._corpus.chunk(i.chunk_id).doc_id for i in draft.items}
    chunks = graph.entities[key].chunks
    documents = sorted(set(chunks) - used)
    draw.shuffle(documents)
    places = [
      (position, sentence, mention)
      for document in documents
      for position in chunks[document]
      for sentence in graph.sentences(position)
      if any(m.key == key for m in sentence.mentions)
      for mention in sentence.mentions
      if mention.key != key
    ]
    yield from draw.sample(places, min(_TRIES, len(places)))

  def _is_known(self, name: str, draft: Draft) -> bool:
    """Whether a searcher comes across a name in an earlier hop."""
    texts = (self._corpus.chunk(item.chunk_id).text for item in draft.items)
    return holds(draft.prompt, name) or any(holds(t, name) for t in texts)

  def _piece(
    self,
    graph: EntityGraph,
    positions: Sequence[int],
    key: str,
    draw: random.Random,
  ) -> tuple[int, str, str] | None:
    """A clue from some sentence of some chunk, and what it was made of."""
    sentences = [
      (position, sentence)
      for position in positions
      for sentence in graph.sentences(position)
      if any(m.key == key for m in sentence.mentions)
    ]
    draw.shuffle(sentences)
    for position, sentence in sentences:
      if found := self._cut(graph, sentence, {key: "[1]"}, (key,), draw):
        return position, *found
    return None

  def _cut(
    self,
    graph: EntityGraph,
    sentence: Sentence,
    marks: Mapping[str, str],
    wanted: Sequence[str],
    draw: random.Random,
  ) -> tuple[str, str] | None:
    """A window of whole words around what is wanted, with marks and without."""
    low, high = self._domain.clue_words
    # Short clues are harder to search for.
    window = _window(sentence, wanted, low, draw.randint(low, high))
    if window is None:
      return None
    text, seen = window, set()
    for mention in reversed(graph.mentions(window)):
      if mention.key in marks:
        seen.add(mention.key)
        mark = marks[mention.key]
        text = text[: mention.start] + mark + text[mention.end :]
    clue = neutralised(text).replace(CLUE_BREAK, "; ").strip(" ;,:")
    if not seen.issuperset(wanted) or not _says_something(clue):
      return None
    # A form that is no mention, such as "test case" for TestCase.
    names = [graph.entities[key].text for key in marks]
    if any(holds(clue, name) for name in names):
      return None
    return clue, window

  def _clue(self, position: int, text: str) -> Clue:
    return Clue(text=text, chunk_id=self._corpus.chunks[position].chunk_id)

  def _item(self, position: int, text: str, window: str) -> Item:
    return Item(
      chunk_id=self._corpus.chunks[position].chunk_id,
      clue_quotes=(text,),
      item_quotes=(window,),
      truth_quotes=(window,),
    )

  def _question(self, kind: int, hop: int, draw: random.Random) -> str:
    domain = self._domain
    templates = domain.questions if hop == 1 else domain.further_questions
    noun = domain.entities[kind].noun
    return draw.choice(templates).format(noun=noun, mark=f"[{hop}]")


def _says_something(clue: str) -> bool:
  """Whether a clue is words, and not a table, a path or a signature."""
  words = [word.strip(_PUNCTUATION) for word in clue.split()]
  plain = [word for word in words if word.isalpha()]
  long = {word.lower() for word in plain if len(word) >= _LETTERS}
  return (
    len(plain) >= _PLAIN_SHARE * len(words) and len(long) >= _FEWEST_LONG_WORDS
  )


def _window(
  sentence: Sentence, wanted: Sequence[str], fewest: int, most: int
) -> str | None:
  """The words around the first mention of each wanted key, if they are near.

  Args:
    sentence: that names them.
    wanted: keys.
    fewest: words, or there is no window.
    most: words of it.
  """
  text = sentence.text
  spans = []
  for key in wanted:
    mention = next(m for m in sentence.mentions if m.key == key)
    first = text.count(" ", 0, mention.start)
    spans.append((first, text.count(" ", 0, mention.end)))
  start, end = min(s for s, _ in spans), max(e for _, e in spans) + 1
  words = text.split(" ")
  if len(words) < fewest or end - start > most:
    return None
  start = max(0, min(start - (most - (end - start)) // 2, len(words) - most))
  return " ".join(words[start : start + most])
