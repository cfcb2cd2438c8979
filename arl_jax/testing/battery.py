"""What a policy loss must hold to: one function a claim, and one for all."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import traceback
from collections.abc import Callable

import jax
import numpy as np

from arl_jax.testing import contract, known_losses, layout, numerics
from arl_jax.testing.faults import Fault
from arl_jax.testing.proximal import proximal
from arl_jax.types import LossFn

# A check raises Fault (an AssertionError) or returns what it couldn't look at.
Check = Callable[[LossFn], str | None]

CHECKS: dict[str, Check] = {
  "result": contract.result,
  "mask": contract.mask,
  "poison": contract.poison,
  "microbatches": layout.microbatches,
  "packing": layout.packing,
  "proximal": proximal,
  "gradient": numerics.gradient,
  "extreme_ratios": numerics.extreme_ratios,
  "sign": numerics.sign,
  "empty": numerics.empty,
  "known_values": known_losses.known_values,
}


@dataclasses.dataclass(frozen=True)
class Result:
  """Outcome of one check.

  Attributes:
    name: in `CHECKS`.
    passed: whether the loss holds to it.
    message: what fails, where and with which numbers; from the second line on
      why it matters and what to do. Of a check that passed: what it left out.
  """

  name: str
  passed: bool
  message: str = ""


def check(loss_fn: LossFn, *, like: str | None = None) -> list[Result]:
  """Tries a loss on all that breaks losses.

  Args:
    loss_fn: takes (logp, behaviour_logp, advantage, mask), then keywords with
      defaults.
    like: name of the known loss that it must equal; by default its own name,
      if that is one of them.

  Raises:
    ValueError: `like` is no known loss.
  """
  # What isn't hashable can't be told apart by jax.jit; a partial can.
  if getattr(loss_fn, "__hash__", None) is None:
    loss_fn = functools.partial(loss_fn)
  checks = dict(CHECKS)
  if like is not None:
    known_losses.require(like)
    checks["known_values"] = functools.partial(
      known_losses.known_values, like=like
    )
  results: list[Result] = []
  told: dict[str, str] = {}
  for name, run in checks.items():
    what, why = _tried(run, loss_fn)
    if why is None:
      results.append(Result(name, True, what))
      continue
    # One fault may fail many checks, with other numbers.
    first = told.setdefault(why or what, name)
    message = f"{what}\n{why}" if first == name else f"as `{first}`"
    results.append(Result(name, False, message))
  return results


def _tried(run: Check, loss_fn: LossFn) -> tuple[str, str | None]:
  """A note and None, or what is wrong and why."""
  try:
    return run(loss_fn) or "", None
  except Fault as fault:
    what, _, why = str(fault).partition("\n")
    return what, why
  except Exception as error:  # A loss is code and may raise any.
    text = str(error).strip().partition("\n")[0]
    hint = _UNDER_JIT if isinstance(error, _TRACED) else ""
    return f"raises {type(error).__name__}: {text[:200]}", "\n".join(
      filter(None, (_line(error), hint))
    )


_TRACED = (
  jax.errors.ConcretizationTypeError,
  jax.errors.NonConcreteBooleanIndexError,
  jax.errors.TracerArrayConversionError,
  jax.errors.UnexpectedTracerError,
)
_UNDER_JIT = (
  "Losses run under jax.jit, where arrays have no values yet: use jnp instead"
  " of np, jnp.where instead of `if`, and jnp.where instead of x[mask]."
)


def _folder(module_file: str | None, up: int = 0) -> str:
  return str(pathlib.Path(str(module_file)).parents[up]) + os.sep


# Nobody's loss, unless nothing else is left: a loss may be installed too.
_FOREIGN = (
  (_folder(jax.__file__, 1), _folder(__file__, 1), "<"),
  (_folder(jax.__file__), _folder(np.__file__), _folder(__file__), "<"),
)


def _line(error: Exception) -> str:
  """Where the loss raised: its last line before somebody else's."""
  frames = traceback.extract_tb(error.__traceback__)
  for foreign in _FOREIGN:
    own = [f for f in frames if not f.filename.startswith(foreign)]
    if own:
      name = os.path.basename(own[-1].filename)
      return f"{name}:{own[-1].lineno}: {own[-1].line}"
  return ""
