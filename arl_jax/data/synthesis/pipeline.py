"""From an author's drafts to verified tasks.

explore → verify → distract → verify → extend, as often as a task has hops. An
author may propose anything; what becomes a task has passed the same checks
whoever wrote it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

from arl_jax import types
from arl_jax.data.synthesis.domains import Domain
from arl_jax.data.synthesis.draft import (
  AuthorFailed,
  Draft,
  Refused,
  Request,
  TaskAuthor,
)
from arl_jax.data.synthesis.duplicates import Duplicates
from arl_jax.data.synthesis.evidence import Evidence, EvidenceSearch
from arl_jax.data.synthesis.forms import holds
from arl_jax.data.synthesis.quotes import Verdict
from arl_jax.data.synthesis.report import Report
from arl_jax.data.synthesis.verify import (
  MAX_HOPS,
  check_distractors,
  check_draft,
)
from arl_jax.envs.search.index import Index, IndexCorpus

SPLITS = ("train", "heldout")
# Attempts in a row that the author's own failures may cost.
_MOST_FAILURES = 8
_FAILED = "author_failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
  """How many tasks of which kinds.

  Attributes:
    count: tasks of both splits.
    heldout_share: of the documents, and of the tasks, in [0, 1).
    hops: tasks are shared out among these numbers of hops.
    seed: of all that is left to chance.
    patience: attempts in a row without a new task after which a split and
      number of hops are given up.
    near: similarity from which two tasks are the same (see `Duplicates`).
    per_truth: tasks that may have one answer.
    concurrency: attempts at a time; the tasks don't depend on it.
  """

  count: int = 1000
  heldout_share: float = 0.2
  hops: tuple[int, ...] = (1, 2)
  seed: int = 0
  patience: int = 500
  near: float = 0.6
  per_truth: int = 4
  concurrency: int = 1

  def __post_init__(self) -> None:
    """Raises ValueError naming the field that can't be."""
    for name in ("count", "patience", "concurrency"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} is {getattr(self, name)}, not at least 1")
    if not 0 <= self.heldout_share < 1:
      raise ValueError(
        f"heldout_share is {self.heldout_share}, not at least 0 and below 1"
      )
    hops = self.hops
    if (
      not hops
      or len(set(hops)) < len(hops)
      or not all(1 <= h <= MAX_HOPS for h in hops)
    ):
      raise ValueError(
        f"hops is {hops}, not different numbers of 1 to {MAX_HOPS}"
      )
    Duplicates(near=self.near, per_truth=self.per_truth)

  def quotas(self) -> dict[tuple[str, int], int]:
    """Tasks by split and hops, which add up to `count`."""
    heldout = round(self.count * self.heldout_share)
    quotas = {}
    for split, total in zip(
      SPLITS, (self.count - heldout, heldout), strict=True
    ):
      for i, hops in enumerate(self.hops):
        share, more = divmod(total, len(self.hops))
        quotas[split, hops] = share + (i < more)
    return quotas


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
  """Which attempt at a task: with the author all that decides its result."""

  split: str
  hops: int
  number: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
  """What came of an attempt: a task, or why there is none."""

  attempt: Attempt
  task: types.Task | None = None
  reason: str = ""
  example: str = ""


class Journal(Protocol):
  """Remembers outcomes, so that they need not be made again."""

  def known(self, attempt: Attempt) -> Outcome | None: ...

  def add(self, outcome: Outcome) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Made:
  """Tasks in order of splits, hops and attempts, and how they came about."""

  tasks: tuple[types.Task, ...]
  report: Report


class Pipeline:
  """Makes tasks from one index.

  Args:
    index: what the tasks will be searched with.
    author: of drafts.
    domain: that the corpus is of.
    config: how many tasks of which kinds.
    journal: of an earlier run with the same arguments, if it shall go on.
  """

  def __init__(
    self,
    index: Index,
    author: TaskAuthor,
    domain: Domain,
    config: SynthesisConfig,
    *,
    journal: Journal | None = None,
  ):
    self._corpus: IndexCorpus = index.corpus
    self._author, self._domain, self._config = author, domain, config
    self._search = EvidenceSearch(index)
    self._journal = journal
    self._documents = split_documents(
      self._corpus, seed=config.seed, heldout_share=config.heldout_share
    )
    self._failures = 0

  async def make(self, progress: Callable[[int], None] | None = None) -> Made:
    """Makes the tasks; fewer than asked if the attempts run out.

    Args:
      progress: called with the number of tasks whenever there is one more.

    Raises:
      AuthorFailed: the author fails again and again.
    """
    config, report = self._config, Report()
    duplicates = Duplicates(near=config.near, per_truth=config.per_truth)
    tasks: list[types.Task] = []
    for (split, hops), quota in config.quotas().items():
      left, idle = quota, 0
      if not left:
        continue
      outcomes = self._outcomes(split, hops)
      async with contextlib.aclosing(outcomes):
        async for outcome in outcomes:
          task = _accepted(outcome, duplicates, report)
          if task is None:
            idle += 1
            if idle >= config.patience:
              break
            continue
          idle = 0
          tasks.append(task)
          if progress is not None:
            progress(len(tasks))
          left -= 1
          if not left:
            break
      if left:
        report.missing[f"{split}, {hops} hops"] = left
    return Made(tasks=tuple(tasks), report=report)

  async def _outcomes(
    self, split: str, hops: int
  ) -> AsyncGenerator[Outcome, None]:
    """Outcomes without end in order of the attempts, some at a time."""
    running: deque[asyncio.Task[Outcome]] = deque()
    number = 0
    try:
      while True:
        while len(running) < self._config.concurrency:
          attempt = Attempt(split=split, hops=hops, number=number)
          running.append(asyncio.create_task(self._remembered(attempt)))
          number += 1
        yield await running.popleft()
    finally:
      for task in running:
        task.cancel()
      await asyncio.gather(*running, return_exceptions=True)

  async def _remembered(self, attempt: Attempt) -> Outcome:
    journal = self._journal
    outcome = journal.known(attempt) if journal is not None else None
    if outcome is None:
      outcome = await self._try(attempt)
      # What failed for no fault of its own is tried again by a later run.
      if journal is not None and outcome.reason != _FAILED:
        journal.add(outcome)
    return outcome

  async def _try(self, attempt: Attempt) -> Outcome:
    try:
      task = await self._attempt(attempt)
      self._failures = 0
      return Outcome(attempt=attempt, task=task)
    except Refused as refused:
      self._failures = 0
      return Outcome(
        attempt=attempt, reason=refused.reason, example=refused.example
      )
    except AuthorFailed as error:
      self._failures += 1
      if self._failures >= _MOST_FAILURES:
        raise
      return Outcome(attempt=attempt, reason=_FAILED, example=str(error)[:200])

  async def _attempt(self, attempt: Attempt) -> types.Task:
    documents = self._documents[attempt.split]
    # A string's seed doesn't depend on the process, as its hash would.
    name = (
      f"{self._config.seed} {attempt.split} {attempt.hops} {attempt.number}"
    )
    request = Request(
      documents=documents, hops=attempt.hops, draw=random.Random(name)
    )
    draft = await self._author.explore(request)
    while True:
      # A later hop may use nothing that doesn't hold.
      verdicts, evidence, distractors = await self._verified(draft, documents)
      if draft.hops >= attempt.hops:
        break
      hops = draft.hops
      draft = await self._author.extend(draft, request)
      if draft.hops != hops + 1:
        raise Refused("wrong_number_of_hops", draft.prompt[:200])
    return self._task(attempt, draft, verdicts, evidence, distractors)

  async def _verified(
    self, draft: Draft, documents: frozenset[str]
  ) -> tuple[tuple[Verdict, ...], Evidence, tuple[str, ...]]:
    verdicts = check_draft(
      draft, self._corpus, documents=documents, rules=self._domain.quotes
    )
    evidence = self._search.look(draft, documents=documents)
    chosen = await self._author.distract(draft, evidence.candidates)
    distractors = check_distractors(
      draft,
      chosen,
      self._corpus,
      similar=evidence.similar,
      evidence={c for fact in evidence.facts for c in fact},
    )
    return verdicts, evidence, distractors

  def _task(
    self,
    attempt: Attempt,
    draft: Draft,
    verdicts: tuple[Verdict, ...],
    evidence: Evidence,
    distractors: tuple[str, ...],
  ) -> types.Task:
    relevant = [chunk_id for fact in evidence.facts for chunk_id in fact]
    texts = {c: self._corpus.chunk(c).text for c in relevant}
    sources = [item.chunk_id for item in draft.items]
    content = "\0".join((draft.prompt, draft.truth, *relevant)).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return types.Task(
      task_id=f"{self._domain.name}-{digest}",
      prompt=draft.prompt,
      truth={
        "answer": draft.truth,
        "relevant": relevant,
        "facts": [list(fact) for fact in evidence.facts],
        "answer_chunks": [c for c in relevant if holds(texts[c], draft.truth)],
        "distractors": list(distractors),
        "bridges": list(draft.bridges),
      },
      split=attempt.split,
      provenance={
        "source": f"{self._domain.name}_{draft.hops}",
        "generator": self._author.generator,
        "domain": self._domain.name,
        "hops": draft.hops,
        "seed": self._config.seed,
        "attempt": attempt.number,
        "corpus": self._corpus.digest,
        "source_documents": list(
          dict.fromkeys(self._corpus.chunk(c).doc_id for c in sources)
        ),
        "source_chunks": sources,
        "clues": [clue.text for clue in draft.clues],
        "question": draft.question,
        "quotes": [_quote_json(verdict) for verdict in verdicts],
        "ranks": list(evidence.ranks),
        "told_ranks": list(evidence.told_ranks),
        "difficulty": evidence.level,
      },
    )


def _accepted(
  outcome: Outcome, duplicates: Duplicates, report: Report
) -> types.Task | None:
  """The outcome's task if it's a new one; counts it either way."""
  task, reason, example = outcome.task, outcome.reason, outcome.example
  report.attempts += 1
  if task is not None:
    truth = task.truth
    clues = " ".join(task.provenance["clues"])
    reason = duplicates.add(clues, truth["answer"], truth["relevant"]) or ""
    example = task.prompt
  if task is None or reason:
    report.reject(reason, example)
    return None
  report.accept(task)
  return task


def _quote_json(verdict: Verdict) -> Mapping[str, Any]:
  quote = verdict.quote
  return {
    "kind": quote.kind,
    "chunk": quote.chunk_id,
    "text": quote.text,
    "found": verdict.found,
  }


def split_documents(
  corpus: IndexCorpus, *, seed: int, heldout_share: float
) -> dict[str, frozenset[str]]:
  """Ids of the documents of each split, drawn by the seed."""
  names = sorted(d.doc_id for d in corpus.documents)
  random.Random(f"documents {seed}").shuffle(names)
  cut = round(len(names) * heldout_share)
  return {"train": frozenset(names[cut:]), "heldout": frozenset(names[:cut])}
