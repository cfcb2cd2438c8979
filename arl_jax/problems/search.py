"""Self-editing search over a corpus (Context-1), as a problem to train on."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence

from arl_jax.actors.config import ActorConfig
from arl_jax.agents.harness import derive_seed
from arl_jax.agents.scripted import ScriptedSearcher
from arl_jax.chat.pretrained import load_tokenizer
from arl_jax.chat.renderer import AgentRenderer, Renderer, usage_symbols
from arl_jax.chat.renderers import renderer_of
from arl_jax.chat.tokenizer import Tokenizer
from arl_jax.data.synthesis import synthesise
from arl_jax.data.task_file import read_tasks
from arl_jax.envs.search import corpus as corpus_lib
from arl_jax.envs.search.environment import SearchEnvironment
from arl_jax.envs.search.index import Index, SearchIndex
from arl_jax.envs.search.reranker import EmbeddingReranker
from arl_jax.envs.search.stored_index import StoredIndex
from arl_jax.envs.search.tools import SYSTEM, TOOL_NAMES, TOOLS, check_tools
from arl_jax.rewards.search import SearchReward
from arl_jax.types import RewardFn, Task


class SearchProblem:
  """Self-editing search over a corpus (Context-1)."""

  def __init__(self, config: ActorConfig):
    """Raises ValueError for a corpus that can't be used."""
    self._config = config
    search = config.search
    check_tools(search.tools, "search.tools")
    self.system = SYSTEM
    self.tools = tuple(t for t in TOOLS if t.name in search.tools)
    self._handles = [f"<c{i}>" for i in range(search.handles)]
    stored = StoredIndex(config.corpus.index) if config.corpus.index else None
    documents: Sequence[corpus_lib.Document]
    if stored is not None:
      documents = stored.corpus.documents
    elif config.corpus.path:
      documents = corpus_lib.folder_documents(config.corpus.path)
    else:
      documents = corpus_lib.python_documents()
    self.renderer = _renderer(config, documents, self._handles)
    tokenizer = self.renderer.tokenizer
    # Snippets and chunks are measured again and again.
    self._count = functools.lru_cache(1 << 18)(
      lambda text: tokenizer.count(" " + text)
    )
    self._index: Index = stored or SearchIndex(
      corpus_lib.build_corpus(
        documents,
        count_tokens=self._count,
        max_tokens=config.corpus.chunk_tokens,
      )
    )
    self.corpus = self._index.corpus
    self._reranker = EmbeddingReranker(self._index) if search.rerank else None
    self.train, self.heldout = self._tasks()
    self.reward: RewardFn = SearchReward(
      beta=search.beta,
      final_beta=search.final_beta,
      beta_epochs=search.beta_epochs,
      answer_in=search.answer_in,
      malformed=search.malformed,
    )

  def _tasks(self) -> tuple[Sequence[Task], Sequence[Task]]:
    """For training, and held out: from a file, or made from words."""
    config = self._config.tasks
    if config.path:
      found = read_tasks(config.path)
      found.check(self.corpus)
      for name in ("train", "heldout"):
        if not getattr(found, name):
          raise ValueError(f"tasks.path {config.path} has no {name} task")
      return found.train[: config.train], found.heldout[: config.heldout]
    made = synthesise(
      self.corpus,
      self._index,
      count_tokens=self._count,
      seed=self._config.seed,
      train=config.train,
      heldout=config.heldout,
      clue_words=config.clue_words,
      hops=config.hops,
    )
    return made.train, made.heldout

  def environment(self, task: Task, seed: int) -> SearchEnvironment:
    search = self._config.search
    return SearchEnvironment(
      index=self._index,
      handles=self._handles,
      count_tokens=self._count,
      reranker=self._reranker,
      results_per_search=search.results,
      snippet_tokens=search.snippet_tokens,
      grep_limit=search.grep_limit,
      max_answer=search.max_answer,
      tools=search.tools,
    )

  def demonstrator(self, task: Task, seed: int) -> ScriptedSearcher:
    script = self._config.script
    if not task.truth:
      # Practice is to copy from anywhere, which a plan wouldn't ask for.
      script = dataclasses.replace(script, diligence=0.0)
    return ScriptedSearcher(
      task.prompt,
      self.renderer,
      script,
      seed=seed,
      handles=self._handles,
      tools=self._config.search.tools,
    )

  def practice(self, seed: int) -> Iterator[str]:
    """Clues of random words of the training questions."""
    draw = random.Random(seed)
    words = sorted(
      {w for t in self.train for w in t.prompt.replace(" ; ", " ").split()}
    )
    size, hops = self._config.tasks.clue_words, self._config.tasks.hops
    while True:
      chosen = iter(draw.sample(words, size * hops))
      clues = [" ".join(next(chosen) for _ in range(size)) for _ in range(hops)]
      yield " ; ".join(clues)

  def digests(self) -> dict[str, str]:
    ids = [t.task_id for t in (*self.train, *self.heldout)]
    return {
      "corpus": self.corpus.digest,
      "tasks": f"{derive_seed(*ids):08x}",
      "documents": str(len(self.corpus.documents)),
      "chunks": str(len(self.corpus.chunks)),
    }


def _renderer(
  config: ActorConfig,
  documents: Sequence[corpus_lib.Document],
  handles: Sequence[str],
) -> AgentRenderer:
  """Of a published model, or with a small tokenizer of its own."""
  if config.tokenizer:
    return renderer_of(load_tokenizer(config.tokenizer), TOOLS, SYSTEM)
  symbols = [*handles, *TOOL_NAMES]
  symbols += usage_symbols(config.agent.token_budget)
  tokenizer = Tokenizer.train(
    [d.text for d in documents],
    vocab_size=config.corpus.vocab_size,
    symbols=symbols,
  )
  return Renderer(tokenizer)
