"""Advantages of the rollouts of one group (numpy, on the host)."""

from __future__ import annotations

import numpy as np

# Rewards that differ by less are equal: noise is not a signal.
_EQUAL = 1e-8

BASELINES = ("mean", "leave_one_out")


def has_signal(rewards: np.ndarray) -> bool:
  """False if all rewards of the group are equal (max - min <= 1e-8)."""
  rewards = np.asarray(rewards, np.float64)
  return bool(rewards.size and rewards.max() - rewards.min() > _EQUAL)


def group_advantages(
  rewards: np.ndarray,
  *,
  baseline: str = "mean",
  normalise_std: bool = False,
) -> np.ndarray:
  """R minus a baseline of its own group.

  Args:
    rewards: [G] of one group.
    baseline: "mean" (r̄ of the group) or "leave_one_out" (r̄ of the others; a
      group of one has advantage 0).
    normalise_std: also divide by (population standard deviation + 1e-6); a
      group without signal gives 0.

  Returns:
    [G] float64.

  Raises:
    ValueError: an unknown baseline, or rewards that aren't finite.
  """
  rewards = np.asarray(rewards, np.float64)
  if not np.isfinite(rewards).all():
    raise ValueError(f"rewards {rewards.tolist()} are not all finite")
  if baseline not in BASELINES:
    raise ValueError(f"baseline is {baseline!r}, not 'mean' or 'leave_one_out'")
  n = rewards.size
  if n == 0:
    return rewards
  advantages = rewards - rewards.mean()
  if normalise_std:
    if not has_signal(rewards):
      return np.zeros(n)
    advantages = advantages / (rewards.std() + 1e-6)
  if baseline == "leave_one_out":
    advantages = advantages * (n / (n - 1)) if n > 1 else np.zeros(1)
  return advantages
