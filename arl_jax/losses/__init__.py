"""Policy losses and advantages: pure functions of arrays."""

import importlib

from arl_jax.losses.advantages import group_advantages, has_signal
from arl_jax.losses.policy import cispo, grpo, policy_gradient, reduce
from arl_jax.types import LossFn

__all__ = [
  "by_name",
  "cispo",
  "group_advantages",
  "grpo",
  "has_signal",
  "policy_gradient",
  "reduce",
]

_OWN: dict[str, LossFn] = {
  "cispo": cispo,
  "grpo": grpo,
  "policy_gradient": policy_gradient,
}


def by_name(name: str) -> LossFn:
  """A loss of this package, or a user's own as "package.module:function".

  Raises:
    ValueError: there is no such loss.
  """
  if name in _OWN:
    return _OWN[name]
  module, _, function = name.partition(":")
  try:
    return getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      f"loss {name!r} is neither one of {sorted(_OWN)} nor"
      f" package.module:function ({error})"
    ) from error
