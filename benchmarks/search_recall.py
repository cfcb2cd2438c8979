"""How many of the chunks asked for each side of a hybrid search finds.

  python -m launch.prepare index --source=FOLDER --out=INDEX
  python -m launch.prepare_tasks --index=INDEX --out=tasks.jsonl
  python -m benchmarks.search_recall --index=INDEX --tasks=tasks.jsonl

Every clue of every task is a query, and the chunk that it was made from (or one
with the same quotes) is what must be among the first ten. Of such a task the
pipeline knows that a hybrid search finds each clue's chunk among the first 50.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from absl import app, flags

from arl_jax.data.task_file import read_tasks
from arl_jax.envs.search.ranking import DEPTH, fuse
from arl_jax.envs.search.stored_index import StoredIndex
from arl_jax.evaluation.statistics import bootstrap_mean
from arl_jax.types import Task

_INDEX = flags.DEFINE_string("index", None, "Folder.", required=True)
_TASKS = flags.DEFINE_string("tasks", None, "File.", required=True)
_FIRST = flags.DEFINE_integer("first", 10, "Chunks that a ranking shows.")


def _wanted(task: Task, source: str) -> set[str]:
  """The chunks of which one is the fact that a clue is about."""
  facts = [set(fact) for fact in task.truth["facts"]]
  return next((fact for fact in facts if source in fact), {source})


def _found(index: StoredIndex, task: Task) -> dict[str, list[bool]]:
  """Whether each ranking finds each clue's chunk."""
  found: dict[str, list[bool]] = {"bm25": [], "dense": [], "hybrid": []}
  clues, sources = (task.provenance[n] for n in ("clues", "source_chunks"))
  for clue, source in zip(clues, sources, strict=False):
    lexical, dense = index.rankings(clue, frozenset(), DEPTH)
    hybrid = [i for i, _ in fuse((lexical, dense), _FIRST.value)]
    wanted = _wanted(task, source)
    for name, ranking in (
      ("bm25", lexical),
      ("dense", dense),
      ("hybrid", hybrid),
    ):
      first = {index.corpus.chunk_id(i) for i in ranking[: _FIRST.value]}
      found[name].append(not wanted.isdisjoint(first))
  return found


def _measure(index: StoredIndex, tasks: list[Task]) -> dict[str, Any]:
  of_task: dict[str, list[float]] = {"bm25": [], "dense": [], "hybrid": []}
  for task in tasks:
    for name, hits in _found(index, task).items():
      of_task[name].append(float(np.mean(hits)))
  figures: dict[str, Any] = {"tasks": len(tasks)}
  for name, values in of_task.items():
    recall = bootstrap_mean(values, seed=0)
    figures[f"{name}_recall"] = round(recall.mean, 4)
    figures[f"{name}_interval"] = [round(recall.low, 4), round(recall.high, 4)]
  return figures


def main(argv: list[str]) -> None:
  del argv
  index = StoredIndex(_INDEX.value)
  read = read_tasks(_TASKS.value)
  read.check(index.corpus)
  figures = _measure(index, [*read.train, *read.heldout])
  best = max(figures["bm25_recall"], figures["dense_recall"])
  ratio = round(figures["hybrid_recall"] / best, 3) if best else None
  report = {
    "name": "search_recall",
    "figures": figures,
    "limits": {
      "chunks": len(index.corpus.chunks),
      "embedder": index.manifest.embedder,
      "first": _FIRST.value,
    },
    "ratios": {"hybrid_to_the_better_side": ratio},
  }
  print(json.dumps(report))


if __name__ == "__main__":
  app.run(main)
