"""Numbers of a step's groups, worked out by hand."""

import numpy as np
import pytest

from arl_jax.runtime import rollout_metrics
from arl_jax.types import Episode, Group, Reward, Segment, StopReason, Task


def segment(versions, prompt=2):
  """`prompt` tokens, then one sampled by each version."""
  n = prompt + len(versions)
  sampled = np.arange(n) >= prompt
  return Segment(
    ids=np.zeros(n, np.int32),
    roles=sampled.astype(np.uint8),
    sampled=sampled,
    behaviour_logp=np.zeros(n, np.float32),
    policy_version=np.array([-1] * prompt + list(versions), np.int32),
  )


def episode(index, reward, *segments, stop=StopReason.ANSWERED):
  return Episode(
    task_id="t",
    rollout_index=index,
    segments=segments,
    events=(),
    stop_reason=stop,
    outcome={},
    turns=index + 1,
    reward=Reward(total=reward, parts={"found": reward / 2}),
  )


def group(*episodes):
  task = Task(task_id="t", prompt="?", truth={})
  return Group(group_id="0/t", task=task, episodes=episodes)


def test_means_over_episodes_and_shares_of_tokens():
  one = group(
    episode(0, 1.0, segment([5, 5, 4])),
    episode(1, 0.0, segment([5]), segment([3], 6), stop=StopReason.TURN_LIMIT),
  )
  silent = group(
    episode(0, 0.5, segment([5, 5])),
    episode(1, 0.5, segment([5]), stop=StopReason.CONTEXT_FULL),
  )
  values = rollout_metrics.of_groups([one, silent], version=5)
  assert values["reward"] == pytest.approx(0.5)
  assert values["reward_found"] == pytest.approx(0.25)
  assert values["turns"] == pytest.approx(1.5)
  assert values["segments"] == pytest.approx(1.25)
  # 3, 2, 2 and 1 sampled tokens; the longest contexts have 5, 7, 4 and 3.
  assert values["sampled_tokens"] == pytest.approx(2.0)
  assert values["episode_tokens"] == pytest.approx(4.75)
  assert values["truncated"] == pytest.approx(0.5)
  assert values["groups_without_signal"] == pytest.approx(0.5)
  # Of eight tokens six are of version 5, one of 4, one of 3.
  assert values["staleness_0"] == pytest.approx(6 / 8)
  assert values["staleness_1"] == pytest.approx(1 / 8)
  assert values["staleness_2"] == pytest.approx(1 / 8)
  assert values["staleness_mean"] == pytest.approx(3 / 8)
  assert values["staleness_max"] == 2


def test_no_group_is_no_reward():
  values = rollout_metrics.of_groups([], version=0)
  assert values == {"groups_without_signal": 0.0}
