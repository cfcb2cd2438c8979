"""Checks that it makes no difference how tokens are laid out in batches."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import numpy as np

from arl_jax.losses import accepted
from arl_jax.testing.cases import (
  SHAPE,
  Batch,
  Outcome,
  both_ways,
  difference,
  evaluate,
  typical,
)
from arl_jax.testing.faults import (
  ROUNDING,
  Fault,
  common_factor,
  number,
  place,
)
from arl_jax.types import LossFn

# Of the two segments of each row in `_packed`; what follows is padding.
_LENGTHS = ((3, 4), (5, 2), (4, 3), (2, 5))


def packing(loss: LossFn) -> None:
  """A segment counts the same whatever else lies in its row."""
  for near in (1.0, 0.1, 1e-4):
    for batch in both_ways(loss, _packed(near)):
      _check_alone(loss, batch)
      _check_neighbour(loss, batch)
      _check_untrained(loss, batch)
      _check_numbering(loss, batch)


def _packed(near: float) -> Batch:
  """Two segments a row, with a hole in the mask of the longer one."""
  ids = np.zeros(SHAPE, np.int32)
  trained = np.ones(SHAPE, bool)
  advantage = np.zeros(SHAPE)
  for row, (first, second) in enumerate(_LENGTHS):
    ids[row, :first] = 1
    ids[row, first : first + second] = 2
    trained[row, 1 if first > second else first + 1] = False
    advantage[row, :first] = (1.3, -0.6, -1.7, 0.8)[row]
    advantage[row, first:] = (-0.9, 1.1, 0.7, -1.4)[row]
  return typical(near=near, seed=1).replace(
    segment_ids=ids, mask=trained & (ids > 0), advantage=advantage
  )


def _span(row: int, segment: int) -> slice:
  first, second = _LENGTHS[row]
  return slice(0, first) if segment == 1 else slice(first, first + second)


def _apart(array: np.ndarray, segment: int) -> np.ndarray:
  """That segment of each row, moved to the beginning of a row of its own."""
  moved = np.zeros_like(array)
  for row in range(len(array)):
    part = array[row, _span(row, segment)]
    moved[row, : len(part)] = part
  return moved


def _check_alone(loss: LossFn, packed: Batch) -> None:
  together = evaluate(loss, packed)
  for segment in (1, 2):
    apart = functools.partial(_apart, segment=segment)
    rows = packed.map(apart)
    alone = evaluate(loss, rows)
    found = difference(together.map(apart), alone, ROUNDING, rows.mask)
    if found is not None:
      row, token = found.at
      raise Fault(
        f"the {found.name} of token {token} of segment {segment} in packed row"
        f" {row} is {number(found.got[found.at])}; with that segment alone in a"
        f" row it is {number(found.want[found.at])}{packed.given}",
        _why_packing(loss),
      )


def _check_neighbour(loss: LossFn, packed: Batch) -> None:
  """Other values, or another mask, in the first segment of each row."""
  assert packed.segment_ids is not None
  first, second = packed.segment_ids == 1, packed.segment_ids == 2
  want = evaluate(loss, packed)
  unlikely = np.random.default_rng(2).uniform(-9, -5, SHAPE)
  changed = packed.replace(
    logp=np.where(first, unlikely, packed.logp),
    advantage=np.where(first, 7.0, packed.advantage),
  )
  untrained = packed.replace(mask=packed.mask & ~first)
  for other, how in (
    (changed, "has other values"),
    (untrained, "isn't trained"),
  ):
    trained = packed.mask & second
    found = difference(evaluate(loss, other), want, ROUNDING, trained)
    if found is not None:
      at = found.at
      raise Fault(
        f"the {found.name} at {place(at)} is {number(found.want[at])}, but"
        f" {number(found.got[at])} if another segment of the row"
        f" {how}{packed.given}",
        _why_packing(loss),
      )


def _check_untrained(loss: LossFn, packed: Batch) -> None:
  """Untrained tokens more in a segment, where padding was."""
  assert packed.segment_ids is not None
  ids = np.where(packed.segment_ids == 0, 2, packed.segment_ids)
  want = evaluate(loss, packed)
  longer = evaluate(loss, packed.replace(segment_ids=ids))
  found = difference(longer, want, ROUNDING, packed.mask)
  if found is not None:
    at = found.at
    raise Fault(
      f"the {found.name} at {place(at)} is {number(found.want[at])}, but"
      f" {number(found.got[at])} if one more token of its segment is outside"
      f" the mask{packed.given}",
      "A segment holds prompts and tool output too, which aren't trained: how"
      " long they are says nothing about the others. Sums, means and counts"
      " within a segment go over its trained tokens only, as in"
      " arl_jax.losses.ratio.segment_mean(x, mask, segment_ids) with the mask"
      " that the loss was given, not one of ones.",
    )


def _check_numbering(loss: LossFn, packed: Batch) -> None:
  """Other numbers for the same segments."""
  new = np.array([0, 7, 3], np.int32)
  want = evaluate(loss, packed)
  other = evaluate(loss, packed.replace(segment_ids=new[packed.segment_ids]))
  found = difference(other, want, ROUNDING)
  if found is not None:
    at = found.at
    assert packed.segment_ids is not None
    old = packed.segment_ids[at]
    raise Fault(
      f"the {found.name} at {place(at)} is {number(found.want[at])} in segment"
      f" {old}, but {number(found.got[at])} if the same segment is numbered"
      f" {new[old]}{packed.given}",
      "The numbers in segment_ids only tell neighbours apart: which segment"
      " gets which depends on the packing, 0 alone is special (padding), and"
      " they need not be small or ascend. Compare ids with each other, never"
      " with a constant.",
    )


def _why_packing(loss: LossFn) -> str:
  why = (
    "A row holds many packed segments that have nothing to do with each other:"
    " the loss must not depend on how they are packed (if `microbatches` fails"
    " too, begin there). "
  )
  if "segment_ids" in accepted(loss):
    return why + (
      "Sums, means and counts go over the trained tokens of the same row and"
      " segment_ids, as arl_jax.losses.ratio.segment_mean(x, mask, segment_ids)"
      " does."
    )
  return why + (
    "A loss per token looks at no other token. One of whole sequences takes the"
    " keyword segment_ids=None ([B, T] integers, 0 is padding) and sums within"
    " them, as arl_jax.losses.ratio.segment_mean(x, mask, segment_ids) does."
  )


def microbatches(loss: LossFn) -> None:
  """Rows alone, in another order, and with more padding give the same."""
  for batch in both_ways(loss, typical(seed=3)):
    want = evaluate(loss, batch)
    check = functools.partial(_check_same, loss, batch, want)
    for row in range(len(batch.logp)):
      one = operator.itemgetter(slice(row, row + 1))
      check(one, f"for row {row} alone", f"in a batch of {SHAPE[0]} rows")
    order = [2, 0, 3, 1]
    check(
      operator.itemgetter(order),
      f"for the rows in the order {order}",
      "in their own order",
    )
    check(_padded, "with three more columns of padding", "without them")


def _padded(x: np.ndarray) -> np.ndarray:
  return np.pad(x, ((0, 0), (0, 3)))


def _check_same(
  loss: LossFn,
  batch: Batch,
  outcome: Outcome,
  change: Callable[[np.ndarray], np.ndarray],
  here: str,
  there: str,
) -> None:
  """A changed batch gives the outcome, changed likewise."""
  changed = batch.map(change)
  got, want = evaluate(loss, changed), outcome.map(change)
  found = difference(got, want, ROUNDING, changed.mask)
  if found is not None:
    at, trained = found.at, changed.mask
    factor = common_factor(found.got[trained], found.want[trained])
    raise Fault(
      f"{here}, the {found.name} at {place(at)} is {number(found.got[at])};"
      f" {there} it is {number(found.want[at])}{factor}{batch.given}",
      "The term of a token must not depend on which rows share its microbatch"
      " or how far they are padded: else what is learned depends on the number"
      " of microbatches and devices. A loss counts, averages and normalises"
      " nothing over the batch. Advantages are normalised before, in their"
      " group (arl_jax.losses.group_advantages); the sum is divided after, by"
      " the trained tokens of the global batch (arl_jax.losses.reduce).",
    )
