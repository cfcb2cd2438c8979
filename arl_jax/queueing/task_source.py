"""Which task comes next: a mixture of sources, without the too hard or easy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from arl_jax.agents.harness import derive_seed
from arl_jax.types import Task

# Of the tasks of an epoch.
ORDERS = ("shuffled", "hops")

# Characters of a task's id, which is part of many messages.
MAX_TASK_ID = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
  """Tasks by id, and how often they come compared with other sources'.

  Attributes:
    name: of the source.
    weight: > 0.
    task_ids: of its tasks.
    levels: of each task; in every epoch those of lower levels come first.
      Empty for no levels.
  """

  name: str
  weight: float
  task_ids: tuple[str, ...]
  levels: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
  """A task that was handed out.

  Attributes:
    number: of the draw, from 0.
    task_id: of the task.
    epoch: of its source, from 0.
  """

  number: int
  task_id: str
  epoch: int


class TaskSource:
  """Draws tasks: each source's shuffled anew an epoch, none twice in one.

  Where tasks have levels, those of one level are shuffled.

  What comes next follows from the seed, the position and the rewards that were
  measured, all of which are in `state`.
  """

  def __init__(
    self,
    sources: Sequence[Source],
    *,
    seed: int,
    epochs: int = 0,
    skip_below: float = -math.inf,
    skip_above: float = math.inf,
  ):
    """Starts at the first draw.

    Args:
      sources: at least one, none without tasks, no task in two.
      seed: of the orders.
      epochs: after which a source ends; 0 for never.
      skip_below: tasks whose measured reward is below it are left out.
      skip_above: likewise above it.

    Raises:
      ValueError: a source that can't be.
    """
    _check(sources)
    self._sources, self._seed, self._epochs = tuple(sources), seed, epochs
    self._low, self._high = skip_below, skip_above
    self._drawn = 0
    # Of each source: epoch, index in it, tasks drawn.
    self._places = [[0, 0, 0] for _ in sources]
    self._measured: dict[str, float] = {}
    self._orders: dict[int, tuple[int, np.ndarray]] = {}

  def draw(self) -> Draw | None:
    """The next task; None if all sources have ended."""
    left = [i for i in range(len(self._sources)) if self._advance(i)]
    if not left:
      return None
    # The one furthest behind its share, the first of equals.
    total = sum(self._sources[i].weight for i in left)
    done = sum(self._places[i][2] for i in left) + 1
    chosen = max(
      left,
      key=lambda i: (
        self._sources[i].weight / total * done - self._places[i][2],
        -i,
      ),
    )
    place = self._places[chosen]
    draw = Draw(
      number=self._drawn, task_id=self._at(chosen, *place[:2]), epoch=place[0]
    )
    place[1] += 1
    place[2] += 1
    self._drawn += 1
    return draw

  def measure(self, task_id: str, reward: float) -> None:
    """Takes a group's mean reward as how easy its task is now."""
    self._measured[task_id] = float(reward)

  def state(self) -> dict[str, Any]:
    """The position, as JSON values."""
    return {
      "drawn": self._drawn,
      "places": {
        s.name: list(p)
        for s, p in zip(self._sources, self._places, strict=True)
      },
      "measured": dict(self._measured),
    }

  def go_to(self, state: Mapping[str, Any]) -> None:
    """Goes to a position. Raises ValueError for one of other sources."""
    places, measured = state.get("places"), state.get("measured")
    names = [s.name for s in self._sources]
    if not isinstance(places, Mapping) or sorted(places) != sorted(names):
      found = sorted(places) if isinstance(places, Mapping) else places
      raise ValueError(
        f"the position is in task sources {found!r:.200}, the run has"
        f" {sorted(names)}"
      )
    for source in self._sources:
      size = len(source.task_ids)
      match places[source.name]:
        case [int(epoch), int(index), int(done)] if (
          epoch >= 0 and 0 <= index <= size and done >= 0
        ):
          pass
        case other:
          raise ValueError(
            f"the position in source {source.name!r} is {other!r:.80}, not an"
            f" epoch, an index in 0..{size} and how many were drawn"
          )
    total = sum(place[2] for place in places.values())
    if state.get("drawn") != total:
      raise ValueError(
        f"the position has drawn {state.get('drawn')!r:.80} tasks, but {total}"
        " by source"
      )
    if not isinstance(measured, Mapping) or not all(
      isinstance(reward, int | float) and math.isfinite(reward)
      for reward in measured.values()
    ):
      raise ValueError("the position's measured rewards aren't finite numbers")
    self._drawn = total
    self._places = [list(places[name]) for name in names]
    self._measured = {name: float(reward) for name, reward in measured.items()}

  def _advance(self, i: int) -> bool:
    """Whether a source has a next task; goes past what is left out to it."""
    size = len(self._sources[i].task_ids)
    epoch, index, done = self._places[i]
    for _ in range(2 * size + 1):
      if index >= size:
        epoch, index = epoch + 1, 0
      if self._epochs and epoch >= self._epochs:
        return False
      reward = self._measured.get(self._at(i, epoch, index))
      if reward is None or self._low <= reward <= self._high:
        self._places[i] = [epoch, index, done]
        return True
      index += 1
    # Every task of it is too hard or too easy. The place stays: how often
    # somebody asks must not change what comes once one is measured again.
    return False

  def _at(self, i: int, epoch: int, index: int) -> str:
    source = self._sources[i]
    if i not in self._orders or self._orders[i][0] != epoch:
      name = (source.name,) if source.name else ()
      random = np.random.default_rng(
        derive_seed(self._seed, "rl", epoch, *name)
      )
      order = random.permutation(len(source.task_ids))
      if source.levels:
        levels = np.array(source.levels)[order]
        order = order[np.argsort(levels, kind="stable")]
      self._orders[i] = epoch, order
    return source.task_ids[int(self._orders[i][1][index])]


def _check(sources: Sequence[Source]) -> None:
  if not sources:
    raise ValueError("there must be a source of tasks")
  seen: set[str] = set()
  for source in sources:
    if not source.task_ids:
      raise ValueError(f"task source {source.name!r} holds no task")
    if not 0 < source.weight < math.inf:
      raise ValueError(
        f"task source {source.name!r} has weight {source.weight}, not > 0"
      )
    if source.levels and len(source.levels) != len(source.task_ids):
      raise ValueError(
        f"task source {source.name!r} has {len(source.task_ids)} tasks and"
        f" {len(source.levels)} levels; there must be one of each task, or none"
      )
    for task_id in source.task_ids:
      _check_id(task_id)
      if task_id in seen:
        raise ValueError(
          f"a task id occurs twice in the sources: {task_id!r:.100}"
        )
      seen.add(task_id)


def _check_id(task_id: Any) -> None:
  """Raises ValueError for what can't be sent, before anybody tries."""
  if not isinstance(task_id, str) or not 0 < len(task_id) <= MAX_TASK_ID:
    raise ValueError(
      f"a task has id {task_id!r:.100}; it must be a text of 1 to {MAX_TASK_ID}"
      " characters"
    )
  try:
    task_id.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f"a task has id {task_id!r:.100}, which isn't Unicode: {error.reason}"
    ) from error


def parse_mixture(text: str) -> dict[str, float]:
  """Weights by source from "easy=1,hard=3".

  Raises:
    ValueError: names the part that can't be.
  """
  weights: dict[str, float] = {}
  for part in filter(None, (p.strip() for p in text.split(","))):
    name, _, number = part.partition("=")
    try:
      weight = float(number)
    except ValueError:
      weight = math.nan
    if not name or name in weights or not 0 < weight < math.inf:
      raise ValueError(
        f"rl.mixture has {part!r}; it is like easy=1,hard=3, with each source"
        " once and weights > 0"
      )
    weights[name] = weight
  return weights


def of_epoch(task: Task, epoch: int) -> Task:
  """The same task, which says in its provenance what epoch it was drawn in."""
  return dataclasses.replace(
    task, provenance={**task.provenance, "epoch": epoch}
  )


def mixed(
  tasks: Sequence[Task], weights: Mapping[str, float], order: str = "shuffled"
) -> list[Source]:
  """Sources of tasks by `provenance["source"]`; one of all without weights.

  Args:
    tasks: to draw from.
    weights: of the sources.
    order: one of `ORDERS`, within an epoch of a source. "hops" takes tasks with
      fewer hops (`provenance["hops"]`) first, a curriculum of Context-1.

  Raises:
    ValueError: the weights name a source that has no task, the tasks can't be
      told apart by their ids, or don't say how many hops they have.
  """
  found = _mixed(tasks, weights)
  if order == "hops":
    hops = {task.task_id: _hops(task) for task in tasks}
    found = [
      dataclasses.replace(s, levels=tuple(hops[i] for i in s.task_ids))
      for s in found
    ]
  _check(found)
  return found


def _hops(task: Task) -> int:
  hops = task.provenance.get("hops")
  if type(hops) is not int:
    raise ValueError(
      f"task {task.task_id!r:.100} has provenance['hops'] {hops!r:.50}, no"
      " integer; rl.order 'hops' needs it"
    )
  return hops


def _mixed(tasks: Iterable[Task], weights: Mapping[str, float]) -> list[Source]:
  if not weights:
    ids = tuple(task.task_id for task in tasks)
    return [Source(name="", weight=1.0, task_ids=ids)]
  found: dict[str, list[str]] = {}
  for task in tasks:
    name = str(task.provenance.get("source", ""))
    found.setdefault(name, []).append(task.task_id)
  for name in weights:
    if name not in found:
      raise ValueError(
        f"rl.mixture names source {name!r}; tasks are of"
        f" {', '.join(map(repr, sorted(found)))}"
      )
  return [
    Source(name=name, weight=weight, task_ids=tuple(found[name]))
    for name, weight in weights.items()
  ]
