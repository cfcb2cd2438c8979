"""Fusion of rollouts: values by hand, and what must not matter."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl_jax.evaluation.fusion import fuse, fused
from arl_jax.rewards.search import SearchReward
from arl_jax.types import Episode, StopReason, Task

NAMES = st.lists(st.sampled_from("abcdefgh"), max_size=6)


def task():
  return Task(
    task_id="t",
    prompt="p",
    truth={"relevant": ["a", "b"], "answer_chunks": ["b"], "answer": "x"},
  )


def episode(answer, *, turns=2, encountered=("a", "c")):
  return Episode(
    task_id="t",
    rollout_index=0,
    segments=(),
    events=(),
    stop_reason=StopReason.MALFORMED if answer is None else StopReason.ANSWERED,
    outcome={
      "encountered": list(encountered),
      "pruned": ["c"],
      "answer": answer,
      "calls": ["search_corpus"] * turns,
    },
    turns=turns,
    seed=0,
  )


def test_ranks_add_up():
  # b: 1/22 + 1/21, a: 1/21, c: 1/23 + 1/22, d: 1/23.
  # b = 0.0931, c = 0.0889, a = 0.0476, d = 0.0435.
  assert fuse([["a", "b", "c"], ["b", "c", "d"]], most=9) == [
    "b",
    "c",
    "a",
    "d",
  ]
  assert fuse([["a", "b", "c"], ["b", "c", "d"]], most=2) == ["b", "c"]


def test_an_id_counts_once_in_a_ranking():
  # Otherwise a would have 1/21 + 1/22 + 1/23 against b's 1/21 + 1/22.
  assert fuse([["b"], ["a", "a", "a", "b"]], most=1) == ["b"]


@given(NAMES)
def test_one_ranking_stays_as_it_is(names):
  assert fuse([names], most=9) == list(dict.fromkeys(names))


@given(st.lists(NAMES, min_size=1, max_size=4))
def test_all_that_were_named_are_there_once(rankings):
  found = fuse(rankings, most=99)
  assert sorted(found) == sorted({n for r in rankings for n in r})


def test_a_fused_episode_is_scored_like_any_other():
  reward = SearchReward()
  episodes = [
    episode(["a"], turns=2),
    episode(["b", "c"], turns=5, encountered=("b",)),
    episode(None, turns=1, encountered=("d",)),
  ]
  whole = fused(task(), episodes, reward, most=2)
  # a and b are both first in a ranking; a in the earlier one.
  assert whole.outcome["answer"] == ["a", "b"]
  assert whole.outcome["encountered"] == ["a", "c", "b", "d"]
  assert whole.turns == 5
  # F_4 = 1, trajectory recall 1, the answer found: 0.7 + 0.3 + 1.
  assert whole.reward.total == pytest.approx(2.0)


def test_where_none_answered_nothing_is_fused():
  whole = fused(task(), [episode(None), episode(None)], SearchReward(), most=2)
  assert whole.stop_reason is StopReason.MALFORMED
  assert whole.reward.total == -0.5


def test_nothing_to_fuse_is_an_error():
  with pytest.raises(ValueError, match="no episode"):
    fused(task(), [], SearchReward(), most=2)


def test_what_is_no_search_can_not_be_fused():
  other = dataclasses.replace(episode(["a"]), outcome={"answer": ["a"]})
  with pytest.raises(ValueError, match="reports no 'encountered'"):
    fused(task(), [other], SearchReward(), most=2)
