"""Search tasks made from a corpus alone, without a model.

A task's prompt is a few *clues*; a clue is a few words of one chunk, which a
search for them finds. The chunks with all words of a clue are a *fact*; the
answer is a term in a chunk of the last fact. A stand-in for the published
explore-and-verify generation: no question is written, but each task is verified
the way the environment will be searched.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from arl_jax import types
from arl_jax.envs.search import index as index_lib

GENERATOR = "clues/1"

_MIN_LETTERS = 4
_MAX_WORD_TOKENS = 1
_MIN_FREQUENCY, _MAX_FREQUENCY_SHARE = 2, 0.02
# In a small corpus the share would leave no word.
_ALWAYS_ALLOWED_FREQUENCY = 4
_MAX_FACT_CHUNKS = 3
_MAX_RANK = 3
# Draws for each task asked before the corpus is called too small.
_DRAWS_PER_TASK, _MIN_DRAWS = 100, 2000

_WORD = re.compile(r"\w+")
_PLAIN = re.compile(rf"[a-z]{{{_MIN_LETTERS},}}")
_SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|\n\s*\n")
# Dunder, snake_case or CamelCase.
_IDENTIFIER = re.compile(
  r"(?<!\w)(?:__\w+?__|[A-Za-z]\w*_\w+|[A-Z]\w*[a-z]\w*[A-Z]\w*)(?!\w)"
)


@dataclasses.dataclass(frozen=True)
class TaskSet:
  """Tasks for training and for evaluation, from disjoint documents.

  Attributes:
    train: in order of generation.
    heldout: in order of generation.
    rejected: draws that gave no task, counted by reason.
  """

  train: tuple[types.Task, ...]
  heldout: tuple[types.Task, ...]
  rejected: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class _Clue:
  """Words, the chunk they were taken from, and the chunks with all of them."""

  words: tuple[str, ...]
  source: int
  fact: tuple[int, ...]


class _Rejected(Exception):
  """A draw that gives no task; its argument is the reason."""


def synthesise(
  corpus: index_lib.IndexCorpus,
  index: index_lib.Index,
  *,
  count_tokens: Callable[[str], int],
  seed: int,
  train: int,
  heldout: int,
  clue_words: int = 3,
  hops: int = 2,
  heldout_share: float = 0.25,
) -> TaskSet:
  """Makes verified search tasks; the same arguments give the same tasks.

  Documents are shuffled by `seed` into the two splits. All chunks of a task's
  facts lie in documents of its split. A clue's words are distinct lower-case
  words of one sentence, at least 4 letters and one token long, in 2
  chunks to 2 % of the chunks (or 4); at most 3 chunks hold all of them, and a
  search for the clue gives one of these at rank 3 or better. The answer is in
  no chunk of another fact and not in the prompt.

  `Task.prompt` is the clues' words, clues separated by " ; ". `Task.truth` has
  `answer`, `relevant`, `facts` and `answer_chunks` as `SearchReward` reads
  them. `Task.provenance` has `source_chunks`, `seed` and `generator`.

  Args:
    corpus: what `index` was built from.
    index: what the tasks will be searched with.
    count_tokens: tokens of a text.
    seed: of every choice.
    train: number of training tasks.
    heldout: number of held-out tasks.
    clue_words: words of a clue.
    hops: clues of a task, from as many documents.
    heldout_share: of the documents, in (0, 1).

  Raises:
    ValueError: an argument is out of its range, or the corpus is too small for
      that many tasks.
  """
  for name, value in (("clue_words", clue_words), ("hops", hops)):
    if value < 1:
      raise ValueError(f"{name} is {value}, not at least 1")
  for name, value in (("train", train), ("heldout", heldout)):
    if value < 0:
      raise ValueError(f"{name} is {value}, not at least 0")
  if index.corpus.digest != corpus.digest:
    raise ValueError("index was built from another corpus; build it from this")
  if not 0 < heldout_share < 1:
    raise ValueError(f"heldout_share is {heldout_share}, not between 0 and 1")
  source = _ClueSource(corpus, index, count_tokens, clue_words)
  rejected: Counter[str] = Counter()
  prompts: set[str] = set()
  made = {}
  for split, count in (("train", train), ("heldout", heldout)):
    documents = _split_documents(corpus, seed, heldout_share)[split]
    made[split] = _make_split(
      source, documents, split, count, hops, seed, prompts, rejected
    )
  return TaskSet(made["train"], made["heldout"], dict(sorted(rejected.items())))


def _split_documents(
  corpus: index_lib.IndexCorpus, seed: int, heldout_share: float
) -> dict[str, frozenset[str]]:
  names = sorted(d.doc_id for d in corpus.documents)
  random.Random(f"documents {seed}").shuffle(names)
  cut = round(len(names) * heldout_share)
  return {"train": frozenset(names[cut:]), "heldout": frozenset(names[:cut])}


def _make_split(
  source: _ClueSource,
  documents: frozenset[str],
  split: str,
  count: int,
  hops: int,
  seed: int,
  prompts: set[str],
  rejected: Counter[str],
) -> tuple[types.Task, ...]:
  chunks = [
    i for i, c in enumerate(source.corpus.chunks) if c.doc_id in documents
  ]
  # A string's seed doesn't depend on the process, as its hash would.
  rng = random.Random(f"{split} {seed}")
  tasks: list[types.Task] = []
  draws = _MIN_DRAWS + _DRAWS_PER_TASK * count if chunks else 0
  for _ in range(draws):
    if len(tasks) == count:
      break
    try:
      task = _make_task(source, chunks, documents, split, hops, seed, rng)
      if task.prompt in prompts:
        raise _Rejected("duplicate_prompt")
    except _Rejected as reason:
      rejected[str(reason)] += 1
      continue
    prompts.add(task.prompt)
    tasks.append(task)
  if len(tasks) < count:
    raise ValueError(
      f"{split} is {count} tasks, but {len(documents)} documents with"
      f" {len(chunks)} chunks gave {len(tasks)}; ask for fewer or give more"
      " text"
    )
  return tuple(tasks)


def _make_task(
  source: _ClueSource,
  chunks: Sequence[int],
  documents: frozenset[str],
  split: str,
  hops: int,
  seed: int,
  rng: random.Random,
) -> types.Task:
  clues = [source.draw(rng.choice(chunks), rng) for _ in range(hops)]
  all_chunks = source.corpus.chunks
  relevant = sorted({i for clue in clues for i in clue.fact})
  if len({all_chunks[clue.source].doc_id for clue in clues}) < hops:
    raise _Rejected("same_document")
  if any(all_chunks[i].doc_id not in documents for i in relevant):
    raise _Rejected("other_split")
  if len(relevant) < sum(len(clue.fact) for clue in clues):
    raise _Rejected("overlapping_facts")
  prompt = " ; ".join(" ".join(clue.words) for clue in clues)
  answer = _answer(source, clues, prompt, rng)
  ids = [all_chunks[i].chunk_id for i in relevant]
  facts = [[all_chunks[i].chunk_id for i in clue.fact] for clue in clues]
  holders = [
    all_chunks[i].chunk_id for i in relevant if answer in all_chunks[i].text
  ]
  content = "\0".join((prompt, answer, *ids)).encode()
  return types.Task(
    task_id=f"py-{hashlib.sha256(content).hexdigest()[:12]}",
    prompt=prompt,
    truth={
      "answer": answer,
      "relevant": ids,
      "facts": facts,
      "answer_chunks": holders,
    },
    split=split,
    provenance={
      "source_chunks": [all_chunks[clue.source].chunk_id for clue in clues],
      "source": f"clues_{len(clues)}",
      "hops": len(clues),
      "seed": seed,
      "generator": GENERATOR,
    },
  )


def _answer(
  source: _ClueSource, clues: Sequence[_Clue], prompt: str, rng: random.Random
) -> str:
  """A term of the last clue's source chunk: identifiers first, then words."""
  chunks = source.corpus.chunks
  text = chunks[clues[-1].source].text
  elsewhere = "\n".join(
    chunks[i].text for clue in clues[:-1] for i in clue.fact
  )
  taken = f"{prompt}\n{elsewhere}".lower()
  for candidates in (_IDENTIFIER.findall(text), source.rare_words(text)):
    allowed = [c for c in dict.fromkeys(candidates) if c.lower() not in taken]
    if allowed:
      # The rarest says the most; a draw among equals keeps answers varied.
      fewest = min(source.frequency(c) for c in allowed)
      return rng.choice([c for c in allowed if source.frequency(c) == fewest])
  raise _Rejected("no_answer")


class _ClueSource:
  """Draws verified clues; keeps which chunks hold which word."""

  def __init__(
    self,
    corpus: index_lib.IndexCorpus,
    index: index_lib.Index,
    count_tokens: Callable[[str], int],
    clue_words: int,
  ):
    self.corpus = corpus
    self._index = index
    self._clue_words = clue_words
    self._holders: dict[str, set[int]] = defaultdict(set)
    for i, chunk in enumerate(corpus.chunks):
      for word in _WORD.findall(chunk.text.lower()):
        self._holders[word].add(i)
    share = int(_MAX_FREQUENCY_SHARE * len(corpus.chunks))
    most = max(_ALWAYS_ALLOWED_FREQUENCY, share)
    self._eligible = {
      word
      for word, holders in self._holders.items()
      if _PLAIN.fullmatch(word)
      and _MIN_FREQUENCY <= len(holders) <= most
      and count_tokens(word) <= _MAX_WORD_TOKENS
    }
    self._sentences = functools.cache(self._find_sentences)
    self._verify = functools.cache(self._is_found)

  def draw(self, chunk: int, rng: random.Random) -> _Clue:
    """A clue from a chunk (its position). Raises _Rejected."""
    sentences = self._sentences(chunk)
    if not sentences:
      raise _Rejected("few_words")
    sentence = rng.choice(sentences)
    picked = rng.sample(range(len(sentence)), self._clue_words)
    words = tuple(sentence[i] for i in sorted(picked))
    holders = (self._holders[word] for word in words)
    fact = tuple(sorted(set.intersection(*holders)))
    if len(fact) > _MAX_FACT_CHUNKS:
      raise _Rejected("too_common")
    if not self._verify(words, fact):
      raise _Rejected("not_found")
    return _Clue(words, chunk, fact)

  def _find_sentences(self, chunk: int) -> list[list[str]]:
    """Distinct eligible words of each sentence that has enough, in order."""
    found = []
    for sentence in _SENTENCE_END.split(self.corpus.chunks[chunk].text):
      words = dict.fromkeys(_WORD.findall(sentence))
      eligible = [word for word in words if word in self._eligible]
      if len(eligible) >= self._clue_words:
        found.append(eligible)
    return found

  def _is_found(self, words: tuple[str, ...], fact: tuple[int, ...]) -> bool:
    hits = self._index.search(" ".join(words), limit=_MAX_RANK)
    wanted = {self.corpus.chunks[i].chunk_id for i in fact}
    return any(hit.chunk_id in wanted for hit in hits)

  def rare_words(self, text: str) -> list[str]:
    """Plain words of a text that few chunks hold."""
    return [w for w in _WORD.findall(text) if w in self._eligible]

  def frequency(self, term: str) -> int:
    """Chunks that hold a word."""
    return len(self._holders.get(term.lower(), ()))
