"""Means over tasks with bootstrap intervals."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike

# Resampled values held in memory at a time.
_BLOCK = 4_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
  """An estimate and its confidence interval, in the unit of the values.

  All three are NaN where the estimate is undefined (0 / 0).
  """

  mean: float
  low: float
  high: float

  def to_json(self) -> list[float | None]:
    """[mean, low, high], with None for NaN."""
    numbers = (self.mean, self.low, self.high)
    return [None if math.isnan(n) else n for n in numbers]


def bootstrap_mean(
  values: ArrayLike,
  *,
  seed: int,
  resamples: int = 2000,
  confidence: float = 0.95,
  weights: ArrayLike | None = None,
) -> Interval:
  """Mean over tasks with a percentile bootstrap interval.

  Args:
    values: [tasks], finite.
    seed: of the resampling; the same seed gives the same interval.
    resamples: number of bootstrap samples, >= 1.
    confidence: share of them between low and high, in (0, 1).
    weights: [tasks], finite and >= 0; equal weights if None.

  Raises:
    ValueError: there are no values, shapes differ, a number is not finite, a
      weight is negative, or an option is out of range.
  """
  array = _vector("values", values)
  if weights is None:
    weights = np.ones_like(array)
  array_w = _vector("weights", weights, like=array, negative=False)
  return _ratio(array * array_w, array_w, seed, resamples, confidence)


def bootstrap_ratio(
  numerators: ArrayLike,
  denominators: ArrayLike,
  *,
  seed: int,
  resamples: int = 2000,
  confidence: float = 0.95,
) -> Interval:
  """Ratio of sums over tasks, such as malformed calls over calls.

  Tasks are resampled as wholes: the counts of one task belong together.
  Resamples whose denominators sum to 0 are left out; if the denominators of all
  tasks do, the result is NaN.

  Args:
    numerators: [tasks], finite.
    denominators: [tasks], finite and >= 0.
    seed: of the resampling.
    resamples: number of bootstrap samples, >= 1.
    confidence: share of them between low and high, in (0, 1).

  Raises:
    ValueError: as for `bootstrap_mean`.
  """
  top = _vector("numerators", numerators)
  bottom = _vector("denominators", denominators, like=top, negative=False)
  return _ratio(top, bottom, seed, resamples, confidence)


def paired_difference(
  before: ArrayLike,
  after: ArrayLike,
  *,
  seed: int,
  resamples: int = 2000,
  confidence: float = 0.95,
) -> Interval:
  """Mean of after - before over the same tasks in the same order.

  Args:
    before: [tasks], finite.
    after: [tasks], finite.
    seed: of the resampling.
    resamples: number of bootstrap samples, >= 1.
    confidence: share of them between low and high, in (0, 1).

  Raises:
    ValueError: as for `bootstrap_mean`.
  """
  first = _vector("before", before)
  second = _vector("after", after, like=first)
  return bootstrap_mean(
    second - first, seed=seed, resamples=resamples, confidence=confidence
  )


def _vector(
  name: str,
  values: ArrayLike,
  *,
  like: np.ndarray | None = None,
  negative: bool = True,
) -> np.ndarray:
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or not array.size:
    raise ValueError(
      f"{name} has shape {list(array.shape)}; give one number for each task, at"
      " least one"
    )
  if like is not None and array.shape != like.shape:
    raise ValueError(
      f"{name} has {array.size} entries, not {like.size}, one for each task"
    )
  wrong = ~np.isfinite(array)
  if not negative:
    wrong |= array < 0
  if wrong.any():
    task = int(np.flatnonzero(wrong)[0])
    limit = "finite" if negative else "finite and not negative"
    raise ValueError(f"{name}[{task}] is {array[task]}, which must be {limit}")
  return array


def _ratio(
  top: np.ndarray,
  bottom: np.ndarray,
  seed: int,
  resamples: int,
  confidence: float,
) -> Interval:
  """Ratio of the sums of `top` and `bottom`, both [tasks]."""
  if resamples < 1:
    raise ValueError(f"resamples {resamples} must be at least 1")
  if not 0 < confidence < 1:
    raise ValueError(f"confidence {confidence} must lie between 0 and 1")
  if not bottom.any():
    return Interval(math.nan, math.nan, math.nan)
  generator = np.random.default_rng(seed)
  tasks, block = top.size, max(1, _BLOCK // top.size)
  tops, bottoms = np.empty(resamples), np.empty(resamples)
  for start in range(0, resamples, block):
    stop = min(start + block, resamples)
    chosen = generator.integers(tasks, size=(stop - start, tasks))
    tops[start:stop] = top[chosen].sum(axis=1)
    bottoms[start:stop] = bottom[chosen].sum(axis=1)
  defined = bottoms > 0
  ratios = tops[defined] / bottoms[defined]
  mean = float(top.sum() / bottom.sum())
  if not ratios.size:
    return Interval(mean, math.nan, math.nan)
  tail = (1 - confidence) / 2
  low, high = np.quantile(ratios, [tail, 1 - tail])
  return Interval(mean, float(low), float(high))
