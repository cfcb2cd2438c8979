"""Which demonstrations a warm start has, and what it needs."""

import collections
import dataclasses
import itertools

import pytest

from arl_jax.data.trajectory_filter import FilterConfig, filter_trajectories
from arl_jax.envs.search.tools import TOOL_NAMES
from arl_jax.problems.problem import demonstrated
from arl_jax.problems.search import SearchProblem
from arl_jax.runtime import warm_start
from arl_jax.runtime.config import Config
from arl_jax.types import Group, Task
from tests import made_up_corpus
from tests.actors import echo_problem


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  path = tmp_path_factory.mktemp("corpus")
  made_up_corpus.write(path)
  config = Config()
  config.corpus.path = str(path)
  config.corpus.vocab_size, config.corpus.chunk_tokens = 800, 24
  config.tasks.train, config.tasks.heldout, config.tasks.clue_words = 24, 6, 2
  config.warm_start.episodes = 72
  return config


@pytest.fixture(scope="module")
def problem(config):
  return SearchProblem(config)


def play(config, problem, **fields):
  for name, value in fields.items():
    setattr(config.warm_start, name, value)
  return warm_start.play(
    config, problem, on_done=lambda done: None, should_stop=lambda: False
  )


def test_the_filter_keeps_what_the_published_rules_keep(config, problem):
  everything = play(config, problem, filter=False)
  assert len(everything) == 72
  kept = play(config, problem, filter=True)
  tasks = {task.task_id: task for task in problem.train}
  groups = [
    Group(
      group_id=f"{e.rollout_index}/{e.task_id}",
      task=tasks[e.task_id],
      episodes=(e,),
    )
    for e in everything
  ]
  wanted = filter_trajectories(groups, FilterConfig(seed=config.seed))

  def names(episodes):
    return [(e.task_id, e.rollout_index) for e in episodes]

  assert names(kept) == names(g.episodes[0] for g in wanted.groups)
  assert 0 < len(kept) < 72
  strong = collections.Counter(
    e.task_id
    for e in kept
    if e.reward.parts["trajectory_recall"] > 0.5
    and e.reward.parts["output_recall"] > 0.4
  )
  # One of several good ones of a question.
  assert max(strong.values()) == 1


def test_only_tasks_are_played_by_the_plan(config):
  planned = dataclasses.replace(
    config, script=dataclasses.replace(config.script, diligence=1.0)
  )
  problem = SearchProblem(planned)

  def openings(tasks):
    for seed, task in enumerate(tasks):
      ids = problem.demonstrator(task, seed).play([], 64).ids
      yield task, problem.renderer.parse(ids, TOOL_NAMES).calls

  def by_plan(task, calls):
    clues = task.prompt.split(" ; ")
    return [c.name for c in calls] == ["search_corpus"] and (
      calls[0].argument in clues
    )

  assert all(by_plan(*opening) for opening in openings(problem.train))
  questions = itertools.islice(problem.practice(0), 40)
  practice = [Task(task_id=q, prompt=q, truth={}) for q in questions]
  followed = [by_plan(*opening) for opening in openings(practice)]
  assert 0 < sum(followed) < 30


def test_a_problem_that_nobody_plays_needs_no_warm_start(config):
  problem = echo_problem.Problem(config)
  with pytest.raises(ValueError, match=r"set warm_start\.steps to 0"):
    demonstrated(problem)
