"""What a run left in its folder, whatever became of it."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from arl_jax.actors.config import ActorConfig, from_json
from arl_jax.evaluation import scores
from arl_jax.evaluation.report import write_report
from arl_jax.observability import metrics
from arl_jax.observability.live import planned
from arl_jax.problems.problem import make_problem
from arl_jax.records import from_json as record_from_json
from arl_jax.types import Episode, Group, Task

Labelled = tuple[str, Task, Episode]


class RunRecord:
  """Reads a run's folder; nothing in it is changed.

  A run may be of any configuration, going on, ended, stopped or killed: only
  its `config.json` must be there.

  Attributes:
    path: of the folder.
    config: resolved, JSON values.
    metrics: lines of metrics.jsonl.
    summary: of a run that ended, otherwise empty.
    evaluations: of versions.
    notes: what a reader should know first.
  """

  def __init__(self, run_dir: str | os.PathLike[str]):
    """Reads all but the trajectories.

    Raises:
      ValueError: the folder holds no run, or a file in it is damaged.
      OSError: a file can't be read.
    """
    self.path = pathlib.Path(run_dir)
    record = self._json("config.json")
    if record is None or not isinstance(record.get("config"), dict):
      raise ValueError(
        f"{self.path} holds no run: it has no config.json of this program"
      )
    self.config: dict[str, Any] = record["config"]
    self._data = record.get("data")
    path = self.path / "metrics.jsonl"
    self.metrics = metrics.read(path) if path.is_file() else []
    self.summary = self._json("summary.json") or {}
    found = scores.path_of(self.path)
    self.evaluations = scores.read(found) if found.is_file() else []
    self.notes = self._unfinished()

  def trajectories(self) -> list[Labelled]:
    """A few whole episodes: after and before RL, and of the best version."""
    count = self.config.get("report_episodes")
    count = count if isinstance(count, int) else 0
    found: list[Labelled] = []
    try:
      for label in ("after", "before"):
        groups = self._groups("trajectories.jsonl", label + "/")
        found += [(f"{label} RL", *p) for p in chosen(groups, count)]
      best = max(
        (e for e in scores.valid(self.evaluations) if e.reward is not None),
        key=lambda e: (e.reward, e.version),
        default=None,
      )
      if best is not None:
        name = f"{scores.FOLDER}/{best.version}.jsonl"
        label = f"version {best.version}, the best"
        prefix = f"{best.lineage}/{best.version}/"
        found += [
          (label, *p) for p in chosen(self._groups(name, prefix), count)
        ]
    except ValueError as error:
      self.notes.append(f"Trajectories can't be shown: {error}")
    return found

  def decoder(self) -> Callable[[int], str]:
    """Text of one token id; "⟨id⟩" where the tokenizer can't be made again.

    It follows from the run's corpus, so this takes as long as starting a run.
    """
    try:
      problem = make_problem(from_json(ActorConfig, self.config))
    except Exception as error:  # An own problem may raise any.
      self.notes.append(
        f"Tokens are shown as ids, without a tokenizer: {error!r}"
      )
      return _id
    if self._data is not None and problem.digests() != self._data:
      self.notes.append(
        "Tokens are shown as ids: the corpus isn't any more what the run was"
        " made from."
      )
      return _id
    return problem.renderer.tokenizer.piece

  def _unfinished(self) -> list[str]:
    if self.summary:
      return []
    if not self.metrics:
      return ["The run has no metrics yet."]
    last = self.metrics[-1]
    phase, step = last.get("phase"), last.get("step")
    of = planned(self.config).get(str(phase))
    when = "at an unknown time"
    if isinstance(last.get("time"), int | float):
      at = datetime.datetime.fromtimestamp(last["time"], datetime.UTC)
      when = f"{at:%Y-%m-%d %H:%M} UTC"
    return [
      f"The run hasn't ended: step {step}{f' of {of}' if of else ''} of"
      f" {phase}, {when}. It goes on, was stopped, or died."
    ]

  def _json(self, name: str) -> dict[str, Any] | None:
    """A JSON object in the folder, None if there is no file."""
    path = self.path / name
    try:
      value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
      return None
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
      raise ValueError(f"{path} holds a {type(value).__name__}, no object")
    return value

  def _groups(self, name: str, prefix: str) -> list[tuple[Task, Episode]]:
    """Tasks and episodes of the groups of one kind in a file, if it's there."""
    path = self.path / name
    if not path.is_file():
      return []
    pairs = []
    with open(path, "rb") as file:
      for line in file:
        group = record_from_json(json.loads(line))
        if isinstance(group, Group) and group.group_id.startswith(prefix):
          pairs += [(group.task, episode) for episode in group.episodes]
    return pairs


def report(
  run_dir: str | os.PathLike[str],
  decode: Callable[[int], str] | None = None,
) -> pathlib.Path:
  """Writes `report.html` of a run from what is in its folder.

  Args:
    run_dir: of the run.
    decode: text of one token id; by default that of the tokenizer, which is
      made again.

  Returns:
    Where it lies.

  Raises:
    ValueError: the folder holds no run, or a file in it is damaged.
    OSError: a file can't be read, or the report can't be written.
  """
  record = RunRecord(run_dir)
  episodes = record.trajectories()
  if decode is None:
    decode = record.decoder() if episodes else _id
  path = record.path / "report.html"
  write_report(
    path,
    title=f"arl_jax: {record.path.resolve().name}",
    config=record.config,
    summary=record.summary,
    metrics=record.metrics,
    episodes=episodes,
    decode=decode,
    evaluations=record.evaluations,
    notes=record.notes,
  )
  return path


def chosen(
  pairs: Sequence[tuple[Task, Episode]], count: int
) -> list[tuple[Task, Episode]]:
  """The first ones, half of them such whose context was rewritten, if any."""
  rewritten = [p for p in pairs if len(p[1].segments) > 1][: count // 2]
  rest = [p for p in pairs if not any(p[1] is r[1] for r in rewritten)]
  return rewritten + rest[: count - len(rewritten)]


def _id(token: int) -> str:
  return f"⟨{token}⟩"
