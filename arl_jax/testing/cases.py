"""Batches to try a loss on, and what comes out of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arl_jax.losses import accepted
from arl_jax.testing.faults import EXACT, Fault, Tolerance, article, worst
from arl_jax.types import LossFn

# All batches have this shape unless a check is about shapes, so that a loss is
# compiled few times. B and T differ: else a [B] broadcasts as if it were [T].
SHAPE = (4, 8)

_CONTRACT = (
  "A loss returns (per_token, stats): the loss of each token [B, T], and a dict"
  ' with "ratio" and "clipped" [B, T]. Sums and means are taken outside, by'
  " arl_jax.losses.reduce, over the trained tokens of the whole global batch: a"
  " mean inside a loss would be one over a microbatch."
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
  """Arguments of a loss, and a weight of each term in the sum of all.

  Attributes:
    logp: [B, T].
    behaviour_logp: [B, T].
    advantage: [B] or [B, T].
    mask: [B, T].
    segment_ids: [B, T] int32, 0 is padding; None: not given.
    proximal_logp: [B, T]; None: not given.
    weights: [B, T], of the terms where gradients are taken; None: 1.
  """

  logp: np.ndarray
  behaviour_logp: np.ndarray
  advantage: np.ndarray
  mask: np.ndarray
  segment_ids: np.ndarray | None = None
  proximal_logp: np.ndarray | None = None
  weights: np.ndarray | None = None

  def replace(self, **arrays: Any) -> Batch:
    return dataclasses.replace(self, **arrays)

  def map(self, f: Callable[[np.ndarray], np.ndarray]) -> Batch:
    """`f` of every array that is given."""
    arrays = {k: v for k, v in vars(self).items() if v is not None}
    return self.replace(**{k: f(v) for k, v in arrays.items()})

  @property
  def given(self) -> str:
    """What to add to a message."""
    return " (with proximal_logp)" if self.proximal_logp is not None else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
  """What a loss gives: all [B, T]; gradient of the weighted sum of terms."""

  per_token: np.ndarray
  gradient: np.ndarray
  ratio: np.ndarray
  clipped: np.ndarray

  def named(self) -> Iterator[tuple[str, np.ndarray]]:
    yield "loss", self.per_token
    yield "gradient by logp", self.gradient
    yield 'stats["ratio"]', self.ratio
    yield 'stats["clipped"]', self.clipped

  def map(self, f: Callable[[np.ndarray], np.ndarray]) -> Outcome:
    return Outcome(*(f(array) for _, array in self.named()))


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
  """The worst of the first array that differs."""

  name: str
  at: tuple[int, ...]
  got: np.ndarray
  want: np.ndarray


def difference(
  got: Outcome,
  want: Outcome,
  tolerance: Tolerance = EXACT,
  where: np.ndarray | bool = True,
) -> Difference | None:
  for (name, a), (_, b) in zip(got.named(), want.named(), strict=True):
    at = worst(a, b, tolerance, where)
    if at is not None:
      return Difference(name, at, a, b)
  return None


# [B, T] of `typical`: holes, and a row without a trained token.
_MASK = np.array(
  [
    [1, 1, 1, 1, 1, 1, 1, 0],
    [1, 0, 1, 1, 0, 1, 1, 0],
    [0, 0, 0, 0, 0, 0, 0, 0],
    [0, 1, 1, 0, 1, 1, 1, 0],
  ],
  bool,
)
_SEGMENT_IDS = np.array(
  [
    [1, 1, 1, 1, 1, 1, 1, 0],
    [1, 1, 1, 1, 2, 2, 2, 0],
    [1, 1, 1, 1, 1, 0, 0, 0],
    [1, 1, 1, 2, 2, 2, 2, 0],
  ],
  np.int32,
)
# Of the log-ratios: rows inside and outside the usual bounds, and one on the
# policy but for a hair, as ratios of whole sequences are bounded within 1e-4.
_SPREAD = np.array([[0.1], [2.5], [1.0], [1e-5]])


def typical(*, near: float = 1.0, seed: int = 0) -> Batch:
  """Packed rows with holes in the mask; one trains nothing.

  Args:
    near: log-ratios are multiplied with it; small is almost on-policy.
    seed: of the numbers.
  """
  rng = np.random.default_rng(seed)
  log_ratio = rng.uniform(-1, 1, SHAPE) * _SPREAD * near
  logp = rng.uniform(-3, -0.1, SHAPE)
  # One advantage a segment, of both signs.
  size = np.take_along_axis(rng.uniform(0.5, 2, SHAPE), _SEGMENT_IDS, 1)
  odd = (_SEGMENT_IDS + np.arange(SHAPE[0])[:, None]) % 2
  return Batch(
    logp=logp,
    behaviour_logp=logp - log_ratio,
    advantage=size * np.where(odd, 1, -1),
    mask=_MASK,
    segment_ids=_SEGMENT_IDS,
    weights=rng.uniform(0.5, 1.5, SHAPE),
  )


def uniform(*, logp: float, behaviour_logp: float) -> Batch:
  """One segment a row, every token trained and alike; advantage 1."""
  return Batch(
    logp=np.full(SHAPE, logp),
    behaviour_logp=np.full(SHAPE, behaviour_logp),
    advantage=np.ones(SHAPE),
    mask=np.ones(SHAPE, bool),
    segment_ids=np.ones(SHAPE, np.int32),
  )


def both_ways(loss: LossFn, batch: Batch) -> Iterator[Batch]:
  """The batch without proximal_logp, and with it if the loss takes it."""
  yield batch
  if "proximal_logp" in accepted(loss):
    midway = (batch.logp + batch.behaviour_logp) / 2
    yield batch.replace(proximal_logp=midway)


def arguments(
  loss: LossFn, batch: Batch, dtype: Any = np.float32
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
  """Positional and keyword arguments of the loss, as JAX's arrays."""

  def array(x):
    floats = np.issubdtype(x.dtype, np.floating)
    return jnp.asarray(x, dtype if floats else None)

  names = ("logp", "behaviour_logp", "advantage", "mask")
  given = {k: getattr(batch, k) for k in accepted(loss)}
  return [array(getattr(batch, n)) for n in names], {
    k: array(v) for k, v in given.items() if v is not None
  }


def per_token_of(result: Any, shape: tuple[int, ...]) -> Any:
  """Loss per token from what a loss returned.

  Raises:
    Fault: it isn't (per_token [B, T], stats).
  """
  if not isinstance(result, (tuple, list)) or len(result) != 2:
    size = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
    kind = article(_kind(result))
    raise Fault(f"returns {kind}{size}, not (per_token, stats)", _CONTRACT)
  per_token = result[0]
  if not hasattr(per_token, "shape"):
    kind = article(_kind(per_token))
    raise Fault(f"the loss per token is {kind}, no array", _CONTRACT)
  if per_token.shape != shape:
    raise Fault(
      f"the loss per token has shape {list(per_token.shape)}, not that of logp,"
      f" {list(shape)}",
      _CONTRACT,
    )
  return per_token


def _kind(x: Any) -> str:
  return "array" if isinstance(x, jax.Array) else type(x).__name__


def stats_of(result: Any, shape: tuple[int, ...]) -> dict[str, Any]:
  """Stats that are as they should be; what isn't is left out."""
  stats = result[1] if isinstance(result[1], Mapping) else {}
  return {
    name: stats[name]
    for name in ("ratio", "clipped")
    if name in stats and getattr(stats[name], "shape", None) == shape
  }


def evaluate(loss: LossFn, batch: Batch, dtype: Any = np.float32) -> Outcome:
  """Value, gradient and stats of a loss, compiled; missing stats are 0.

  Raises:
    Fault: the loss doesn't return (per_token [B, T], stats).
  """
  with jax.enable_x64(np.dtype(dtype) == np.float64):
    arrays, optional = arguments(loss, batch, dtype)
    if batch.weights is None:
      weights = jnp.ones(batch.logp.shape, dtype)
    else:
      weights = jnp.asarray(batch.weights, dtype)
    return Outcome(*jax.device_get(_evaluate(loss, weights, arrays, optional)))


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(loss, weights, arrays, optional):
  shape = weights.shape

  def total(logp):
    result = loss(logp, *arrays[1:], **optional)
    per_token = per_token_of(result, shape)
    return (weights * per_token).sum(), (per_token, stats_of(result, shape))

  gradient, (per_token, stats) = jax.grad(total, has_aux=True)(arrays[0])
  zero = jnp.zeros_like(weights)
  ratio, clipped = (stats.get(k, zero) for k in ("ratio", "clipped"))
  return per_token, gradient, ratio, clipped
