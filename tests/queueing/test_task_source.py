"""Order, shares, epochs, positions and what is left out."""

import collections
import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl_jax.queueing.task_source import (
  Source,
  TaskSource,
  mixed,
  parse_mixture,
)
from arl_jax.types import Task


def source(name="", size=3, weight=1.0):
  ids = tuple(f"{name}{i}" for i in range(size))
  return Source(name=name, weight=weight, task_ids=ids)


def of(*task_ids):
  return Source(name="", weight=1.0, task_ids=task_ids)


def draws(tasks, count):
  return [tasks.draw() for _ in range(count)]


SOURCES = st.lists(
  st.tuples(st.integers(1, 5), st.floats(0.1, 10.0)), min_size=1, max_size=4
).map(
  lambda pairs: [
    source("abcd"[i], size, weight) for i, (size, weight) in enumerate(pairs)
  ]
)


def test_shares_are_kept_at_every_draw():
  # Weights 1 and 3. Behind its share by: a ¼·1 − 0, b ¾·1 − 0 → b;
  # a ½ − 0, b 1½ − 1, equal → a, the first; a ¾ − 1, b 2¼ − 1 → b;
  # a 1 − 1, b 3 − 2 → b; and again.
  tasks = TaskSource([source("a", 2, 1.0), source("b", 2, 3.0)], seed=0)
  names = "".join(d.task_id[0] for d in draws(tasks, 8))
  assert names == "babbbabb"


@given(SOURCES, st.integers(0, 99), st.integers(1, 60))
def test_no_source_is_ever_behind_its_share_by_more_than_all_others(
  sources, seed, count
):
  tasks = TaskSource(sources, seed=seed)
  total = sum(s.weight for s in sources)
  found = collections.Counter(d.task_id[0] for d in draws(tasks, count))
  for s in sources:
    # Each draw goes to whoever is behind, so that those who are ahead are by
    # less than a draw; what they are ahead of is what others lack.
    assert found[s.name] < s.weight / total * count + 1
    lack = s.weight / total * count - found[s.name]
    assert lack < max(1, len(sources) - 1) + 1e-6


@given(SOURCES, st.integers(0, 99), st.integers(1, 3))
def test_each_task_comes_once_an_epoch_and_then_no_more(sources, seed, epochs):
  tasks = TaskSource(sources, seed=seed, epochs=epochs)
  found = []
  while (draw := tasks.draw()) is not None:
    found.append(draw)
  assert [d.number for d in found] == list(range(len(found)))
  expected = {
    (task_id, epoch)
    for s in sources
    for task_id in s.task_ids
    for epoch in range(epochs)
  }
  assert len(found) == len(expected)
  assert {(d.task_id, d.epoch) for d in found} == expected
  assert tasks.draw() is None


def test_epochs_have_orders_of_their_own_that_follow_from_the_seed():
  many = source(size=50)
  first, second = (
    [d.task_id for d in draws(TaskSource([many], seed=seed), 100)]
    for seed in (1, 2)
  )
  assert first[:50] != first[50:]
  assert first != second
  again = [d.task_id for d in draws(TaskSource([many], seed=1), 100)]
  assert again == first


@given(
  SOURCES,
  st.integers(0, 9),
  st.lists(st.floats(0, 1), max_size=40),
  st.integers(0, 40),
)
def test_a_position_gives_the_same_draws(sources, seed, rewards, after):
  limits = {"epochs": 3, "skip_below": 0.2, "skip_above": 0.9}
  tasks = TaskSource(sources, seed=seed, **limits)
  for reward in rewards:
    if (draw := tasks.draw()) is not None:
      tasks.measure(draw.task_id, reward)
  other = TaskSource(sources, seed=seed, **limits)
  other.go_to(tasks.state())
  assert other.state() == tasks.state()
  assert draws(other, after) == draws(tasks, after)


@given(SOURCES, st.lists(st.floats(0, 1), max_size=40))
def test_asking_for_nothing_changes_nothing(sources, rewards):
  tasks = TaskSource(sources, seed=3, skip_below=0.5)
  for reward in rewards:
    if (draw := tasks.draw()) is not None:
      tasks.measure(draw.task_id, reward)
  before = tasks.state()
  if tasks.draw() is None:
    assert tasks.state() == before


def test_too_hard_and_too_easy_tasks_are_left_out_until_measured_again():
  tasks = TaskSource([source(size=3)], seed=0, skip_below=0.25, skip_above=0.75)
  first = {d.task_id for d in draws(tasks, 3)}
  assert first == {"0", "1", "2"}
  tasks.measure("0", 0.2)
  tasks.measure("1", 0.8)
  # Only the unmeasured one is left, in epochs 1 to 4.
  assert [(d.task_id, d.epoch) for d in draws(tasks, 4)] == [
    ("2", epoch) for epoch in (1, 2, 3, 4)
  ]
  # The bounds themselves are neither.
  tasks.measure("0", 0.25)
  tasks.measure("1", 0.75)
  tasks.measure("2", 0.0)
  assert {d.task_id for d in draws(tasks, 4)} == {"0", "1"}
  tasks.measure("0", 1.0)
  tasks.measure("1", 0.0)
  assert tasks.draw() is None
  tasks.measure("1", 0.5)
  assert tasks.draw().task_id == "1"


def test_a_source_without_tasks_left_leaves_its_share_to_others():
  tasks = TaskSource(
    [source("a", 2, 9.0), source("b", 2, 1.0)], seed=0, skip_above=0.5
  )
  for name in ("a0", "a1"):
    tasks.measure(name, 1.0)
  assert [d.task_id[0] for d in draws(tasks, 4)] == list("bbbb")


@pytest.mark.parametrize(
  ("sources", "reason"),
  [
    ([], "there must be a source"),
    ([source(size=0)], "holds no task"),
    ([source(weight=0.0)], "weight 0.0, not > 0"),
    ([source(weight=math.inf)], "weight inf, not > 0"),
    ([source(weight=math.nan)], "weight nan, not > 0"),
    ([source(), source(size=1)], "occurs twice in the sources: '0'"),
    ([of("a", "b", "a")], "occurs twice in the sources: 'a'"),
    ([of("a", "")], "has id ''; it must be a text of 1 to 1024"),
    ([of("a", 3)], "has id 3; it must be a text"),
    ([of("a" * 1025)], "has id 'aaa"),
    ([of("a\ud800")], "isn't Unicode"),
  ],
)
def test_sources_that_cannot_be(sources, reason):
  with pytest.raises(ValueError, match=reason):
    TaskSource(sources, seed=0)


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"places": None}, "sources None, the run has"),
    ({"places": {"b": [0, 0, 2]}}, "sources .'b'., the run has .'a'."),
    ({"places": {"a": [0, 4, 2]}}, "an index in 0..3"),
    ({"places": {"a": [-1, 0, 2]}}, "not an epoch"),
    ({"places": {"a": [0, 0]}}, "not an epoch"),
    ({"places": {"a": "012"}}, "not an epoch"),
    ({"drawn": 3}, "has drawn 3 tasks, but 2 by source"),
    ({"drawn": None}, "has drawn None tasks"),
    ({"measured": {"a0": math.nan}}, "finite"),
    ({"measured": {"a0": "1"}}, "finite"),
    ({"measured": []}, "finite"),
  ],
)
def test_positions_that_cannot_be(changes, reason):
  tasks = TaskSource([source("a")], seed=0)
  draws(tasks, 2)
  state = {**tasks.state(), **changes}
  before = tasks.state()
  with pytest.raises(ValueError, match=reason):
    tasks.go_to(state)
  assert tasks.state() == before


def test_mixtures_are_parsed_strictly():
  assert parse_mixture("") == {}
  assert parse_mixture(" easy=1, hard=2.5 ") == {"easy": 1.0, "hard": 2.5}
  for text in ("easy", "easy=", "=1", "a=0", "a=-1", "a=inf", "a=1,a=2", "a=x"):
    with pytest.raises(ValueError, match=r"rl\.mixture has"):
      parse_mixture(text)


def test_tasks_are_mixed_by_where_they_came_from():
  tasks = [
    Task(task_id=f"{n}", prompt="", truth={}, provenance={"source": name})
    for n, name in enumerate(itertools.islice(itertools.cycle("ab"), 5))
  ]
  assert mixed(tasks, {}) == [
    Source(name="", weight=1.0, task_ids=("0", "1", "2", "3", "4"))
  ]
  assert mixed(tasks, {"b": 2.0}) == [
    Source(name="b", weight=2.0, task_ids=("1", "3"))
  ]
  with pytest.raises(ValueError, match="names source 'c'; tasks are of 'a'"):
    mixed(tasks, {"c": 1.0})
  with pytest.raises(ValueError, match="occurs twice"):
    mixed([*tasks, tasks[0]], {})


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, 99))
def test_lower_levels_come_first_in_every_epoch(levels, seed):
  ids = tuple(map(str, range(len(levels))))
  one = dataclasses.replace(of(*ids), levels=tuple(levels))
  tasks = TaskSource([one], seed=seed)
  for epoch in range(2):
    found = draws(tasks, len(ids))
    assert {d.epoch for d in found} == {epoch}
    assert sorted(d.task_id for d in found) == sorted(ids)
    reached = [levels[int(d.task_id)] for d in found]
    assert reached == sorted(levels)


def test_tasks_of_a_level_are_shuffled():
  ids = tuple(map(str, range(6)))
  one = dataclasses.replace(of(*ids), levels=(1, 1, 1, 0, 0, 0))
  orders = {
    tuple(d.task_id for d in draws(TaskSource([one], seed=seed), 6))
    for seed in range(40)
  }
  # 3! · 3! there are; 40 draws of them find 24 on average.
  assert len(orders) > 12


def test_levels_are_of_each_task():
  one = dataclasses.replace(of("a", "b"), levels=(1,))
  with pytest.raises(ValueError, match="2 tasks and 1 levels"):
    TaskSource([one], seed=0)


def test_a_curriculum_goes_by_hops():
  tasks = [
    Task(task_id=f"{n}", prompt="", truth={}, provenance={"hops": hops})
    for n, hops in enumerate((3, 1, 2))
  ]
  (found,) = mixed(tasks, {}, "hops")
  assert found.levels == (3, 1, 2)
  assert [d.task_id for d in draws(TaskSource([found], seed=0), 3)] == [
    *("1", "2", "0")
  ]
  tasks.append(Task(task_id="x", prompt="", truth={}))
  with pytest.raises(ValueError, match=r"'x' has provenance\['hops'\] None"):
    mixed(tasks, {}, "hops")
