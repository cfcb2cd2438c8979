"""The configuration of the search problem. Imports no jax."""

import dataclasses

from arl_jax.envs.search.tools import TOOL_NAMES


@dataclasses.dataclass(kw_only=True, slots=True)
class CorpusConfig:
  """What is searched.

  Attributes:
    path: folder of .txt, .md and .rst files; empty takes the Python language
      reference and the docstrings of the standard library.
    index: folder that `launch.prepare index` wrote, instead of `path`; its
      chunks are as they are.
    chunk_tokens: of a chunk at most.
    vocab_size: of the tokenizer trained on it.
  """

  path: str = ""
  index: str = ""
  chunk_tokens: int = 128
  vocab_size: int = 3072


@dataclasses.dataclass(kw_only=True, slots=True)
class TaskConfig:
  """Tasks about the corpus.

  Attributes:
    path: file that `launch.prepare_tasks` wrote, of which as many tasks are
      taken as there are; empty makes tasks from the corpus's words.
    train: number of tasks.
    heldout: number of tasks, from documents that no training task uses.
    clue_words: words of a clue.
    hops: clues of a task.
  """

  path: str = ""
  train: int = 3000
  heldout: int = 256
  clue_words: int = 3
  hops: int = 2


@dataclasses.dataclass(kw_only=True, slots=True)
class SearchConfig:
  """The search environment and its reward.

  Attributes:
    tools: that the policy is offered; the demonstrator uses no others.
    handles: chunk ids an episode can give out, a token each.
    results: chunks a search returns at most.
    snippet_tokens: of a chunk that a result shows at most.
    rerank: whether the 50 chunks that a search fuses, and those of a document,
      are put into the order of their embeddings' similarity.
    grep_limit: chunks a grep returns at most.
    max_answer: ids in the final answer at most.
    beta: of F_β; recall weighs β² as much as precision. Held-out rewards have
      this one.
    final_beta: that training anneals it to, linearly from epoch to epoch;
      Context-1: from 4 to 2.
    beta_epochs: epochs until then.
    answer_in: where a chunk with the answer must be to earn the bonus, "output"
      (the final list) or "encountered" (anything shown).
    malformed: reward of an episode that ends without an answer that parses.
  """

  tools: tuple[str, ...] = TOOL_NAMES
  handles: int = 32
  results: int = 3
  snippet_tokens: int = 14
  rerank: bool = False
  grep_limit: int = 3
  max_answer: int = 6
  beta: float = 4.0
  final_beta: float = 4.0
  beta_epochs: int = 1
  answer_in: str = "output"
  malformed: float = -0.5
