"""What metrics say of a run in many processes: ages, drops, roles.

The learner writes these with each step of the phase "rl":

  staleness_<n>                share of trained tokens n versions old
  drop_<reason>                groups and rollouts dropped, since it began
  idle_<role>                  share of the step's time
  tokens_per_second_<role>     sampled
  prefilled_per_second_<role>  computed into caches
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

Line = Mapping[str, Any]
# (step, value) of each step that has one.
Series = list[tuple[float, float]]

DROPS, IDLE = "drop_", "idle_"
RATES = ("tokens_per_second_", "prefilled_per_second_")
_AGE = re.compile(r"staleness_([0-9]{1,9})")
# One that the learner's packer reports, to weigh steps by.
_TOKENS = "tokens"
# JSON has integers that no float holds.
_HUGE = 1e300


def belongs(name: str) -> bool:
  """Whether a metric is one of those above."""
  return bool(_AGE.fullmatch(name)) or name.startswith((DROPS, IDLE, *RATES))


def staleness(lines: Sequence[Line]) -> dict[int, float]:
  """Share of all trained tokens by age in policy versions, youngest first.

  Args:
    lines: of metrics; steps weigh as many as the tokens that they trained.
  """
  weighed: defaultdict[int, float] = defaultdict(float)
  total = 0.0
  for line in lines:
    shares = {
      int(found[1]): value
      for name, value in line.items()
      if (found := _AGE.fullmatch(name)) and is_number(value)
    }
    if not shares:
      continue
    weight = line.get(_TOKENS)
    weight = float(weight) if is_number(weight) and weight > 0 else 1.0
    total += weight
    for age, share in shares.items():
      weighed[age] += weight * share
  return {age: weighed[age] / total for age in sorted(weighed)}


def dropped(lines: Sequence[Line]) -> dict[str, Series]:
  """Drops by reason, summed over the whole run.

  The counters begin at 0 again when the learner or the queue was restarted; a
  value below the one before says so.
  """
  sums: dict[str, Series] = {}
  for reason, points in series(lines, DROPS).items():
    total = last = 0.0
    sums[reason] = []
    for step, value in points:
      total += value - last if value >= last else value
      last = value
      sums[reason].append((step, total))
  return sums


def series(lines: Sequence[Line], prefix: str) -> dict[str, Series]:
  """Metrics whose names begin alike, by the rest of their names."""
  found: defaultdict[str, Series] = defaultdict(list)
  for line in lines:
    for name, value in line.items():
      if name.startswith(prefix) and is_number(value):
        step = line.get("step")
        at = float(step) if is_number(step) else 0.0
        found[name[len(prefix) :]].append((at, float(value)))
  return dict(sorted(found.items()))


def is_number(value: Any) -> TypeGuard[float]:
  """Whether it is a number that can be computed with: finite, and no bool."""
  right = isinstance(value, int | float) and not isinstance(value, bool)
  return right and -_HUGE < value < _HUGE
