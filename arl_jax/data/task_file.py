"""Tasks in a JSONL file, a record of `types.Task` a line."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from arl_jax.data.json_lines import JsonLines
from arl_jax.envs.search.index import IndexCorpus
from arl_jax.observability.run_directory import write_atomically
from arl_jax.records import from_json, to_json
from arl_jax.types import Task

_MAX_LINE_BYTES = 1 << 20
_MAX_TASKS = 1_000_000
_MAX_ID_CHARS = 1024
_MAX_PROMPT_CHARS = 1 << 16
_MAX_IDS = 4096
_SPLITS = ("train", "heldout")


@dataclasses.dataclass(frozen=True, slots=True)
class TaskFile:
  """Tasks by split, in the file's order: what a `Problem` offers.

  Attributes:
    train: tasks that may be trained on.
    heldout: tasks that are only evaluated.
    digest: of the file's lines.
  """

  train: tuple[Task, ...]
  heldout: tuple[Task, ...]
  digest: str

  def check(self, corpus: IndexCorpus) -> None:
    """Raises ValueError if a task was made from another corpus.

    Tasks that don't say which are held against its chunks' ids.
    """
    for task in (*self.train, *self.heldout):
      # Cut otherwise, a corpus has the same ids for other texts.
      if task.provenance.get("corpus", corpus.digest) != corpus.digest:
        raise ValueError(
          f"task {task.task_id} was made from another corpus, or from this one"
          " cut otherwise; give `launch.prepare_tasks` the index that is"
          " searched"
        )
      for name in ("relevant", "answer_chunks", "distractors"):
        for chunk_id in task.truth.get(name, ()):
          try:
            corpus.chunk(chunk_id)
          except KeyError:
            raise ValueError(
              f"task {task.task_id} has {chunk_id!r:.200} in its {name}, which"
              " the corpus lacks; search what the tasks were made from, cut in"
              " the same way"
            ) from None


def write_tasks(path: str | os.PathLike[str], tasks: Iterable[Task]) -> None:
  """Writes a whole file or nothing. Raises OSError if it can't be written."""
  lines = (json.dumps(to_json(task)) + "\n" for task in tasks)
  write_atomically(pathlib.Path(path), "".join(lines))


def read_tasks(path: str | os.PathLike[str]) -> TaskFile:
  """Reads what `write_tasks` has written, or anybody like it.

  Args:
    path: a file, a pattern with * ? or [], or a folder of *.jsonl.

  Raises:
    ValueError: a line isn't a search task, is too long, or has the id of
      another; names the file and the line.
  """
  tasks: dict[str, Task] = {}

  def parse(data: dict[str, Any]) -> dict[str, Any]:
    task = _task(data)
    if task.task_id in tasks:
      raise ValueError(
        f"task_id is {task.task_id!r:.200}, which is there twice"
      )
    if len(tasks) >= _MAX_TASKS:
      raise ValueError(f"there are more than {_MAX_TASKS} tasks")
    tasks[task.task_id] = task
    # Tasks are few and short: all are held, and the lines aren't read again.
    return {}

  lines = JsonLines(path, parse, max_line=_MAX_LINE_BYTES)
  by_split = {
    split: tuple(t for t in tasks.values() if t.split == split)
    for split in _SPLITS
  }
  return TaskFile(**by_split, digest=lines.digest)


def _task(data: dict[str, Any]) -> Task:
  task = from_json(data)
  if not isinstance(task, Task):
    raise ValueError(f"kind is {data.get('kind')!r:.80}, not 'Task'")
  _check_text("task_id", task.task_id, _MAX_ID_CHARS)
  _check_text("prompt", task.prompt, _MAX_PROMPT_CHARS)
  if task.split not in _SPLITS:
    raise ValueError(f"split is {task.split!r:.80}, not 'train' or 'heldout'")
  for name in ("truth", "provenance"):
    if not isinstance(getattr(task, name), dict):
      raise ValueError(f"{name} is {getattr(task, name)!r:.80}, not an object")
  truth = task.truth
  relevant = set(_ids(truth, "relevant"))
  if not relevant:
    raise ValueError("truth.relevant is empty; name at least one chunk")
  outside = set(_ids(truth, "answer_chunks")) - relevant
  if outside:
    raise ValueError(
      f"truth.answer_chunks has {min(outside)!r:.200}, which isn't relevant"
    )
  facts = truth.get("facts", [])
  if not isinstance(facts, list) or len(facts) > _MAX_IDS:
    raise ValueError(f"truth.facts is {facts!r:.80}, not a list of lists")
  for number, fact in enumerate(facts):
    name = f"truth.facts[{number}]"
    if not relevant.issuperset(_checked_ids(fact, name)) or not fact:
      raise ValueError(f"{name} is {fact!r:.80}, not ids of relevant chunks")
  if "distractors" in truth:
    both = relevant.intersection(_ids(truth, "distractors"))
    if both:
      raise ValueError(
        f"truth.distractors has {min(both)!r:.200}, which is relevant"
      )
  return task


def _check_text(name: str, value: Any, limit: int) -> None:
  if not isinstance(value, str) or not 0 < len(value) <= limit:
    raise ValueError(
      f"{name} is {value!r:.80}, not a text of 1 to {limit} characters"
    )


def _ids(truth: Any, name: str) -> list[str]:
  return _checked_ids(truth.get(name), f"truth.{name}")


def _checked_ids(value: Any, name: str) -> list[str]:
  if not isinstance(value, list) or len(value) > _MAX_IDS:
    raise ValueError(f"{name} is {value!r:.80}, not a list of chunk ids")
  for chunk_id in value:
    _check_text(f"an id in {name}", chunk_id, _MAX_ID_CHARS)
  return value
