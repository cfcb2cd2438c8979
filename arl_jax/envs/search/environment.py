"""The self-editing search environment: find, read and prune chunks.

Four tools act on one `Index` (Chroma's Context-1, 2026). The policy never
sees chunk ids: it reads and writes *handles*, short ids of one episode.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from arl_jax import types
from arl_jax.envs.search import index as index_lib
from arl_jax.envs.search.reranker import Reranker
from arl_jax.envs.search.tools import TOOL_NAMES, check_tools

# Bounds on what a model may send; what is longer is an error observation.
_MAX_CALLS = 32
_MAX_ARGUMENT_CHARS = 4096
_MAX_MESSAGE_CHARS = 65536
# Ids and characters of each that an error repeats.
_NAMED_IDS, _NAMED_CHARS = 3, 12

_HANDLE = re.compile(r"<[^\s<>]+>")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


class SearchEnvironment:
  """One episode of searching a corpus; meets `types.Environment`.

  A result is `Block(f"{handle} {snippet}", key=chunk_id)`. Chunks an earlier
  search showed are left out of later searches. Pruning takes chunks out of the
  view only: `outcome` lists everything that was ever shown.

  Args:
    index: what is searched; shared between environments.
    tools: names of those that the policy is offered.
    handles: ids such as "<c0>", given out in this order as chunks are first
      shown; when none is left, further chunks aren't shown.
    count_tokens: tokens of a text, by the policy's tokenizer.
    reranker: of what a search fused and of a document's chunks; None keeps the
      fused order, and puts a document's chunks in order of similarity to the
      task.
    fused: chunks that a search fuses and reranks.
    results_per_search: most chunks of one search.
    snippet_tokens: most tokens of a chunk's text in a result.
    grep_limit: most chunks of one grep.
    max_answer: most ids in the final answer.

  Raises:
    ValueError: a number is below 1, a handle occurs twice or isn't of the form
      <name>, or `tools` has none, or one twice or that there isn't.
  """

  def __init__(
    self,
    *,
    index: index_lib.Index,
    handles: Sequence[str],
    count_tokens: Callable[[str], int],
    reranker: Reranker | None = None,
    fused: int = 50,
    results_per_search: int = 4,
    snippet_tokens: int = 16,
    grep_limit: int = 5,
    max_answer: int = 30,
    tools: Sequence[str] = TOOL_NAMES,
  ):
    for name, value in (
      ("fused", fused),
      ("results_per_search", results_per_search),
      ("snippet_tokens", snippet_tokens),
      ("grep_limit", grep_limit),
      ("max_answer", max_answer),
    ):
      if value < 1:
        raise ValueError(f"{name} is {value}, not at least 1")
    _check_handles(handles)
    check_tools(tools)
    self._tools = tuple(tools)
    self._index = index
    self._free = list(reversed(handles))
    self._shapes = {_shape(handle) for handle in handles}
    self._count = count_tokens
    self._reranker, self._fused = reranker, fused
    self._results_per_search = results_per_search
    self._snippet_tokens = snippet_tokens
    self._grep_limit = grep_limit
    self._max_answer = max_answer
    self._prompt: str | None = None
    self._handle_of: dict[str, str] = {}
    self._chunk_of: dict[str, str] = {}
    self._searched: set[str] = set()
    self._in_view: set[str] = set()
    self._pruned: dict[str, None] = {}
    self._answer: list[str] | None = None
    self._justified: dict[str, str] = {}
    self._calls: list[str] = []

  @property
  def tool_names(self) -> tuple[str, ...]:
    """Those that the policy is offered."""
    return self._tools

  async def start(self, task: types.Task) -> str:
    """Returns the task's prompt. Raises RuntimeError on a second start."""
    if self._prompt is not None:
      raise RuntimeError("SearchEnvironment is single-use; make another one")
    self._prompt = task.prompt
    return task.prompt

  async def execute(
    self, calls: Sequence[types.ToolCall], token_budget: int
  ) -> list[types.Observation]:
    """Runs one turn's calls in order.

    Each call may use an equal share of what its predecessors left of
    `token_budget`, so the blocks' texts never have more tokens than that
    together. A prune reaches what was in view before this turn.

    Raises:
      RuntimeError: `start` was not called.
    """
    if self._prompt is None:
      raise RuntimeError("SearchEnvironment.execute called before start")
    in_view = set(self._in_view)
    observations = []
    left = token_budget
    for i, call in enumerate(calls):
      if i < _MAX_CALLS:
        share = max(left, 0) // (min(len(calls), _MAX_CALLS) - i)
        observation = await self._run(call, share, in_view)
      else:
        observation = self._failed("too many calls", left)
      left -= sum(self._count(block.text) for block in observation.blocks)
      observations.append(observation)
    return observations

  async def _run(
    self, call: types.ToolCall, budget: int, in_view: set[str]
  ) -> types.Observation:
    if call.name not in self._tools:
      return self._failed(f"unknown tool {self._named([call.name])}", budget)
    self._calls.append(call.name)
    argument = call.argument.strip()
    if not argument:
      return self._failed("empty argument", budget)
    if len(argument) > _MAX_ARGUMENT_CHARS:
      return self._failed("argument too long", budget)
    if call.name == "search_corpus":
      return await self._search(argument, budget)
    if call.name == "grep_corpus":
      return await self._grep(argument, budget)
    if call.name == "read_document":
      return await self._read(argument, budget)
    return self._prune(argument, budget, in_view)

  async def _search(self, query: str, budget: int) -> types.Observation:
    most = self._results_per_search
    hits = self._index.search(
      query,
      exclude=self._searched,
      limit=most if self._reranker is None else self._fused,
    )
    found = [hit.chunk_id for hit in hits]
    if self._reranker is not None:
      found = await self._reranker.order(query, found)
    observation = self._show(found[:most], query, budget)
    self._searched.update(observation.data.get("chunk_ids", ()))
    return observation

  async def _grep(self, pattern: str, budget: int) -> types.Observation:
    try:
      # Reads the whole corpus: other episodes go on meanwhile.
      found = await asyncio.to_thread(
        self._index.grep, pattern, limit=self._grep_limit
      )
    except ValueError:
      return self._failed("bad pattern", budget)
    return self._show(found, pattern, budget, found.note)

  async def _read(self, name: str, budget: int) -> types.Observation:
    corpus = self._index.corpus
    document = name
    if name in self._chunk_of:
      document = corpus.chunk(self._chunk_of[name]).doc_id
    try:
      chunks = corpus.chunks_of(document)
    except KeyError:
      return self._failed(f"unknown id {self._named([name])}", budget)
    prompt = self._prompt or ""
    ids = [chunk.chunk_id for chunk in chunks]
    if self._reranker is None:
      ranked = self._index.rank(prompt, ids)
    else:
      ranked = await self._reranker.order(prompt, ids)
    return self._show(ranked, prompt, budget)

  def _show(
    self,
    chunk_ids: Sequence[str],
    query: str,
    budget: int,
    cut: str = "",
  ) -> types.Observation:
    """Blocks of as many chunks, in this order, as fit into `budget`.

    Args:
      chunk_ids: of what was found.
      query: by whose words a chunk's snippet is chosen.
      budget: tokens.
      cut: why there may be more, if there may.
    """
    wanted = set(index_lib.terms(query[:_MAX_ARGUMENT_CHARS]))
    blocks: list[types.Block] = []
    shown: list[str] = []
    note = cut or (None if chunk_ids else "no results")
    for chunk_id in chunk_ids:
      if chunk_id not in self._handle_of and not self._free:
        note = "no ids left"
        continue
      handle = self._handle_of.get(chunk_id) or self._free[-1]
      text = self._snippet(self._index.corpus.chunk(chunk_id).text, wanted)
      block = types.Block(text=f"{handle} {text}", key=chunk_id)
      tokens = self._count(block.text)
      if tokens > budget:
        if not shown:
          note = "no room"
        break
      budget -= tokens
      self._give(chunk_id, handle)
      blocks.append(block)
      shown.append(chunk_id)
    self._in_view.update(shown)
    if note is not None and self._count(note) <= budget:
      blocks.append(types.Block(text=note))
    return types.Observation(blocks=tuple(blocks), data={"chunk_ids": shown})

  def _give(self, chunk_id: str, handle: str) -> None:
    if chunk_id not in self._handle_of:
      self._free.pop()
      self._handle_of[chunk_id] = handle
      self._chunk_of[handle] = chunk_id

  def _snippet(self, text: str, wanted: set[str]) -> str:
    """The window of whole words that holds the most distinct wanted terms.

    The first of equals; cut within a word only if the first word alone has
    more tokens than a snippet may.
    """
    words = neutralised(text).split()
    costs = [self._count(f" {word}") for word in words]
    terms = [wanted.intersection(index_lib.terms(word)) for word in words]
    best, best_hits = (0, 0), -1
    end, cost = 0, 0
    for start in range(len(words)):
      while end < len(words) and cost + costs[end] <= self._snippet_tokens:
        cost += costs[end]
        end += 1
      hits = len(set().union(*terms[start:end]))
      if hits > best_hits:
        best, best_hits = (start, end), hits
      if end > start:
        cost -= costs[start]
      else:
        end = start + 1
    start, end = best
    # A tokenizer may count more for a whole than for its parts.
    while end > start + 1 and self._tokens_over(words[start:end]):
      end -= 1
    snippet = " ".join(words[start : max(end, start + 1)])
    while self._count(snippet) > self._snippet_tokens and len(snippet) > 1:
      snippet = snippet[: len(snippet) // 2]
    return snippet

  def _tokens_over(self, words: Sequence[str]) -> bool:
    return self._count(" ".join(words)) > self._snippet_tokens

  def _prune(
    self, ids: str, budget: int, in_view: set[str]
  ) -> types.Observation:
    valid: dict[str, None] = {}
    unseen: dict[str, None] = {}
    twice: dict[str, None] = {}
    for name in ids.split():
      chunk_id = self._chunk_of.get(name)
      if chunk_id is None or chunk_id not in in_view:
        unseen[name] = None
      elif chunk_id in valid:
        twice[name] = None
      else:
        valid[chunk_id] = None
    error = "; ".join(
      f"{what} {self._named(names)}"
      for what, names in (("not in view", unseen), ("twice", twice))
      if names
    )
    if not valid:
      return self._failed(error or "no ids", budget)
    in_view.difference_update(valid)
    self._in_view.difference_update(valid)
    self._pruned.update(valid)
    text = f"pruned {len(valid)}"
    if error:
      text = f"{text}; error: {error}"
    return types.Observation(
      blocks=self._blocks(text, budget),
      remove=tuple(valid),
      error=error or None,
      data={"pruned": list(valid)},
    )

  def _failed(self, error: str, budget: int) -> types.Observation:
    return types.Observation(
      blocks=self._blocks(f"error: {error}", budget), error=error
    )

  def _blocks(self, text: str, budget: int) -> tuple[types.Block, ...]:
    """The text, or as many of its first words as fit into the budget."""
    words = text.split(" ")
    while words and self._count(" ".join(words)) > budget:
      words.pop()
    return (types.Block(text=" ".join(words)),) if words else ()

  def _named(self, names: Iterable[str]) -> str:
    """The first few names a model wrote, short and harmless to show again."""
    return " ".join(
      name
      if len(name) <= _NAMED_CHARS and _shape(name) in self._shapes
      else neutralised(name[:_NAMED_CHARS])
      for name in itertools.islice(names, _NAMED_IDS)
    )

  async def finish(self, message: str) -> str | None:
    """Takes the final list: handles, best first, with text between them.

    What looks like a handle counts as one; other text is justification.
    Repeated handles count once. Returns what is wrong: no handle, a handle
    that no result had, or too many of them.
    """
    if len(message) > _MAX_MESSAGE_CHARS:
      return f"final message has {len(message)} characters, too many"
    found = dict.fromkeys(
      name for name in _HANDLE.findall(message) if _shape(name) in self._shapes
    )
    if not found:
      return "final message names no id"
    unknown = [name for name in found if name not in self._chunk_of]
    if unknown:
      return f"unknown id {self._named(unknown)}"
    if len(found) > self._max_answer:
      return f"{len(found)} ids; at most {self._max_answer}"
    self._answer = [self._chunk_of[name] for name in found]
    self._justified = _justifications(message, found)
    return None

  def documents(self) -> list[dict[str, str]]:
    """The final list for its readers, best first; empty without one.

    Each has `chunk_id`, `doc_id`, `text`, and the policy's `justification`,
    which is whatever it wrote after the id.
    """
    found = []
    for chunk_id in self._answer or ():
      chunk = self._index.corpus.chunk(chunk_id)
      found.append(
        {
          "chunk_id": chunk_id,
          "doc_id": chunk.doc_id,
          "text": chunk.text,
          "justification": self._justified[self._handle_of[chunk_id]],
        }
      )
    return found

  async def outcome(self) -> Mapping[str, Any]:
    """What rewards read.

    Returns:
      `encountered`: chunk ids shown, in order of first sight, pruned or not.
      `pruned`: chunk ids ever pruned. `answer`: chunk ids of the final list,
      best first, None without one that parsed. `calls`: tool names in order.
    """
    return {
      "encountered": list(self._handle_of),
      "pruned": list(self._pruned),
      "answer": None if self._answer is None else list(self._answer),
      "calls": list(self._calls),
    }


def neutralised(text: str) -> str:
  """One line of a document's text that no tokenizer reads as a marker.

  White space and control characters collapse to a space; a space after each
  "<" that something follows breaks handles and `<|...|>` marks.
  """
  return " ".join(re.sub(r"<(?=\S)", "< ", _CONTROL.sub(" ", text)).split())


def _justifications(message: str, handles: Iterable[str]) -> dict[str, str]:
  """What follows each handle, up to the next one."""
  wanted = dict.fromkeys(handles, "")
  marks = [m for m in _HANDLE.finditer(message) if m.group() in wanted]
  ends = [m.start() for m in marks[1:]] + [len(message)]
  for mark, end in zip(marks, ends, strict=True):
    text = " ".join(message[mark.end() : end].split())
    wanted[mark.group()] = wanted[mark.group()] or text.strip(" :,;-–—")
  return wanted


def _shape(handle: str) -> str:
  """A handle with its numbers blanked: tells a made-up id from other text."""
  return re.sub(r"\d+", "0", handle)


def _check_handles(handles: Sequence[str]) -> None:
  if not handles:
    raise ValueError("handles is empty; give at least one such as '<c0>'")
  for handle in handles:
    if not _HANDLE.fullmatch(handle):
      raise ValueError(f"handle {handle!r} isn't of the form '<name>'")
  if len(set(handles)) < len(handles):
    raise ValueError(f"handles has {len(handles)} ids, some of them twice")
