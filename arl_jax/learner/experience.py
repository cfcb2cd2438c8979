"""What is learned from episodes: their segments, each with an advantage."""

from __future__ import annotations

import dataclasses

from arl_jax import losses
from arl_jax.types import Group, Segment


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Experience:
  """What is learned from one episode.

  Attributes:
    segments: of the episode, all of them.
    advantage: of every token sampled in them.
  """

  segments: tuple[Segment, ...]
  advantage: float

  @property
  def trained_tokens(self) -> int:
    return sum(int(s.trained.sum()) for s in self.segments)


def of_group(
  group: Group, *, baseline: str = "mean", normalise_std: bool = False
) -> list[Experience]:
  """Every sampled token of a rollout gets the rollout's advantage.

  That is all segments of it: turns, summaries, the parts before a prune.

  Raises:
    ValueError: as `losses.group_advantages`, or an episode without a reward.
  """
  advantages = losses.group_advantages(
    group.rewards, baseline=baseline, normalise_std=normalise_std
  )
  return [
    Experience(segments=episode.segments, advantage=float(advantage))
    for episode, advantage in zip(group.episodes, advantages, strict=True)
  ]
