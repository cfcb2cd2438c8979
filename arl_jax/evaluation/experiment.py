"""One whole run: warm start, held-out score, RL, held-out score, report."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arl_jax.evaluation import suites
from arl_jax.evaluation.run_record import report
from arl_jax.evaluation.statistics import paired_difference
from arl_jax.observability.progress import Progress
from arl_jax.observability.run_directory import RunDirectory
from arl_jax.problems.problem import Problem
from arl_jax.records import from_json, to_json
from arl_jax.runtime.config import Config
from arl_jax.runtime.group_source import GroupSource
from arl_jax.runtime.learner_hosts import NOTHING, LearnerHosts, RunFolder
from arl_jax.runtime.trainer import Trainer
from arl_jax.types import Episode, Group

Summary = dict[str, Any]


def run_experiment(
  config: Config,
  problem: Problem,
  run: RunDirectory | RunFolder,
  progress: Progress,
  *,
  source: GroupSource | None = None,
  hosts: LearnerHosts | None = None,
  should_stop: Callable[[], bool],
  fall_back: bool = False,
) -> Summary:
  """Takes a run from where it stands to its report.

  Args:
    config: resolved.
    problem: what is learned.
    run: where everything is written.
    progress: where it is shown.
    source: of groups, see `Trainer`.
    hosts: the learner's processes, likewise.
    should_stop: asked between updates and episodes.
    fall_back: an earlier commit will do if the newest is damaged.

  Returns:
    The summary: {"before" and "after": {metric: [mean, low, high]}, "seconds":
    {phase: number}, "tokens_per_second": {role: number}}, without the first
    two in modes that don't learn; also written as `summary.json`, beside
    `trajectories.jsonl` and `report.html`. All processes get it.

  Raises:
    Interrupted: stopped, after a commit.
    OSError: something could not be written.
  """
  trainer = Trainer(
    config,
    problem,
    run,
    progress,
    source=source,
    hosts=hosts,
    should_stop=should_stop,
    fall_back=fall_back,
  )
  warm, total = (
    config.warm_start.steps,
    config.warm_start.steps + config.rl.steps,
  )
  # Modes without updates have nothing to compare.
  learns = config.mode in ("train", "train_only")
  try:
    trainer.warm_start()
    before = _evaluated(trainer, run, f"before/{warm}") if learns else []
    trainer.reinforce()
    after = _evaluated(trainer, run, f"after/{total}") if learns else []
  finally:
    trainer.close()
  summarise = functools.partial(_summarise, trainer, run, before, after)
  return trainer.hosts.told(summarise)


def _summarise(
  trainer: Trainer,
  run: RunDirectory | RunFolder,
  before: Sequence[Episode],
  after: Sequence[Episode],
) -> Summary:
  """Writes summary and report."""
  assert isinstance(run, RunDirectory)
  problem = trainer.problem
  summary: Summary = {
    "seconds": _seconds(run) | trainer.position.rounded_seconds,
    "tokens_per_second": _rates(trainer.position.tokens),
  }
  if before and after:
    seed = trainer.config.evaluation_seed
    difference = paired_difference(_rewards(before), _rewards(after), seed=seed)
    summary |= {
      "before": _scores(problem, before, seed),
      "after": _scores(problem, after, seed),
      "paired_reward_difference": difference.to_json(),
    }
  run.write_json("summary.json", summary)
  report(run.path, problem.renderer.tokenizer.piece)
  return summary


def _evaluated(
  trainer: Trainer, run: RunDirectory | RunFolder, name: str
) -> list[Episode]:
  """Held-out episodes, in the first process; none elsewhere."""

  def evaluate() -> list[Episode]:
    assert isinstance(run, RunDirectory)
    return _evaluate(trainer, run, name)

  with trainer.sampling():
    return trainer.told(evaluate, NOTHING) or []


def _evaluate(trainer: Trainer, run: RunDirectory, name: str) -> list[Episode]:
  """Held-out episodes; read back if this run has rolled them out before."""
  path = run.path / "trajectories.jsonl"
  lines = path.read_text().splitlines() if path.is_file() else []
  known = []
  for line in lines:
    group = from_json(json.loads(line))
    if isinstance(group, Group) and group.group_id.startswith(name + "/"):
      known.append(group.episodes[0])
  tasks = trainer.problem.heldout
  if len(known) == len(tasks):
    return known
  if name.startswith("before/") and trainer.position.rl:
    raise ValueError(
      f"{path} lacks the evaluation before RL, which can't be repeated now;"
      " start anew with --overwrite"
    )
  episodes = trainer.evaluate(name.split("/")[0])
  for task, episode in zip(tasks, episodes, strict=True):
    group_id = f"{name}/{task.task_id}"
    group = Group(group_id=group_id, task=task, episodes=(episode,))
    lines.append(json.dumps(to_json(group)))
  run.write_text(path.name, "\n".join(lines) + "\n")
  return episodes


def _scores(problem: Problem, episodes: Sequence[Episode], seed: int):
  scores = suites.score(problem.heldout, episodes, seed=seed)
  return {metric: interval.to_json() for metric, interval in scores.items()}


def _rewards(episodes: Sequence[Episode]) -> list[float]:
  return [e.reward.total for e in episodes if e.reward is not None]


def _seconds(run: RunDirectory) -> dict[str, float]:
  """Of phases that an earlier process of this run finished after its commit."""
  path = run.path / "summary.json"
  return json.loads(path.read_text())["seconds"] if path.is_file() else {}


def _rates(tokens: Mapping[str, float]) -> dict[str, float]:
  """Tokens per second of rollouts (all phases) and of the learner."""
  rates = {}
  for name, clock in (
    ("rollout_sampled", "rollout_seconds"),
    ("rollout_prefilled", "rollout_seconds"),
    ("learner", "learner_seconds"),
  ):
    if tokens.get(clock):
      rates[name] = round(tokens[name] / tokens[clock], 1)
  return rates
