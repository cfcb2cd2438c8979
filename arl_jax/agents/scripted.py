"""A scripted searcher: skilled in every action, more or less at random.

It meets `PolicyClient`, so that the harness turns its play into episodes of
exactly the form that a policy's rollouts have: what a policy is warmed up on.
"""

import dataclasses
import random
import re
from collections.abc import Collection, Sequence

import numpy as np

from arl_jax.chat.renderer import AgentRenderer, read_usage
from arl_jax.types import Sample, ToolCall

_CLUE_BREAK = " ; "
_HANDLE = re.compile(r"<[^\s<>]+>")
# Of the token budget; beyond it a plan prunes.
_CROWDED = 0.5


@dataclasses.dataclass(kw_only=True, slots=True)
class ScriptConfig:
  """How often the searcher does what.

  Attributes:
    diligence: probability that a turn goes by the plan: search clue after clue
      in any order, prune what holds little of them once half of the budget is
      used, answer with what is left. Other turns are drawn with the weights
      below.
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

  diligence: float = 0.0
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
    for name in ("diligence", "parallel", "whole_clue"):
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
    tools: Collection[str],
  ):
    """Takes a question, how to play, and the ids and tools that there are.

    Raises:
      ValueError: nothing can begin without a tool that finds something.
    """
    self._tools = frozenset(tools)
    finds = {"search_corpus": config.search, "grep_corpus": config.grep}
    if not any(finds[tool] > 0 for tool in self._tools & finds.keys()):
      raise ValueError(
        f"the script searches with weight {config.search} and greps with"
        f" {config.grep}, but the tools are {sorted(tools)}"
      )
    self._clues = [clue.split() for clue in question.split(_CLUE_BREAK)]
    self._renderer = renderer
    self._config = config
    self._random = random.Random(seed)
    self._turns = 0
    # Clues, in the order in which they were asked for.
    self._asked: dict[int, None] = {}
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
    texts = self._renderer.observed(ids)
    in_view = self._in_view(texts)
    self._turns += 1
    diligence = self._config.diligence
    diligent = diligence > 0 and self._random.random() < diligence
    for _ in range(8):
      tokens = (
        self._plan(texts, in_view) if diligent else self._message(in_view)
      )
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

  def _in_view(self, texts: Sequence[str]) -> list[str]:
    """Handles in tools' answers, not those in the script's own messages."""
    found = [name for text in texts for name in _HANDLE.findall(text)]
    return [name for name in dict.fromkeys(found) if name in self._handles]

  def _plan(self, texts: Sequence[str], in_view: list[str]) -> list[int]:
    kept, crowded = self._kept(texts), read_usage(texts) > _CROWDED
    surplus = [name for name in in_view if name not in kept]
    if surplus and crowded and "prune_chunks" in self._tools:
      pruned = " ".join(surplus[: self._config.largest_prune])
      call = ToolCall(name="prune_chunks", argument=pruned)
      return self._renderer.calls([call])
    left = [n for n in range(len(self._clues)) if n not in self._asked]
    if left and not crowded and "search_corpus" in self._tools:
      clue = self._random.choice(left)
      self._asked[clue] = None
      query = " ".join(self._clues[clue])
      call = ToolCall(name="search_corpus", argument=query)
      return self._renderer.calls([call])
    answer = kept or (self._some(in_view, 1) if in_view else [])
    text = " ".join(answer[: self._config.largest_answer])
    return self._renderer.answer(text)

  def _kept(self, texts: Sequence[str]) -> list[str]:
    """Of each clue asked for, all that hold its words, else who holds most."""
    shown = {}
    for text in texts:
      names = list(_HANDLE.finditer(text))
      for name, after in zip(names, [*names[1:], None], strict=False):
        end = after.start() if after else len(text)
        if name.group() in self._handles:
          shown[name.group()] = text[name.end() : end].lower()
    kept: list[str] = []
    for clue in self._asked:
      words = {
        name: sum(word.lower() in text for word in self._clues[clue])
        for name, text in shown.items()
      }
      most = max(words.values(), default=0)
      best = [name for name, number in words.items() if number == most > 0]
      kept += best if most == len(self._clues[clue]) else best[:1]
    return list(dict.fromkeys(kept))

  def _message(self, in_view: list[str]) -> list[int]:
    config, draw = self._config, self._random
    weights = {"search_corpus": config.search, "grep_corpus": config.grep}
    if in_view:
      weights["read_document"] = config.read
      weights["prune_chunks"] = config.prune
      # Patience runs out: answering gets likelier with every turn.
      weights["answer"] = config.answer * self._turns
    offered = {
      action: weight
      for action, weight in weights.items()
      if action == "answer" or action in self._tools
    }
    (action,) = draw.choices(list(offered), list(offered.values()))
    if action == "answer":
      text = " ".join(self._some(in_view, config.largest_answer))
      return self._renderer.answer(text)
    calls = [self._call(action, in_view)]
    if action == "search_corpus" and draw.random() < config.parallel:
      calls.append(self._call(action, in_view))
    return self._renderer.calls(calls)

  def _call(self, tool: str, in_view: list[str]) -> ToolCall:
    draw = self._random
    words = [w for clue in self._clues for w in clue]
    if tool == "search_corpus":
      argument = self._query(words)
    elif tool == "grep_corpus":
      argument = draw.choice(words)
    elif tool == "read_document":
      argument = draw.choice(in_view)
    else:
      argument = " ".join(self._some(in_view, self._config.largest_prune))
    return ToolCall(name=tool, argument=argument)

  def _query(self, words: list[str]) -> str:
    draw = self._random
    if draw.random() < self._config.whole_clue:
      clue = draw.randrange(len(self._clues))
      self._asked[clue] = None
      return " ".join(self._clues[clue])
    first = draw.randrange(len(words))
    return " ".join(words[first : first + draw.randint(1, self._config.run)])

  def _some(self, things: list[str], most: int) -> list[str]:
    n = self._random.randint(1, min(most, len(things)))
    return self._random.sample(things, n)
