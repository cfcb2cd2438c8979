"""What the groups of a step say, as numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from arl_jax import losses
from arl_jax.types import Episode, Group, StopReason

_TRUNCATED = (StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL)


def of_groups(groups: Sequence[Group], version: int) -> dict[str, float]:
  """Means over the episodes, and how old their tokens are.

  Args:
    groups: scored.
    version: of the policy that is trained on them.

  Returns:
    reward and its parts, turns, segments, sampled_tokens (trained ones an
    episode), episode_tokens (of the longest context) and its 95 % quantile,
    truncated (share that a limit ended), groups_without_signal (share),
    staleness_mean, staleness_max (policy versions) and staleness_<n> (share of
    trained tokens that are n versions old).
  """
  episodes = [e for g in groups for e in g.episodes]
  parts: dict[str, list[float]] = defaultdict(list)
  for episode in episodes:
    assert episode.reward is not None
    parts["reward"].append(episode.reward.total)
    for name, value in episode.reward.parts.items():
      parts[f"reward_{name}"].append(value)
    parts["turns"].append(episode.turns)
    parts["segments"].append(len(episode.segments))
    parts["sampled_tokens"].append(episode.trained_tokens)
    longest = max((len(s) for s in episode.segments), default=0)
    parts["episode_tokens"].append(longest)
    parts["truncated"].append(episode.stop_reason in _TRUNCATED)
  values = {name: float(np.mean(column)) for name, column in parts.items()}
  lengths = parts["episode_tokens"]
  if lengths:
    values["episode_tokens_p95"] = float(np.quantile(lengths, 0.95))
  silent = sum(not losses.has_signal(g.rewards) for g in groups)
  values["groups_without_signal"] = silent / max(len(groups), 1)
  return values | _staleness(episodes, version)


def _staleness(episodes: Sequence[Episode], version: int) -> dict[str, float]:
  found = [
    version - s.policy_version[s.trained] for e in episodes for s in e.segments
  ]
  ages = np.concatenate(found) if found else np.zeros(0, np.int32)
  if not ages.size:
    return {}
  ages = np.maximum(ages, 0)
  counts = np.bincount(ages)
  return {
    "staleness_mean": float(ages.mean()),
    "staleness_max": float(ages.max()),
    **{f"staleness_{n}": float(c / ages.size) for n, c in enumerate(counts)},
  }
