"""Tries a policy loss on what breaks policy losses.

  python -m arl_jax.testing.check_loss package.module:my_loss [--like=grpo]

One line a check; where one fails, what, where, the numbers, and what to do. The
exit code is 0 if all pass, 1 if one fails, 2 if there is no such loss.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Sequence

import jax

from arl_jax import losses
from arl_jax.testing.battery import CHECKS, Result, check
from arl_jax.testing.known_losses import KNOWN, require
from arl_jax.types import LossFn

__all__ = ["CHECKS", "Result", "check", "main"]


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the results for the loss that the arguments name."""
  args = _parser().parse_args(argv)
  # An accelerator would be held, and compute in less than float64.
  if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
  try:
    if args.like is not None:
      require(args.like)
    loss_fn = _load(args.loss)
  except Exception as error:  # The module of a loss is code and may raise any.
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    print(f"error: {kind}{' '.join(str(error).split())}", file=sys.stderr)
    return 2
  began = time.perf_counter()
  results = check(loss_fn, like=args.like)
  for result in results:
    print(_shown(result))
  passed = sum(result.passed for result in results)
  seconds = time.perf_counter() - began
  print(f"{passed} of {len(results)} checks passed ({seconds:.1f} s)")
  return 0 if passed == len(results) else 1


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m arl_jax.testing.check_loss",
    description="Tries a policy loss on what breaks policy losses.",
  )
  parser.add_argument(
    "loss",
    help="package.module:function, or a name of this package, as in --config;"
    " hyper-parameters may follow in parentheses",
  )
  parser.add_argument(
    "--like",
    metavar="NAME",
    help=f"known loss that it must equal: {', '.join(sorted(KNOWN))}",
  )
  return parser


def _load(name: str) -> LossFn:
  """Raises whatever importing the module raises, ValueError otherwise."""
  try:
    return losses.by_name(name)
  except ValueError as error:
    if ":" not in name.partition("(")[0]:
      raise ValueError(
        f"{name!r} is no loss of this package; one of your own is named as"
        " package.module:function"
      ) from error
    if isinstance(error.__cause__, ImportError):
      raise ValueError(f"{error}; looked in {os.getcwd()}") from error
    raise


def _shown(result: Result) -> str:
  what, _, why = result.message.partition("\n")
  if result.passed:
    note = f"  ({what})" if what else ""
    return f"ok    {result.name}{note}"
  lines = [f"FAIL  {result.name}: {what}"]
  for paragraph in filter(None, why.split("\n")):
    lines += textwrap.wrap(
      paragraph,
      width=80,
      initial_indent="      ",
      subsequent_indent="      ",
    )
  return "\n".join(lines)


if __name__ == "__main__":
  sys.exit(main())
