"""Scores a run's policy on held-out tasks, alone and with rollouts fused.

  python -m launch.evaluate --run_dir=runs/quickstart --rollouts=4
  python -m launch.evaluate --run_dir=runs/quickstart --without=prune_chunks

Prints JSON: metrics of single rollouts, [mean, low, high], and of as many
rollouts a task as asked for, fused by reciprocal rank. What is changed for the
policy (an ablation) is a flag.
"""

from __future__ import annotations

import json
import pathlib

from absl import app, flags

from arl_jax.actors.config import from_json
from arl_jax.evaluation import fusion, suites
from arl_jax.evaluation.run_record import RunRecord
from arl_jax.problems.problem import Problem, make_problem
from arl_jax.runtime.config import Config
from arl_jax.runtime.local_rollouts import LocalRollouts, heldout_jobs
from arl_jax.runtime.policies import initial_params, load_policy
from arl_jax.types import Environment, Episode, Task
from launch import command

_RUN_DIR = flags.DEFINE_string("run_dir", "", "Of the run.")
_COMMIT = flags.DEFINE_integer(
  "commit", None, "Its number; the newest by default.", lower_bound=0
)
_BASE = flags.DEFINE_bool("base", False, "Score what training began from.")
_ROLLOUTS = flags.DEFINE_integer(
  "rollouts", 1, "Of each task, to be fused.", lower_bound=1, upper_bound=64
)
_WITHOUT = flags.DEFINE_list("without", [], "Tools that are taken away.")
_BUDGET = flags.DEFINE_integer(
  "token_budget",
  None,
  "Another context, in tokens; its thresholds scale along.",
  lower_bound=1,
)
_TASKS = flags.DEFINE_integer(
  "tasks", None, "Only the first ones.", lower_bound=1
)


class _Without:
  """An environment that lacks some tools."""

  def __init__(self, environment: Environment, without: frozenset[str]):
    self._environment, self._without = environment, without
    self.start, self.execute = environment.start, environment.execute
    self.finish, self.outcome = environment.finish, environment.outcome

  @property
  def tool_names(self) -> tuple[str, ...]:
    names = self._environment.tool_names
    return tuple(n for n in names if n not in self._without)


class _Ablated:
  """A problem whose environments lack some tools."""

  def __init__(self, problem: Problem, without: frozenset[str]):
    self._problem, self._without = problem, without

  def __getattr__(self, name: str):
    return getattr(self._problem, name)

  def environment(self, task: Task, seed: int) -> Environment:
    return _Without(self._problem.environment(task, seed), self._without)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
  if not _RUN_DIR.value:
    raise ValueError("--run_dir is empty; name the folder of a run")
  path = pathlib.Path(_RUN_DIR.value)
  config = from_json(Config, RunRecord(path).config | {"run_dir": str(path)})
  problem = make_problem(config)
  tasks = list(problem.heldout)[: _TASKS.value]
  policy = config.policy(problem.renderer.tokenizer.vocab_size)
  if _BASE.value:
    params, record = initial_params(config, policy), {"version": 0}
  else:
    params, record = load_policy(path, config, policy, _COMMIT.value)
  if _BUDGET.value:
    _rescale(config, _BUDGET.value)
  if _WITHOUT.value:
    problem = _ablated(problem, tasks[0])
  rollouts = LocalRollouts(config, problem, policy)
  jobs = heldout_jobs(config, tasks, _ROLLOUTS.value)
  found = rollouts.run(jobs, params, record["version"], training=False)
  failed = sum(episode is None for episode in found)
  if failed:
    raise ValueError(f"{failed} of {len(jobs)} episodes failed; see the log")
  print(json.dumps(_scored(config, problem, tasks, [e for e in found if e])))


def _rescale(config: Config, budget: int) -> None:
  """Thresholds stay the same shares of the context."""
  agent = config.agent
  for name in ("soft_threshold", "hard_threshold"):
    scaled = getattr(agent, name) * budget // agent.token_budget
    setattr(agent, name, scaled)
  agent.token_budget = budget
  agent.validate()


def _ablated(problem: Problem, task: Task) -> Problem:
  known = problem.environment(task, 0).tool_names
  unknown = [name for name in _WITHOUT.value if name not in known]
  if unknown:
    raise ValueError(f"--without has {unknown}, none of {list(known)}")
  return _Ablated(problem, frozenset(_WITHOUT.value))


def _scored(
  config: Config, problem: Problem, tasks: list[Task], episodes: list[Episode]
) -> dict[str, object]:
  count, seed = _ROLLOUTS.value, config.evaluation_seed
  groups = [episodes[i : i + count] for i in range(0, len(episodes), count)]
  repeated = [task for task in tasks for _ in range(count)]
  single = suites.score(repeated, episodes, seed=seed)
  result: dict[str, object] = {
    "tasks": len(tasks),
    "rollouts": count,
    "single": {k: v.to_json() for k, v in single.items()},
  }
  if count > 1:
    whole = [
      fusion.fused(t, g, problem.reward, most=config.search.max_answer)
      for t, g in zip(tasks, groups, strict=True)
    ]
    fused = suites.score(tasks, whole, seed=seed)
    result["fused"] = {
      k: v.to_json() for k, v in fused.items() if k in _OF_ANSWERS
    }
  return result


# Metrics that mean something of several rollouts together.
_OF_ANSWERS = (
  *("reward", "final_answer_found", "output_recall", "output_precision"),
  *("trajectory_recall", "answered_rate"),
)


def run() -> None:
  app.run(lambda argv: command.guarded(main, argv))


if __name__ == "__main__":
  run()
