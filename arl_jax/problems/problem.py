"""What a run is about: tasks, environments and rewards."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from arl_jax.actors.config import ActorConfig
from arl_jax.chat.messages import Tool
from arl_jax.chat.renderer import AgentRenderer
from arl_jax.types import Environment, PolicyClient, RewardFn, Sample, Task


@runtime_checkable
class Problem(Protocol):
  """Everything the trainer needs to know about what is learned.

  Attributes:
    train: tasks that may be trained on.
    heldout: tasks that are only evaluated.
    renderer: of the policy's chat format.
    reward: scores finished episodes.
  """

  @property
  def train(self) -> Sequence[Task]: ...

  @property
  def heldout(self) -> Sequence[Task]: ...

  @property
  def renderer(self) -> AgentRenderer: ...

  @property
  def reward(self) -> RewardFn: ...

  def environment(self, task: Task, seed: int) -> Environment:
    """A fresh environment for one episode."""

  def digests(self) -> dict[str, str]:
    """What identifies the data."""


class Player(PolicyClient, Protocol):
  """A script in place of a policy."""

  def play(self, ids: Sequence[int], max_tokens: int) -> Sample:
    """The next message in a context."""


@runtime_checkable
class Demonstrated(Problem, Protocol):
  """A problem that can be shown, as the warm start needs it."""

  def demonstrator(self, task: Task, seed: int) -> Player:
    """Who plays an episode, or the opening of a task without truth."""

  def practice(self, seed: int) -> Iterator[str]:
    """An endless stream of questions, for openings only."""


@runtime_checkable
class Taught(Problem, Protocol):
  """A problem that a chat model can show; tasks open with their prompt.

  Attributes:
    system: what the policy is told before the question.
    tools: that its environments offer, each with one argument.
  """

  @property
  def system(self) -> str: ...

  @property
  def tools(self) -> Sequence[Tool]: ...


def make_problem(config: ActorConfig) -> Problem:
  """The problem that a configuration names.

  Raises:
    ValueError: there is none of that name, or it refuses the configuration.
  """
  module, _, name = config.problem.partition(":")
  try:
    make = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      f"problem is {config.problem!r}, which can't be imported ({error}); it is"
      " like my_package.my_module:MyProblem"
    ) from error
  if not callable(make):
    raise ValueError(
      f"problem is {config.problem!r}, a {type(make).__name__}; it must make a"
      " Problem from the configuration"
    )
  found = make(config)
  if not isinstance(found, Problem):
    lacks = [
      name
      for name in (*Problem.__annotations__, *vars(Problem))
      if not name.startswith("_") and not hasattr(found, name)
    ]
    raise ValueError(
      f"problem is {config.problem!r}, which makes a {type(found).__name__}"
      f" without {', '.join(lacks)}"
    )
  return found


def demonstrated(problem: Problem) -> Demonstrated:
  """The same, as one that can be shown.

  Raises:
    ValueError: it can't be.
  """
  if not isinstance(problem, Demonstrated):
    raise ValueError(
      f"the problem is a {type(problem).__name__}, without `demonstrator` and"
      " `practice`, which a warm start needs; set warm_start.steps to 0"
    )
  return problem
