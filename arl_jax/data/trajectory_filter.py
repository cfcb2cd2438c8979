"""Which trajectories a policy is warmed up on.

The rules of Chroma's Context-1 (2026), whose report gives the limits 0.5 and
0.4 and the 5 %; that the rate falls linearly with output recall, and the excess
of 0.5, are choices of this project. No jax.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from arl_jax.types import Episode, Group, StopReason

# A limit that is met exactly is met, though its factors are rounded.
_ROUNDING = 1e-9

# Why an episode was kept, and why it was dropped.
STRONG, WEAK, ZERO = "strong", "weak", "zero_recall"
MALFORMED, EXCESS, ANOTHER, THINNED, SURPLUS = (
  "malformed",
  "seen_but_not_answered",
  "another_strong",
  "thinned_out",
  "zero_recall_surplus",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
  """The rules' numbers.

  Attributes:
    trajectory_recall: above which an episode is strong, if
    output_recall: is exceeded too; below, an episode is kept with probability
      (its output recall) / (this).
    most_excess: trajectory recall minus output recall; with more of it the
      policy saw what it then left out.
    zero_share: of all that is kept, at most, with an output recall of 0.
    per_query: strong episodes of a query at most.
    seed: of what is kept among the weak.

  Raises:
    ValueError: a field is out of its range.
  """

  trajectory_recall: float = 0.5
  output_recall: float = 0.4
  most_excess: float = 0.5
  zero_share: float = 0.05
  per_query: int = 1
  seed: int = 0

  def __post_init__(self) -> None:
    for name in ("trajectory_recall", "most_excess"):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f"{name} is {getattr(self, name)}, not 0 to 1")
    if not 0 < self.output_recall <= 1:
      raise ValueError(
        f"output_recall is {self.output_recall}, not above 0 and at most 1"
      )
    if not 0 <= self.zero_share < 1:
      raise ValueError(f"zero_share is {self.zero_share}, not 0 to below 1")
    if self.per_query < 1:
      raise ValueError(f"per_query is {self.per_query}, not at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Filtered:
  """What was kept.

  Attributes:
    groups: those with an episode left, in order, with what is left of each.
    kept: episodes by the rule that kept them: "strong", "weak", "zero_recall".
    dropped: episodes by the rule that dropped them: "malformed" (also without a
      final answer), "seen_but_not_answered", "another_strong" of the same
      query, "thinned_out" among the weak, "zero_recall_surplus".
  """

  groups: tuple[Group, ...]
  kept: Mapping[str, int]
  dropped: Mapping[str, int]


@dataclasses.dataclass(slots=True)
class _Entry:
  """An episode and where it is: number of its group, and place in that."""

  group: int
  place: int
  episode: Episode
  recalls: tuple[float, float]
  chance: float


def filter_trajectories(
  groups: Iterable[Group], config: FilterConfig | None = None
) -> Filtered:
  """Keeps episodes by the published rules.

  In this order: malformed ones are dropped; so are those whose trajectory
  recall exceeds the output recall by more than 0.5. Strong ones (trajectory
  recall > 0.5 and output recall > 0.4) are kept, one of a query: the one with
  the largest output recall, then trajectory recall, then the fewest turns. Of
  the others, one with an output recall of r > 0 is kept with probability
  min(1, r / 0.4). Those with 0 are kept up to 5 % of all that is kept, one of a
  query. Which ones chance keeps depends on the seed and the ids alone, not on
  what else there is, but for the bound on those with 0.

  Args:
    groups: of scored episodes. Groups of one task count as one query.
    config: the rules' numbers.

  Raises:
    ValueError: an episode has no reward, or its parts lack a recall.
  """
  config = config or FilterConfig()
  groups = tuple(groups)
  kept: dict[str, list[_Entry]] = {STRONG: [], WEAK: [], ZERO: []}
  dropped: Counter[str] = Counter()
  for number, group in enumerate(groups):
    for place, episode in enumerate(group.episodes):
      recalls, chance = (
        _recalls(group, episode),
        _chance(f"{config.seed} {group.group_id} {episode.rollout_index}"),
      )
      entry = _Entry(number, place, episode, recalls, chance)
      rule = _rule(entry, config)
      if rule in kept:
        kept[rule].append(entry)
      else:
        dropped[rule] += 1
  strong = _best(kept[STRONG], config.per_query)
  dropped[ANOTHER] += len(kept[STRONG]) - len(strong)
  zero = _few(kept[ZERO], len(strong) + len(kept[WEAK]), config.zero_share)
  dropped[SURPLUS] += len(kept[ZERO]) - len(zero)
  left = {STRONG: strong, WEAK: kept[WEAK], ZERO: zero}
  chosen: dict[int, list[_Entry]] = {}
  for entry in sorted(
    (e for entries in left.values() for e in entries), key=lambda e: e.place
  ):
    chosen.setdefault(entry.group, []).append(entry)
  return Filtered(
    groups=tuple(
      dataclasses.replace(
        groups[number], episodes=tuple(e.episode for e in chosen[number])
      )
      for number in sorted(chosen)
    ),
    kept={rule: len(entries) for rule, entries in left.items()},
    dropped=dict(sorted((+dropped).items())),
  )


def _rule(entry: _Entry, config: FilterConfig) -> str:
  trajectory, output = entry.recalls
  if entry.episode.stop_reason is not StopReason.ANSWERED:
    return MALFORMED
  if trajectory - output > config.most_excess + _ROUNDING:
    return EXCESS
  if trajectory > config.trajectory_recall and output > config.output_recall:
    return STRONG
  if output == 0:
    return ZERO
  return WEAK if entry.chance < output / config.output_recall else THINNED


def _recalls(group: Group, episode: Episode) -> tuple[float, float]:
  """Trajectory recall and output recall."""
  where = f"episode {episode.rollout_index} of group {group.group_id}"
  if episode.reward is None:
    raise ValueError(f"{where} has no reward; score it first")
  recalls = []
  for name in ("trajectory_recall", "output_recall"):
    value = episode.reward.parts.get(name)
    if value is None or not 0 <= value <= 1:
      raise ValueError(
        f"{where} has {name} {value!r} in its reward's parts, not 0 to 1"
      )
    recalls.append(float(value))
  return recalls[0], recalls[1]


def _chance(name: str) -> float:
  """A number in [0, 1) that follows from a name."""
  digest = hashlib.sha256(f"filter {name}".encode()).digest()
  return int.from_bytes(digest[:6], "big") / 2**48


def _by_query(entries: Iterable[_Entry]) -> dict[str, list[_Entry]]:
  found: dict[str, list[_Entry]] = {}
  for entry in entries:
    found.setdefault(entry.episode.task_id, []).append(entry)
  return found


def _best(entries: Iterable[_Entry], per_query: int) -> list[_Entry]:
  def rank(entry: _Entry) -> tuple[float, float, int, int, int]:
    trajectory, output = entry.recalls
    episode = entry.episode
    return (-output, -trajectory, episode.turns, entry.group, entry.place)

  return [
    entry
    for several in _by_query(entries).values()
    for entry in sorted(several, key=rank)[:per_query]
  ]


def _few(entries: Iterable[_Entry], others: int, share: float) -> list[_Entry]:
  """One of a query, and of these as many as are at most a share of all."""
  one_each = [
    min(several, key=lambda e: e.chance)
    for several in _by_query(entries).values()
  ]
  # The largest n with n <= share * (others + n), whatever the rounding.
  most = 0
  while most < len(one_each) and (
    most + 1 <= share * (others + most + 1) + _ROUNDING
  ):
    most += 1
  return sorted(one_each, key=lambda e: e.chance)[:most]
