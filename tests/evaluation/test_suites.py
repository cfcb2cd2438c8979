"""Metrics of held-out episodes, against numbers worked out by hand."""

import numpy as np
import pytest

from arl_jax.evaluation import suites
from arl_jax.types import Episode, Event, Reward, StopReason, Task

PARTS = ("answer_found", "output_recall", "output_precision",
         "trajectory_recall")  # fmt: skip


def task(relevant=("a", "b")):
  return Task(task_id="t", prompt="p", truth={"relevant": list(relevant)})


def episode(reward=0.0, kinds=(), pruned=(), answer=None, turns=1, **parts):
  return Episode(
    task_id="t",
    rollout_index=0,
    segments=(),
    events=tuple(Event(turn=0, kind=kind) for kind in kinds),
    stop_reason=StopReason.ANSWERED if answer else StopReason.TURN_LIMIT,
    outcome={"answer": answer, "pruned": list(pruned)},
    turns=turns,
    reward=Reward(total=reward, parts=dict.fromkeys(PARTS, 0.0) | parts),
  )


def score(*episodes):
  return suites.score([task()] * len(episodes), episodes, seed=0)


def mean(interval):
  return interval.to_json()[0]


def test_means_over_episodes():
  result = score(
    episode(reward=1.0, turns=2, answer=["a"], output_recall=0.5),
    episode(reward=0.0, turns=4, output_recall=0.0),
  )
  assert mean(result["reward"]) == pytest.approx(0.5)
  assert mean(result["turns"]) == pytest.approx(3)
  assert mean(result["answered_rate"]) == pytest.approx(0.5)
  assert mean(result["output_recall"]) == pytest.approx(0.25)


def test_promised_metrics_are_there_with_intervals_around_the_mean():
  draw = np.random.default_rng(0)
  result = score(*[episode(reward=x) for x in draw.normal(size=40)])
  assert set(result) >= {
    "reward", "final_answer_found", "output_recall", "output_precision",
    "turns", "prune_accuracy", "malformed_call_rate",
  }  # fmt: skip
  value, low, high = result["reward"].to_json()
  assert low < value < high


def test_episodes_of_another_problem_have_what_all_have():
  other = Episode(
    task_id="t",
    rollout_index=0,
    segments=(),
    events=(Event(turn=0, kind="tool_call"),),
    stop_reason=StopReason.ANSWERED,
    outcome={"tests_passed": 3},
    turns=2,
    reward=Reward(total=0.75, parts={"passed": 0.75}),
  )
  result = suites.score([task()] * 2, [other] * 2, seed=0)
  assert set(result) == {
    *("reward", "turns", "answered_rate", "sampled_tokens"),
    "malformed_call_rate",
  }
  assert mean(result["reward"]) == pytest.approx(0.75)
  assert mean(result["answered_rate"]) == 1.0


def test_rates_are_ratios_of_sums_not_means_of_ratios():
  # 1 of 1 and 1 of 4 are right: 2 of 5, not (1 + 1/4) / 2.
  result = score(episode(pruned=["x"]), episode(pruned=["a", "b", "y", "a"]))
  assert mean(result["prune_accuracy"]) == pytest.approx(2 / 5)
  result = score(
    episode(kinds=["malformed_call"]),
    episode(kinds=["tool_call"] * 3 + ["malformed_call", "notice"]),
  )
  assert mean(result["malformed_call_rate"]) == pytest.approx(2 / 5)


def test_a_refused_call_is_not_malformed():
  result = score(episode(kinds=["refused_call", "malformed_call"]))
  assert mean(result["malformed_call_rate"]) == pytest.approx(0.5)


def test_nothing_pruned_is_unknown_not_perfect():
  assert mean(score(episode(), episode())["prune_accuracy"]) is None


def test_is_the_same_for_the_same_seed():
  episodes = [episode(reward=x / 7) for x in range(20)]
  assert score(*episodes) == score(*episodes)


def test_tasks_and_episodes_belong_together():
  with pytest.raises(ValueError, match=r"zip|argument|tasks"):
    suites.score([task()], [episode(), episode()], seed=0)
