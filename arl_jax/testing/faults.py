"""What is wrong with a loss, said so that it can be mended."""

from __future__ import annotations

from typing import Any

import numpy as np

# Relative and absolute.
Tolerance = tuple[float, float]
EXACT: Tolerance = (0.0, 0.0)
# float32 sums in another order.
ROUNDING: Tolerance = (1e-5, 1e-6)


class Fault(AssertionError):
  """What is wrong with a loss (one line), and why it matters and what to do."""

  def __init__(self, what: str, why: str):
    super().__init__(f"{what}\n{why}")


def worst(
  got: np.ndarray,
  want: np.ndarray,
  tolerance: Tolerance = EXACT,
  where: np.ndarray | bool = True,
) -> tuple[int, ...] | None:
  """Where `got` differs most from `want`, None if nowhere too much."""
  relative, absolute = tolerance
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  with np.errstate(invalid="ignore"):
    error = np.abs(got - want) - (absolute + relative * np.abs(want))
  # The same infinity or NaN on both sides is no difference.
  same = (got == want) | (np.isnan(got) & np.isnan(want))
  error = np.where(np.isnan(error), np.inf, error)
  error = np.where(same | ~np.broadcast_to(where, error.shape), -1.0, error)
  if not error.size or error.max() <= 0:
    return None
  return tuple(int(i) for i in np.unravel_index(error.argmax(), error.shape))


def common_factor(got: np.ndarray, want: np.ndarray) -> str:
  """A remark if all of `got` is one factor times `want`, as after a mean."""
  kept = np.abs(want) > 1e-6
  if kept.sum() < 2 or not np.isfinite(got[kept]).all():
    return ""
  factors = got[kept] / want[kept]
  if np.ptp(factors) > 1e-4 * abs(factors.mean()) or np.allclose(factors, 1):
    return ""
  return f" (every term by the same factor, {number(factors.mean())})"


def number(x: Any) -> str:
  return f"{float(x):.7g}"


def place(index: tuple[int, ...]) -> str:
  return f"[{', '.join(map(str, index))}]"


def article(noun: str) -> str:
  return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"
