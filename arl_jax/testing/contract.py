"""Checks of what a loss gives, and of what it must not look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from arl_jax.testing.cases import (
  SHAPE,
  Batch,
  Outcome,
  arguments,
  both_ways,
  difference,
  evaluate,
  per_token_of,
  stats_of,
  typical,
  uniform,
)
from arl_jax.testing.faults import (
  ROUNDING,
  Fault,
  article,
  number,
  place,
  worst,
)
from arl_jax.types import LossFn


def result(loss: LossFn) -> None:
  """Shapes, types and stats; the same twice, under jit, and for [B]."""
  batch = typical()
  arrays, optional = arguments(loss, batch)
  returned = loss(*arrays, **optional)
  first = per_token_of(returned, SHAPE)
  _check_stats(returned)
  _check_types(loss, batch)

  def per_token(*arrays):
    return loss(*arrays, **optional)[0]

  for other, how in (
    (per_token(*arrays), "twice with the same arrays"),
    (jax.jit(per_token)(*arrays), "without jax.jit and under it"),
  ):
    at = worst(other, first, ROUNDING)
    if at is not None:
      raise Fault(
        f"called {how}, the loss at {place(at)} is {number(first[at])} and then"
        f" {number(other[at])}",
        "A loss is a pure function of its arguments: it keeps no state, draws"
        " no random numbers and reads nothing that may change.",
      )
  _check_advantage_of_rows(loss, batch)
  _check_side_of_ratio(loss)


def _check_stats(returned: Any) -> None:
  stats, right = returned[1], stats_of(returned, SHAPE)
  for name in ("ratio", "clipped"):
    if name in right:
      continue
    if not isinstance(stats, Mapping):
      what = f"stats are {article(type(stats).__name__)}, not a dict"
    elif name not in stats:
      what = f"stats hold {sorted(map(str, stats))} but no {name!r}"
    else:
      found = getattr(stats[name], "shape", None)
      shape = "no shape" if found is None else f"shape {list(found)}"
      what = f"stats[{name!r}] has {shape}, not that of logp, {list(SHAPE)}"
    raise Fault(
      what,
      'The trainer logs the means of stats["ratio"] and stats["clipped"] over'
      " trained tokens, so both have the shape of logp. jnp.ones_like(logp) and"
      " jnp.zeros_like(logp), 0 outside the mask, will do for a loss without a"
      " ratio.",
    )


def _check_side_of_ratio(loss: LossFn) -> None:
  """A ratio above 1 where π > μ, below where π < μ; 1 is no ratio."""
  for gap in (0.2, -0.2):
    # All tokens alike: a ratio of tokens is one of their sequence too.
    batch = uniform(logp=-1.0, behaviour_logp=-1.0 - gap)
    for case in both_ways(loss, batch):
      ratio = evaluate(loss, case).ratio
      base = case.proximal_logp
      base = case.behaviour_logp if base is None else base
      want = np.exp(case.logp - base)
      wrong = (ratio - 1) * np.sign(gap) < -ROUNDING[0]
      if not wrong.any():
        continue
      at = tuple(int(i) for i in np.argwhere(wrong)[0])
      known = ""
      for value, what in (
        (1 / want[at], "that is its inverse"),
        (np.log(want[at]), "that is its logarithm"),
      ):
        if np.isclose(ratio[at], value, rtol=1e-4):
          known = f": {what}"
      name = "behaviour" if case.proximal_logp is None else "proximal"
      raise Fault(
        f"logp is {number(case.logp[at])} and {name}_logp"
        f' {number(base[at])} at every token, but stats["ratio"] at'
        f" {place(at)} is {number(ratio[at])}; exp(logp − {name}_logp) is"
        f" {number(want[at])}{known}",
        "ρ is the probability under the learner divided by that under the"
        " policy that sampled, π/μ: above 1 where the token has become"
        " likelier. Importance weights, bounds and logs all mean that one;"
        " look whether the loss itself uses the inverse.",
      )


def _check_types(loss: LossFn, batch: Batch) -> None:
  with jax.enable_x64(True):
    for dtype in (np.float32, np.float64):
      arrays, optional = arguments(loss, batch, dtype)
      got = _type_of_loss(loss, arrays, optional)
      if got != dtype:
        raise Fault(
          f"logp of type {np.dtype(dtype).name} gives a loss of type {got}",
          "The loss has the type of logp. Write logp.dtype where a type is"
          " named, and constants as plain Python numbers: arrays of numpy are"
          " float64 and widen what they touch; integers have no gradient.",
        )


def _type_of_loss(loss, arrays, optional):
  def per_token(*arrays):
    return loss(*arrays, **optional)[0]

  return jax.eval_shape(per_token, *arrays).dtype


def _check_advantage_of_rows(loss: LossFn, batch: Batch) -> None:
  rows = batch.replace(advantage=np.array([1.5, -0.7, 0.9, -1.1]))
  wide = batch.replace(
    advantage=np.broadcast_to(rows.advantage[:, None], SHAPE)
  )
  _check_alike(
    loss,
    rows,
    "advantage of shape [B]",
    evaluate(loss, wide),
    "advantage of shape [B, T]",
    "advantage is [B], one a row, or [B, T], one a token. Begin with\n"
    "if advantage.ndim == 1: advantage = advantage[:, None]",
  )


def _check_alike(
  loss: LossFn, batch: Batch, here: str, want: Outcome, there: str, why: str
) -> None:
  """Another form of the same arguments gives the same."""
  try:
    got = evaluate(loss, batch)
  except Exception as error:  # A loss is code and may raise any.
    text = str(error).strip().partition("\n")[0]
    raise Fault(
      f"takes {there}, but with {here} it raises {type(error).__name__}:"
      f" {text[:200]}",
      why,
    ) from error
  found = difference(got, want, ROUNDING)
  if found is not None:
    at = found.at
    raise Fault(
      f"with {here} the {found.name} at {place(at)} is"
      f" {number(found.got[at])}, with {there} it is {number(found.want[at])}",
      why,
    )


def mask(loss: LossFn) -> None:
  """Nothing outside the mask; any type of mask; nothing trained at all."""
  _check_own_token(loss)
  for batch in both_ways(loss, typical()):
    _check_outside(evaluate(loss, batch), batch, "")
    none = batch.replace(mask=np.zeros(SHAPE, bool))
    _check_outside(evaluate(loss, none), none, ", where nothing is trained,")
  batch = typical()
  want = evaluate(loss, batch)
  for dtype in (np.int32, np.float32):
    _check_alike(
      loss,
      batch.replace(mask=batch.mask.astype(dtype)),
      f"a mask of {np.dtype(dtype).name} 0 and 1",
      want,
      "the same mask of bool",
      "Begin with mask = mask.astype(bool): ~mask, mask & x and x[mask] mean"
      " something else for numbers.",
    )


def _check_own_token(loss: LossFn) -> None:
  """With one trained token, only its own log-prob has a gradient."""
  row, token = 1, 3
  only = np.zeros(SHAPE, bool)
  only[row, token] = True
  outcome = evaluate(loss, typical().replace(mask=only))
  for name, array in (
    ("loss", outcome.per_token),
    ("gradient by logp", outcome.gradient),
  ):
    at = worst(array, np.zeros(SHAPE), where=~only)
    # What isn't finite is no matter of position: the checks below name it.
    if at is not None and np.isfinite(array[at]):
      what = (
        f"only token {place((row, token))} is trained, but the {name} at"
        f" {place(at)} is {number(array[at])}"
      )
      if at[0] == row and abs(at[1] - token) == 1:
        raise Fault(f"{what}: something is shifted by one", _WHY_SHIFTED)
      raise Fault(what, _WHY_OUTSIDE)


_WHY_SHIFTED = (
  "Entry t of logp, behaviour_logp, advantage and mask belongs to token t:"
  " log-probs come aligned, so nothing is shifted in a loss."
)
_WHY_OUTSIDE = (
  "Prompts, tool output and padding are not trained. Select with"
  " jnp.where(mask, x, 0.0): inputs before any arithmetic, and results once"
  " more; stats too, they are summed over all positions. Where a count may be"
  " 0, divide by jnp.maximum(count, 1)."
)


def _check_outside(outcome: Outcome, batch: Batch, which: str) -> None:
  for name, array in outcome.named():
    at = worst(array, np.zeros(SHAPE), where=~batch.mask)
    if at is not None:
      raise Fault(
        f"outside the mask the {name} at {place(at)}{which} is"
        f" {number(array[at])}, not 0{batch.given}",
        _WHY_OUTSIDE,
      )


def poison(loss: LossFn) -> None:
  """NaN and infinities outside the mask change nothing."""
  for batch in both_ways(loss, typical()):
    clean = evaluate(loss, batch)
    fields = ["logp", "behaviour_logp", "advantage"]
    if batch.proximal_logp is not None:
      fields.append("proximal_logp")
    for field in fields:
      for value in (np.nan, np.inf, -np.inf):
        array = np.where(batch.mask, getattr(batch, field), value)
        dirty = evaluate(loss, batch.replace(**{field: array}))
        _check_poisoned(dirty, clean, f"{value} in {field}", field, batch)


def _check_poisoned(
  dirty: Outcome, clean: Outcome, what: str, field: str, batch: Batch
) -> None:
  found = difference(dirty, clean)
  if found is not None:
    at = found.at
    raise Fault(
      f"{what} outside the mask makes the {found.name} at {place(at)}"
      f" {number(found.got[at])} instead of {number(found.want[at])}"
      f"{batch.given}",
      "Positions outside the mask may hold anything. Multiplying by the mask"
      " keeps NaN (0 · NaN is NaN), and jnp.where around the result alone keeps"
      " it in the gradient. Select the inputs first:"
      f" {field} = jnp.where(mask, {field}, 0.0), then compute.",
    )
