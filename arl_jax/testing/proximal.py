"""Checks of losses that correct for sampler and step apart (proximal_logp)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping

import numpy as np

from arl_jax.losses import accepted
from arl_jax.losses.ratio import IMPORTANCE_MAX
from arl_jax.testing.cases import (
  SHAPE,
  Batch,
  Outcome,
  difference,
  evaluate,
  typical,
)
from arl_jax.testing.faults import ROUNDING, Fault, number, place, worst
from arl_jax.types import LossFn

# Of proximal/μ: beyond every usual cap.
_FAR = math.exp(3)

_RULE = (
  "With proximal_logp, the learner's own log-probs when the step started,"
  " ρ = π/proximal = exp(logp − proximal_logp), and each term is multiplied by"
  " the constant w = min(proximal/μ, importance_max):"
  " arl_jax.losses.truncated_importance(proximal_logp, behaviour_logp, mask)."
)


def proximal(loss: LossFn) -> str | None:
  """ρ = π/proximal, and a capped weight proximal/μ: both, each once."""
  if "proximal_logp" not in accepted(loss):
    return "takes no proximal_logp"
  if _ignored(loss):
    return "takes proximal_logp by ** and ignores it"
  _check_ratio(loss)
  _check_same_policy(loss)
  return _check_weight(loss)


def _ignored(loss: LossFn) -> bool:
  """A loss that takes any keyword asks for none; one that names it does."""
  parameters: Mapping = inspect.signature(loss).parameters
  if "proximal_logp" in parameters:
    return False
  batch = typical()
  given = evaluate(loss, batch.replace(proximal_logp=batch.logp))
  return difference(given, evaluate(loss, batch)) is None


def _moved(batch: Batch, weight: float) -> Batch:
  """π = proximal = `weight` · μ at every token."""
  return batch.replace(
    behaviour_logp=batch.logp - math.log(weight), proximal_logp=batch.logp
  )


def _check_ratio(loss: LossFn) -> None:
  batch = typical()
  batch = batch.replace(proximal_logp=batch.logp)
  ratio = evaluate(loss, batch).ratio
  at = worst(ratio, np.ones(SHAPE), ROUNDING, batch.mask)
  if at is None:
    return
  gap = float(np.exp(batch.logp[at] - batch.behaviour_logp[at]))
  to_behaviour = np.isclose(ratio[at], gap, rtol=1e-4)
  raise Fault(
    f'logp equals proximal_logp, but stats["ratio"] at {place(at)} is'
    f" {number(ratio[at])}, not 1"
    + (" (it is π/μ = exp(logp − behaviour_logp))" if to_behaviour else ""),
    f"{_RULE} A ratio to behaviour_logp corrects for the sampler itself; with"
    " such a weight besides, the correction is made twice. A loss that wants"
    " ρ = π/μ and no weight does not name proximal_logp.",
  )


def _check_same_policy(loss: LossFn) -> None:
  batch = typical()
  want = evaluate(loss, batch)
  same = batch.replace(proximal_logp=batch.behaviour_logp)
  found = difference(evaluate(loss, same), want, ROUNDING)
  if found is not None:
    at = found.at
    raise Fault(
      f"with proximal_logp equal to behaviour_logp the {found.name} at"
      f" {place(at)} is {number(found.got[at])}, without proximal_logp it is"
      f" {number(found.want[at])}",
      f"{_RULE} Where both are the same policy, w is 1 and ρ is π/μ, as without"
      " proximal_logp: nothing may change.",
    )


def _check_weight(loss: LossFn) -> str | None:
  """Terms and gradients grow with proximal/μ, up to a cap."""
  batch = typical()
  base = evaluate(loss, _moved(batch, 1.0))
  far = evaluate(loss, _moved(batch, _FAR))
  if not far.per_token.any() and base.per_token.any():
    # As arl_jax.losses.icepop_weight does; where it begins is not known.
    return (
      f"drops tokens at proximal/μ = {number(_FAR)}; weights below were not"
      " compared"
    )
  cap = _cap(loss)
  for share in (0.25, 0.75):
    weight = share * min(cap, IMPORTANCE_MAX)
    got = evaluate(loss, _moved(batch, weight))
    _check_factor(got, base, weight, batch)
  for name, got, want in _pairs(far, base):
    # What is below the cap is no matter here.
    most = np.minimum(np.abs(got), cap * np.abs(want))
    at = worst(np.abs(got), most, ROUNDING, batch.mask)
    if at is not None:
      raise Fault(
        f"with logp equal to proximal_logp and proximal/μ = {number(_FAR)} at"
        f" every token, the {name} at {place(at)} is {number(got[at])};"
        f" with μ equal to both it is {number(want[at])}, and more than"
        f" {number(cap)} times that is too much",
        f"{_RULE} Without the cap a few tokens that the sampler thought"
        f" unlikely outweigh all others. A cap other than {IMPORTANCE_MAX} is"
        " the keyword importance_max of the loss.",
      )
  return None


def _check_factor(
  got: Outcome, base: Outcome, weight: float, batch: Batch
) -> None:
  for name, moved, plain in _pairs(got, base):
    at = worst(moved, weight * plain, ROUNDING, batch.mask)
    if at is None:
      continue
    unweighted = worst(moved, plain, ROUNDING, batch.mask) is None
    raise Fault(
      f"with logp equal to proximal_logp and proximal/μ = {number(weight)} at"
      f" every token, the {name} at {place(at)} is {number(moved[at])}; with μ"
      f" equal to both it is {number(plain[at])}, and {number(weight)} times"
      f" that would be {number(weight * plain[at])}"
      + (" (nothing is weighted)" if unweighted else ""),
      f"{_RULE} Without the weight nothing corrects for what separates the"
      " sampler from the learner: other numerics, other versions. A cap other"
      f" than {IMPORTANCE_MAX} is the keyword importance_max of the loss.",
    )


def _pairs(got: Outcome, want: Outcome):
  yield "loss", got.per_token, want.per_token
  yield "gradient by logp", got.gradient, want.gradient


def _cap(loss: LossFn) -> float:
  """Its importance_max, which a partial may have set."""
  parameter = inspect.signature(loss).parameters.get("importance_max")
  value = None if parameter is None else parameter.default
  return value if isinstance(value, int | float) else IMPORTANCE_MAX
