"""A scripted searcher: skilled in every action, at random in its choices.

It meets `PolicyClient`, so that the harness turns its play into episodes of
exactly the form that a policy's rollouts have: what a policy is warmed up on.
"""

import dataclasses
import random
import re
from collections.abc import Sequence

import numpy as np

from arl_jax.chat.renderer import AgentRenderer
from arl_jax.types import Sample, ToolCall

_CLUE_BREAK = " ; "
_HANDLE = re.compile(r"<[^\s<>]+>")


@dataclasses.dataclass(kw_only=True, slots=True)
class ScriptConfig:
  """How often the searcher does what.

  Attributes:
    grep: weight of grepping for one word.
    read: weight of reading the document of a seen chunk.
    prune: weight of pruning seen chunks.
    search: weight of a search.
    answer: weight of ending once something was seen, times turns taken.
    parallel: probability of two searches in one turn.
    whole_clue: probability that a search takes a whole clue; else a run of
      words from anywhere in the question.
    run: words of such a run at most.
    largest_answer: ids in an answer.
    largest_prune: ids in a prune.
  """

  search: float = 0.5
  grep: float = 0.1
  read: float = 0.1
  prune: float = 0.1
  answer: float = 0.1
  parallel: float = 0.1
  whole_clue: float = 0.5
  run: int = 4
  largest_answer: int = 4
  largest_prune: int = 3

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    for name in ("search", "grep", "read", "prune", "answer"):
      if not getattr(self, name) >= 0:
        raise ValueError(f"script.{name} is {getattr(self, name)}, not >= 0")
    if not (self.search > 0 or self.grep > 0):
      raise ValueError("script.search is 0 and so is grep: nothing can begin")
    for name in ("parallel", "whole_clue"):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f"script.{name} is {getattr(self, name)}, not 0..1")
    for name in ("run", "largest_answer", "largest_prune"):
      if getattr(self, name) < 1:
        raise ValueError(f"script.{name} is {getattr(self, name)}, not >= 1")


class ScriptedSearcher:
  """A client for one episode of one task.

  Attributes of the context that it reads: the question, and which handles are
  in view.
  """

  def __init__(
    self,
    question: str,
    renderer: AgentRenderer,
    config: ScriptConfig,
    *,
    seed: int,
    handles: Sequence[str],
  ):
    self._clues = [clue.split() for clue in question.split(_CLUE_BREAK)]
    self._renderer = renderer
    self._config = config
    self._random = random.Random(seed)
    self._turns = 0
    self._handles = frozenset(handles)

  async def sample(
    self,
    session: str,
    ids: Sequence[int],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    seed: int,
    temperature: float = 1.0,
  ) -> Sample:
    """See `types.PolicyClient`."""
    return self.play(ids, max_tokens)

  def play(self, ids: Sequence[int], max_tokens: int) -> Sample:
    """The next message; log-probs are 0, the script is version 0."""
    in_view = self._in_view(ids)
    self._turns += 1
    for _ in range(8):
      tokens = [*self._message(in_view), self._renderer.end]
      if len(tokens) <= max_tokens:
        break
    n = min(len(tokens), max_tokens)
    return Sample(
      ids=np.array(tokens[:n], np.int32),
      logp=np.zeros(n, np.float32),
      versions=np.zeros(n, np.int32),
      stopped=n == len(tokens),
    )

  async def close(self, session: str) -> None:
    """Holds nothing."""

  def _in_view(self, ids: Sequence[int]) -> list[str]:
    """Handles in tools' answers, not those in the script's own messages."""
    texts = self._renderer.observed(ids)
    found = [name for text in texts for name in _HANDLE.findall(text)]
    return [name for name in dict.fromkeys(found) if name in self._handles]

  def _message(self, in_view: list[str]) -> list[int]:
    config, draw = self._config, self._random
    weights = {"search": config.search, "grep": config.grep}
    if in_view:
      weights["read"] = config.read
      weights["prune"] = config.prune
      # Patience runs out: answering gets likelier with every turn.
      weights["answer"] = config.answer * self._turns
    (action,) = draw.choices(list(weights), list(weights.values()))
    if action == "answer":
      text = " ".join(self._some(in_view, config.largest_answer))
      return self._renderer.text(text)
    calls = [self._call(action, in_view)]
    if action == "search" and draw.random() < config.parallel:
      calls.append(self._call(action, in_view))
    return self._renderer.calls(calls)

  def _call(self, action: str, in_view: list[str]) -> ToolCall:
    draw = self._random
    words = [w for clue in self._clues for w in clue]
    if action == "search":
      if draw.random() < self._config.whole_clue:
        query = draw.choice(self._clues)
      else:
        first = draw.randrange(len(words))
        query = words[first : first + draw.randint(1, self._config.run)]
      return ToolCall(name="search_corpus", argument=" ".join(query))
    if action == "grep":
      return ToolCall(name="grep_corpus", argument=draw.choice(words))
    if action == "read":
      return ToolCall(name="read_document", argument=draw.choice(in_view))
    pruned = " ".join(self._some(in_view, self._config.largest_prune))
    return ToolCall(name="prune_chunks", argument=pruned)

  def _some(self, things: list[str], most: int) -> list[str]:
    n = self._random.randint(1, min(most, len(things)))
    return self._random.sample(things, n)
