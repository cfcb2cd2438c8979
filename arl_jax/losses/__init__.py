"""Policy losses and advantages: pure functions of arrays."""

from arl_jax.losses.advantages import group_advantages, has_signal
from arl_jax.losses.policy import cispo, grpo, policy_gradient, reduce

__all__ = [
  "cispo",
  "group_advantages",
  "grpo",
  "has_signal",
  "policy_gradient",
  "reduce",
]
