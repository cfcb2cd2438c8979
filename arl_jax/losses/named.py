"""A loss as a configuration names it, and what it wants to be given."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
from typing import Any

from arl_jax.losses import policy
from arl_jax.types import LossFn

_OWN: dict[str, LossFn] = {
  "cispo": policy.cispo,
  "grpo": policy.grpo,
  "gspo": policy.gspo,
  "kimi_k2_5": policy.kimi_k2_5,
  "policy_gradient": policy.policy_gradient,
  "sft": policy.sft,
}

_ARRAYS = ("logp", "behaviour_logp", "advantage", "mask")

# Arrays that a loss gets by keyword if its signature names them.
OPTIONAL_ARRAYS = ("proximal_logp", "segment_ids")


def by_name(name: str) -> LossFn:
  """A loss of this package, or a user's own as "package.module:function".

  Hyper-parameters may follow in parentheses, as in a call:
  "grpo(ratio_max=1.28)", "my_package.my_losses:my_loss(tau=0.1)".

  Raises:
    ValueError: there is no such loss, it doesn't take arrays as `LossFn` says,
      or it has no such hyper-parameter, or no such value of it.
  """
  bare, bracket, rest = name.partition("(")
  loss_fn = _find(bare.strip())
  _check_signature(loss_fn, name)
  if not bracket:
    return loss_fn
  values = _arguments(rest, name)
  known = _hyperparameters(loss_fn)
  for key in values:
    if key not in known:
      raise ValueError(
        f"loss {name!r}: {bare} has no hyper-parameter {key!r};"
        f" it has {known or 'none'}"
      )
    _check_value(values[key], inspect.signature(loss_fn).parameters[key], name)
  return functools.partial(loss_fn, **values)


def accepted(loss_fn: LossFn) -> tuple[str, ...]:
  """Which of `OPTIONAL_ARRAYS` the loss takes."""
  parameters = inspect.signature(loss_fn).parameters.values()
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return OPTIONAL_ARRAYS
  names = {p.name for p in parameters}
  return tuple(name for name in OPTIONAL_ARRAYS if name in names)


def is_supervised(loss_fn: LossFn) -> bool:
  """Whether there is no behaviour policy to compare with."""
  bare = inspect.unwrap(getattr(loss_fn, "func", loss_fn))
  return bare is inspect.unwrap(policy.sft)


def _check_value(value: Any, parameter: inspect.Parameter, name: str) -> None:
  """Where the default is a number, the value must be one, and finite."""
  default = parameter.default
  if isinstance(default, bool) or not isinstance(default, int | float):
    return
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not number or not abs(value) < math.inf:
    raise ValueError(
      f"loss {name!r}: {parameter.name} is {value!r}, not a finite number"
    )


def _find(name: str) -> LossFn:
  if name in _OWN:
    return _OWN[name]
  module, _, function = name.partition(":")
  try:
    found = getattr(importlib.import_module(module), function)
  except Exception as error:  # A user's module is code and may raise any.
    raise ValueError(
      f"loss {name!r} is neither one of {sorted(_OWN)} nor"
      f" package.module:function ({type(error).__name__}: {error})"
    ) from error
  if not callable(found):
    raise ValueError(f"loss {name!r} is a {type(found).__name__}, no function")
  return found


def _check_signature(loss_fn: LossFn, name: str) -> None:
  try:
    inspect.signature(loss_fn).bind(*_ARRAYS)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"loss {name!r} does not take {', '.join(_ARRAYS)} ({error});"
      " hyper-parameters are keyword-only and have defaults"
    ) from error


def _hyperparameters(loss_fn: LossFn) -> list[str]:
  parameters = inspect.signature(loss_fn).parameters
  return [
    p.name
    for p in parameters.values()
    if p.kind is p.KEYWORD_ONLY and p.name not in OPTIONAL_ARRAYS
  ]


def _arguments(text: str, name: str) -> dict[str, Any]:
  """Literal keyword arguments of `text`, which ends with a parenthesis."""
  try:
    call = ast.parse(f"f({text}", mode="eval").body
    # "f(a=1)(b=2)" is a call too, of what the first one returns.
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
      raise ValueError("not one call")
    names = [k.arg for k in call.keywords]
    if call.args or None in names or len(set(names)) < len(names):
      raise ValueError("not keywords, each once")
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
  except (SyntaxError, ValueError, TypeError) as error:
    raise ValueError(
      f"loss {name!r}: hyper-parameters are keywords with plain values, as in"
      " 'grpo(ratio_max=1.28)'"
    ) from error
