"""Losses and advantages: pure functions of arrays."""

from arl_jax.losses.advantages import group_advantages, has_signal
from arl_jax.losses.kl import kl_estimates, penalised
from arl_jax.losses.named import accepted, by_name, is_supervised
from arl_jax.losses.policy import (
  cispo,
  grpo,
  gspo,
  kimi_k2_5,
  policy_gradient,
  sft,
)
from arl_jax.losses.ratio import (
  icepop_weight,
  sequence_weight,
  truncated_importance,
)
from arl_jax.losses.reduction import reduce
from arl_jax.losses.regularizers import (
  balanced_bias,
  distillation,
  entropy_bonus,
  router_balance,
  router_z,
)

__all__ = [
  "accepted",
  "balanced_bias",
  "by_name",
  "cispo",
  "distillation",
  "entropy_bonus",
  "group_advantages",
  "grpo",
  "gspo",
  "has_signal",
  "icepop_weight",
  "is_supervised",
  "kimi_k2_5",
  "kl_estimates",
  "penalised",
  "policy_gradient",
  "reduce",
  "router_balance",
  "router_z",
  "sequence_weight",
  "sft",
  "truncated_importance",
]
