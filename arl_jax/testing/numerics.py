"""Checks of a loss's numbers: gradients, signs, and what stays finite."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from arl_jax.testing import frozen_gradients
from arl_jax.testing.cases import (
  SHAPE,
  Batch,
  arguments,
  both_ways,
  evaluate,
  per_token_of,
  typical,
  uniform,
)
from arl_jax.testing.faults import Fault, Tolerance, number, place, worst
from arl_jax.types import LossFn


class _Precision(NamedTuple):
  """Of finite differences.

  Attributes:
    step: nats to either side.
    kink: slopes to either side that differ by more stand beside an edge, as of
      a clip, where there is no gradient to compare with.
    tolerance: relative and absolute.
  """

  step: float
  kink: float
  tolerance: Tolerance


_FLOAT64 = _Precision(1e-5, 1e-2, (1e-5, 1e-6))
# For losses that compute in float32 whatever logp is.
_FLOAT32 = _Precision(1e-2, 5e-2, (3e-2, 3e-2))


def gradient(loss: LossFn) -> str | None:
  """JAX's gradient is the slope of the value, stopped gradients aside."""
  try:
    with jax.enable_x64(True):
      for seed in (4, 5):
        for batch in both_ways(loss, typical(seed=seed)):
          _check_gradient(loss, batch)
  except frozen_gradients.UnsupportedError as error:
    return f"not compared with finite differences: {error}"
  return None


def _check_gradient(loss: LossFn, batch: Batch) -> None:
  arrays, optional = arguments(loss, batch, np.float64)
  weights = jnp.asarray(batch.weights)

  def total(logp):
    result = loss(logp, *arrays[1:], **optional)
    return (weights * per_token_of(result, SHAPE)).sum()

  got = evaluate(loss, batch, np.float64).gradient
  fault = _fault(total, arrays[0], got, batch, _FLOAT64)
  if fault is not None:
    narrow = frozen_gradients.narrowest_float(total, arrays[0])
    if jnp.finfo(narrow).bits < 32:
      raise Fault(
        f"computes in {narrow} where logp is float64{batch.given}",
        "Two or three digits are too few for log-probs: their differences are"
        " the ratios. Losses are computed in float32; write logp.dtype where a"
        " type is named.",
      )
    if jnp.finfo(narrow).bits == 32:
      fault = _fault(total, arrays[0], got, batch, _FLOAT32)
  if fault is not None:
    raise fault


def _fault(
  total: Callable,
  logp: jax.Array,
  got: np.ndarray,
  batch: Batch,
  precision: _Precision,
) -> Fault | None:
  """What is wrong with a gradient of `total` at logp."""
  below, above = _slopes(total, logp, precision.step)
  scale = np.maximum(1, np.abs(above))
  smooth = np.abs(above - below) <= precision.kink * scale
  if smooth[batch.mask].mean() < 0.5:
    edge = _first(batch.mask & ~smooth)
    return Fault(
      "the loss has no slope to compare its gradient with: by"
      f" logp{place(edge)} it changes by {number(below[edge])} a nat below and"
      f" {number(above[edge])} above the point, within {precision.step} nats"
      f"{batch.given}",
      "A loss that jumps almost everywhere cannot be minimised by gradients.",
    )
  want = (above + below) / 2
  at = worst(got, want, precision.tolerance, smooth)
  if at is None:
    return None
  return Fault(
    f"the gradient by logp{place(at)} is {number(got[at])}, but the loss"
    f" itself changes by {number(want[at])} a nat there (finite"
    f" differences){batch.given}",
    _why_gradient(frozen_gradients.primitives(total, logp)),
  )


def _slopes(
  total: Callable, logp: jax.Array, step: float
) -> tuple[np.ndarray, np.ndarray]:
  """Just below and just above each entry of logp, [B, T] each."""
  steps = np.eye(logp.size).reshape(-1, *logp.shape) * step
  values = jax.jit(jax.vmap(frozen_gradients.frozen(total, logp)))
  points = jnp.concatenate([logp - steps, logp[None], logp + steps])
  low, here, high = np.split(values(points), [logp.size, logp.size + 1])
  below, above = (here - low) / step, (high - here) / step
  return below.reshape(logp.shape), above.reshape(logp.shape)


def _why_gradient(primitives: set[str]) -> str:
  for custom in ("custom_vjp", "custom_jvp"):
    if f"{custom}_call" in primitives:
      return (
        f"The loss goes through jax.{custom}: the rule given there is not the"
        " derivative of the function it belongs to. If a gradient is meant to"
        " stop, say so with jax.lax.stop_gradient: this check holds fixed what"
        " passes through it."
      )
  return (
    "What is minimised must be what is logged. If a gradient is meant to stop,"
    " say so with jax.lax.stop_gradient: this check holds fixed what passes"
    " through it. A gradient of NaN comes from a branch of jnp.where that isn't"
    " taken but has an infinite derivative; replace the input of that branch"
    " first."
  )


def extreme_ratios(loss: LossFn) -> None:
  """Finite value and gradient in float32 however far π and μ are apart."""
  advantage = np.array([[1.0], [-1.0], [0.0], [10.0]])
  for log_ratio in (20.0, -20.0, 35.0, -35.0, 80.0, -80.0, 100.0, -100.0):
    batch = uniform(
      logp=-0.1 + min(log_ratio, 0), behaviour_logp=-0.1 - max(log_ratio, 0)
    ).replace(advantage=np.broadcast_to(advantage, SHAPE))
    for case in both_ways(loss, batch):
      _check_finite(
        loss,
        case,
        f"for logp {number(batch.logp[0, 0])}, behaviour_logp"
        f" {number(batch.behaviour_logp[0, 0])} and advantage {{advantage}}",
        "One token on which sampler and learner disagree must not turn all"
        " weights into NaN. exp overflows float32 above 88, and in the gradient"
        " of a bounded branch 0 · inf is NaN: bound the log-ratio before exp,"
        " as arl_jax.losses.ratio.bounded_exp(log_ratio) does.",
      )


def _check_finite(loss: LossFn, batch: Batch, when: str, why: str) -> None:
  """`when` may hold {advantage}."""
  for name, array in evaluate(loss, batch).named():
    bad = ~np.isfinite(array)
    if bad.any():
      at = _first(bad)
      when = when.format(advantage=number(batch.advantage[at]))
      raise Fault(
        f"{when}, the {name} at {place(at)} is {number(array[at])}"
        f"{batch.given}",
        why,
      )


def _first(where: np.ndarray) -> tuple[int, ...]:
  return tuple(int(i) for i in np.argwhere(where)[0])


_ON_POLICY = "logp equals behaviour_logp"


def sign(loss: LossFn) -> str | None:
  """On the policy, what was better than expected becomes likelier."""
  note = None
  advantage = np.array([[1.2], [-0.8], [0.5], [-1.9]])
  logp = typical().logp
  batch = uniform(logp=0, behaviour_logp=0).replace(
    logp=logp,
    behaviour_logp=logp,
    advantage=np.broadcast_to(advantage, SHAPE),
  )
  for case in both_ways(loss, batch):
    _check_finite(
      loss,
      case,
      f"if {_ON_POLICY}",
      "Steps of training begin on the policy, with log-ratios of exactly 0."
      " Divide by nothing that is 0 there; a branch of jnp.where needs a finite"
      " derivative there too, taken or not.",
    )
    got = evaluate(loss, case).gradient
    if _imitates(got, advantage[:, 0]):
      note = (
        "raises every sampled token, by a weight that grows with the advantage"
      )
      continue
    _check_direction(got, case)
  return note


def _imitates(got: np.ndarray, advantage: np.ndarray) -> bool:
  """As −exp(A/β) log π does: what was worse is raised too, but less.

  Args:
    got: [B, T] gradient by logp.
    advantage: [B], of rows.
  """
  raised = -got[np.argsort(advantage)]
  least, most = raised.min(1), raised.max(1)
  # A weight may be bounded: rows that have reached the bound are alike.
  grows = (least[1:] >= most[:-1] * (1 - 1e-5)).all()
  worse = raised[np.sort(advantage) < 0]
  return bool(
    (raised >= 0).all()
    and worse.any()
    and grows
    and least[-1] > most[0] * (1 + 1e-3)
  )


def _check_direction(got: np.ndarray, batch: Batch) -> None:
  wrong = got * batch.advantage > 0
  if wrong.any():
    at = _first(wrong)
    every = ", and so is every other" if wrong.all() else ""
    raise Fault(
      f"{_ON_POLICY} and the advantage at {place(at)} is"
      f" {number(batch.advantage[at])}, but the gradient by logp is"
      f" {number(got[at])}: the token is made"
      f" {'less' if got[at] > 0 else 'more'} likely{every}{batch.given}",
      _why_direction(got, wrong),
    )
  if not got[batch.advantage > 0].any():
    everywhere = "" if got.any() else ", as it is everywhere"
    raise Fault(
      f"{_ON_POLICY}, and the gradient by logp is 0 wherever the advantage is"
      f" positive{everywhere}{batch.given}",
      "Nothing is learned from what went well. Is logp behind"
      " jax.lax.stop_gradient, or is a ratio of 1 out of bounds? Bounds of a"
      " ratio are absolute in this project: 0.8 and 1.2, not 0.2.",
    )


def _why_direction(got: np.ndarray, wrong: np.ndarray) -> str:
  if wrong.all():
    return _WHY_FLIPPED
  return _WHY_IMITATES if (got < 0).all() else _WHY_SOME


_WHY_FLIPPED = (
  "The sign is flipped. Losses are minimised: the term is *minus* the advantage"
  " times what grows with logp, so that its gradient is negative where the"
  " advantage is positive."
)
_WHY_IMITATES = (
  "Every sampled token is made likelier, whatever its advantage. To imitate is"
  " fine if what went better is imitated more, as −exp(A/β) · log π does, but"
  " here the weight doesn't grow with the advantage: is it missing, or is it"
  " |A| or A²?"
)
_WHY_SOME = (
  "Only some signs are wrong, so a factor that depends on logp is probably"
  " differentiated where it should be constant: a ratio that weights logp (as"
  " CISPO's does) belongs behind jax.lax.stop_gradient."
)


def empty(loss: LossFn) -> None:
  """Batches of no rows, of one token, and without any signal."""
  batch = typical()
  for rows, columns in ((0, SHAPE[1]), (1, 1)):
    corner = operator.itemgetter((slice(rows), slice(columns)))
    _check_finite(
      loss,
      batch.map(corner),
      f"for a batch of {rows} rows of {columns} tokens",
      "A batch can be that small; where a count may be 0, divide by"
      " jnp.maximum(count, 1).",
    )
  for value in (0.0, 1.0):
    for case in both_ways(loss, batch):
      _check_finite(
        loss,
        case.replace(advantage=np.full(SHAPE, value)),
        "if all advantages are {advantage}",
        "A batch may hold no signal, and to divide by the spread of advantages"
        " is to divide by 0 then. That has no place in a loss: advantages are"
        " normalised in their group (arl_jax.losses.group_advantages).",
      )
