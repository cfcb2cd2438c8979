"""Policy losses, per token; see `reduce` for how they become a number.

Arrays are [B, T]; a row may hold many packed segments. logp is log π_θ of the
learner, behaviour_logp log μ of the policy that sampled the token, recorded at
sampling time. ρ = exp(logp − behaviour_logp). Bounds of a ratio are absolute
values of ρ. Entries outside the mask reach neither value nor gradient, whatever
they hold.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Stats = dict[str, jax.Array]

# exp(±this) is a finite float32 whose product with an advantage is too.
_LARGEST_LOG_RATIO = 35.0


def _prepare(logp, behaviour_logp, advantage, mask):
  """Masked inputs in the shape of logp, and log ρ."""
  mask = mask.astype(bool)
  if advantage.ndim == 1:
    advantage = advantage[:, None]
  advantage = jnp.broadcast_to(advantage, logp.shape)
  logp = jnp.where(mask, logp, 0.0)
  behaviour_logp = jnp.where(mask, behaviour_logp, 0.0)
  advantage = jnp.where(mask, advantage, 0.0)
  log_ratio = jnp.clip(
    logp - behaviour_logp, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO
  )
  return logp, advantage, log_ratio, mask


def _stats(ratio: jax.Array, clipped: jax.Array, mask: jax.Array) -> Stats:
  return {
    "ratio": jnp.where(mask, ratio, 0.0),
    "clipped": (clipped & mask).astype(ratio.dtype),
  }


def cispo(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
  *,
  ratio_min: float = 0.0,
  ratio_max: float = 5.0,
) -> tuple[jax.Array, Stats]:
  """−sg(min(max(ρ, ratio_min), ratio_max)) · A · log π_θ.

  Clipped importance weights, not clipped updates: every token keeps its
  gradient. MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4.

  Args:
    logp: [B, T] nats.
    behaviour_logp: [B, T] nats.
    advantage: [B] or [B, T].
    mask: [B, T], tokens that are trained.
    ratio_min: lower bound of ρ, absolute.
    ratio_max: upper bound of ρ, absolute.

  Returns:
    Loss per token [B, T], 0 outside the mask; "ratio" and "clipped" [B, T].
  """
  logp, advantage, log_ratio, mask = _prepare(
    logp, behaviour_logp, advantage, mask
  )
  ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
  weight = jnp.clip(ratio, ratio_min, ratio_max)
  return -weight * advantage * logp, _stats(ratio, weight != ratio, mask)


def grpo(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
  *,
  ratio_min: float = 0.8,
  ratio_max: float = 1.2,
) -> tuple[jax.Array, Stats]:
  """−min(ρA, clip(ρ, ratio_min, ratio_max) A).

  DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3, without its KL term
  and without its normalisation by length. Arguments and result as in `cispo`.
  """
  _, advantage, log_ratio, mask = _prepare(
    logp, behaviour_logp, advantage, mask
  )
  ratio = jnp.exp(log_ratio)
  free = ratio * advantage
  bounded = jnp.clip(ratio, ratio_min, ratio_max) * advantage
  return -jnp.minimum(free, bounded), _stats(ratio, bounded < free, mask)


def policy_gradient(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
) -> tuple[jax.Array, Stats]:
  """−A · log π_θ, on-policy REINFORCE; with A = 1 the SFT cross-entropy.

  Arguments and result as in `cispo`.
  """
  logp, advantage, log_ratio, mask = _prepare(
    logp, behaviour_logp, advantage, mask
  )
  ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
  return -advantage * logp, _stats(ratio, jnp.zeros_like(mask), mask)


def reduce(
  per_token: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Numerator and denominator of the mean over trained tokens.

  They stay apart so that microbatches, packing and data parallelism add both
  up and divide once, by the number of trained tokens in the global batch.
  """
  mask = mask.astype(bool)
  numerator = jnp.where(mask, per_token, 0.0).sum()
  return numerator, mask.sum().astype(per_token.dtype)
