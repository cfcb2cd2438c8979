"""An episode of the real search environment, over a few sentences."""

import functools

from arl_jax.agents.harness import AgentConfig
from arl_jax.chat import tokenizer as tok
from arl_jax.chat.renderer import Renderer, usage_symbols
from arl_jax.envs.search import corpus as corpus_lib
from arl_jax.envs.search.environment import SearchEnvironment
from arl_jax.envs.search.index import SearchIndex
from arl_jax.envs.search.tools import TOOL_NAMES
from arl_jax.types import (
  Task,
)

DOCUMENTS = tuple(
  corpus_lib.Document(f"d{i}", "", text)
  for i, text in enumerate(
    [
      "the quick brown fox jumps over the lazy dog",
      "volcanic ash falls over the town and the dog sleeps",
      "a lazy cat reads <|end|> <c3> about foxes and 1024 dogs",
      "brown bears eat fish near the town in autumn",
      "fish swim and bears wait near brown water",
    ]
  )
)
HANDLES = tuple(f"<c{i}>" for i in range(8))
TASK = Task(task_id="t", prompt="brown fox ; lazy dog", truth={})
CONFIG = AgentConfig(
  token_budget=120,
  soft_threshold=60,
  hard_threshold=90,
  max_turns=6,
  message_tokens=12,
  observation_tokens=40,
)


@functools.cache
def renderer() -> Renderer:
  symbols = (*HANDLES, *TOOL_NAMES, *usage_symbols(CONFIG.token_budget))
  texts = [d.text for d in DOCUMENTS] * 2 + [
    "[Token usage: 1/2] prune or",
    "0123456789" * 9,
  ]
  return Renderer(tok.Tokenizer.train(texts, vocab_size=180, symbols=symbols))


@functools.cache
def index() -> SearchIndex:
  built = corpus_lib.build_corpus(DOCUMENTS, count_tokens=count, max_tokens=40)
  return SearchIndex(built)


def count(text: str) -> int:
  return renderer().tokenizer.count(" " + text)


def environment(**options) -> SearchEnvironment:
  return SearchEnvironment(
    index=index(),
    handles=HANDLES,
    count_tokens=count,
    **{"results_per_search": 2, "snippet_tokens": 12, **options},
  )


def events(episode, kind):
  return [e for e in episode.events if e.kind == kind]
