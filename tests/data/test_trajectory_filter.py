"""The published rules for what a policy is warmed up on."""

import pytest

from arl_jax.data.trajectory_filter import (
  FilterConfig,
  filter_trajectories,
)
from arl_jax.types import Episode, Group, Reward, StopReason, Task


def group(name, *recalls, stop=StopReason.ANSWERED, turns=3, task=None):
  """A group with an episode of each (trajectory recall, output recall)."""
  task = Task(task_id=task or name, prompt="?", truth={})
  return Group(
    group_id=name,
    task=task,
    episodes=tuple(
      Episode(
        task_id=task.task_id,
        rollout_index=i,
        segments=(),
        events=(),
        stop_reason=stop,
        outcome={},
        turns=turns,
        reward=Reward(
          total=0.0,
          parts={"trajectory_recall": seen, "output_recall": answered},
        ),
      )
      for i, (seen, answered) in enumerate(recalls)
    ),
  )


def left(filtered):
  return {
    g.group_id: [e.rollout_index for e in g.episodes] for g in filtered.groups
  }


def test_strong_ones_are_kept():
  found = filter_trajectories([group("a", (0.6, 0.5)), group("b", (1, 1))])
  assert left(found) == {"a": [0], "b": [0]}
  assert found.kept == {"strong": 2, "weak": 0, "zero_recall": 0}
  assert found.dropped == {}


def test_one_of_several_strong_ones_of_a_query():
  # The largest output recall, then trajectory recall; the first of equals.
  found = filter_trajectories(
    [group("a", (0.9, 0.5), (0.8, 0.7), (0.9, 0.7), (0.9, 0.7))]
  )
  assert left(found) == {"a": [2]}
  assert found.dropped == {"another_strong": 3}
  # A query is a task, not a group.
  found = filter_trajectories(
    [group("a", (1, 0.6), task="t"), group("b", (1, 0.8), task="t")]
  )
  assert left(found) == {"b": [0]}
  found = filter_trajectories(
    [group("a", (1, 0.6), (1, 0.8), (1, 0.7))], FilterConfig(per_query=2)
  )
  assert left(found) == {"a": [1, 2]}


def test_fewer_turns_decide_between_equals():
  groups = [
    group("a", (1, 1), task="t", turns=9),
    group("b", (1, 1), task="t", turns=4),
  ]
  assert left(filter_trajectories(groups)) == {"b": [0]}


def test_malformed_ones_are_dropped_whatever_they_found():
  for stop in (
    StopReason.MALFORMED, StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL
  ):  # fmt: skip
    found = filter_trajectories([group("a", (1, 1), stop=stop)])
    assert found.groups == ()
    assert found.dropped == {"malformed": 1}


def test_what_saw_much_more_than_it_answered_is_dropped():
  # 0.95 - 0.45 is the limit itself, whatever its rounding: kept as strong.
  found = filter_trajectories([group("a", (0.95, 0.45)), group("b", (1, 0.45))])
  assert left(found) == {"a": [0]}
  assert found.dropped == {"seen_but_not_answered": 1}


def test_below_the_limits_the_rate_is_linear_in_output_recall():
  # 0.1 of 0.4 is a quarter, 0.3 three quarters: of 2000 episodes within four
  # standard deviations, sqrt(2000 * 3/16) = 19.4.
  for recall, share in ((0.1, 0.25), (0.2, 0.5), (0.3, 0.75)):
    groups = [group(f"g{i}", (0.5, recall)) for i in range(2000)]
    found = filter_trajectories(groups)
    assert abs(found.kept["weak"] - 2000 * share) < 4 * 23
    assert found.kept["weak"] + found.dropped["thinned_out"] == 2000
  # From 0.4 on all are kept, though they are not strong.
  groups = [group(f"g{i}", (0.5, 0.4)) for i in range(100)]
  assert filter_trajectories(groups).kept["weak"] == 100


def test_what_is_kept_follows_from_seed_and_ids_alone():
  groups = [group(f"g{i}", (0.5, 0.2), (0.3, 0.1)) for i in range(50)]
  found = left(filter_trajectories(groups))
  assert left(filter_trajectories(groups)) == found
  half = left(filter_trajectories(groups[25:]))
  assert half == {k: v for k, v in found.items() if int(k[1:]) >= 25}
  assert left(filter_trajectories(groups, FilterConfig(seed=1))) != found


def test_zero_recall_is_a_twentieth_at_most_and_one_a_query():
  strong = [group(f"s{i}", (1, 1)) for i in range(38)]
  zeros = [group(f"z{i}", (0.2, 0), (0, 0)) for i in range(10)]
  found = filter_trajectories([*strong, *zeros])
  # 2 of 40 are 5 %; 3 of 41 would be more.
  assert found.kept == {"strong": 38, "weak": 0, "zero_recall": 2}
  assert found.dropped == {"zero_recall_surplus": 18}
  assert sum(len(e) for k, e in left(found).items() if k[0] == "z") == 2
  # One short of 38 others, only one fits: 1 of 38.
  assert filter_trajectories([*strong[1:], *zeros]).kept["zero_recall"] == 1
  assert filter_trajectories(zeros).groups == ()
  # One query has one, however many would fit.
  many = [group(f"s{i}", (1, 1)) for i in range(400)]
  found = filter_trajectories([*many, zeros[0]])
  assert found.kept["zero_recall"] == 1
  # Seen by more than half and not answered is another fault.
  found = filter_trajectories([*strong, group("z", (0.6, 0))])
  assert found.dropped == {"seen_but_not_answered": 1}


def test_episodes_keep_their_order_and_groups_their_task():
  groups = [group("b", (0.5, 0.4), (1, 1), (0.5, 0.4)), group("a", (1, 1))]
  found = filter_trajectories(groups)
  assert list(left(found).items()) == [("b", [0, 1, 2]), ("a", [0])]
  assert found.groups[0].task == groups[0].task
  assert found.groups[0].episodes[0] is groups[0].episodes[0]
  assert filter_trajectories([]).groups == ()


def test_refuses_what_has_no_recall():
  episode = group("a", (1, 1)).episodes[0]
  unscored = Group(
    group_id="a",
    task=Task(task_id="a", prompt="?", truth={}),
    episodes=(
      Episode(
        **{f: getattr(episode, f) for f in episode.__slots__ if f != "reward"}
      ),
    ),
  )
  with pytest.raises(ValueError, match="episode 0 of group a has no reward"):
    filter_trajectories([unscored])
  with pytest.raises(ValueError, match="trajectory_recall 2 in its reward"):
    filter_trajectories([group("a", (2, 1))])


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("trajectory_recall", 1.5),
    ("output_recall", 0.0),
    ("most_excess", -0.1),
    ("zero_share", 1.0),
    ("per_query", 0),
  ],
)
def test_refuses_rules_that_cannot_be(field, value):
  with pytest.raises(ValueError, match=f"{field} is {value}"):
    FilterConfig(**{field: value})
