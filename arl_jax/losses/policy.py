"""Policy losses, per token; see `reduce` for how they become a number.

Arrays are [B, T]; a row may hold many packed segments. logp is log π_θ of the
learner, behaviour_logp log μ of the policy that sampled the token, recorded at
sampling time. ρ = π_θ/μ. Bounds of a ratio are absolute values of ρ. Entries
outside the mask reach neither value nor gradient, whatever they hold.

With proximal_logp, the learner's own log-probs when the step started,
ρ = π_θ/proximal, and each term is weighted by min(proximal/μ, importance_max):
the policy that moves during a step and the sampler that differs from it are
corrected for apart, never twice.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from arl_jax.losses.ratio import (
  IMPORTANCE_MAX,
  bounded_exp,
  log_importance,
  masked,
  segment_mean,
  truncated_importance,
)

Stats = dict[str, jax.Array]


def _prepare(
  logp, behaviour_logp, advantage, mask, proximal_logp, importance_max
):
  """Advantage in the shape of logp, log ρ, the weight of terms, bool mask."""
  mask = mask.astype(bool)
  if advantage.ndim == 1:
    advantage = advantage[:, None]
  advantage = masked(jnp.broadcast_to(advantage, logp.shape), mask)
  weight = mask.astype(logp.dtype)
  base = behaviour_logp
  if proximal_logp is not None:
    base = jax.lax.stop_gradient(proximal_logp)
    weight = truncated_importance(
      base, behaviour_logp, mask, importance_max=importance_max
    )
  return advantage, log_importance(logp, base, mask), weight, mask


def _result(
  term: jax.Array,
  weight: jax.Array,
  ratio: jax.Array,
  clipped: jax.Array,
  mask: jax.Array,
) -> tuple[jax.Array, Stats]:
  stats = {
    "ratio": jax.lax.stop_gradient(masked(ratio, mask)),
    "clipped": (clipped & mask).astype(ratio.dtype),
  }
  return masked(weight * term, mask), stats


def cispo(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
  *,
  ratio_min: float = 0.0,
  ratio_max: float = 5.0,
  proximal_logp: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  importance_max: float = IMPORTANCE_MAX,
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
    proximal_logp: [B, T] nats, or None: ρ = π_θ/μ.
    segment_ids: [B, T]; only losses of whole sequences look at it.
    importance_max: cap of proximal/μ.

  Returns:
    Loss per token [B, T], 0 outside the mask; "ratio" and "clipped" [B, T].
  """
  del segment_ids
  advantage, log_ratio, weight, mask = _prepare(
    logp, behaviour_logp, advantage, mask, proximal_logp, importance_max
  )
  ratio = jax.lax.stop_gradient(bounded_exp(log_ratio))
  bounded = jnp.clip(ratio, ratio_min, ratio_max)
  term = -bounded * advantage * masked(logp, mask)
  return _result(term, weight, ratio, bounded != ratio, mask)


def _clipped_term(ratio, advantage, ratio_min, ratio_max):
  """−min(ρA, clip(ρ)A), and where the bound holds the update back."""
  free = ratio * advantage
  bounded = jnp.clip(ratio, ratio_min, ratio_max) * advantage
  # By selection: at a tie the minimum of both would halve the gradient.
  clipped = bounded < free
  return -jnp.where(clipped, bounded, free), clipped


def grpo(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
  *,
  ratio_min: float = 0.8,
  ratio_max: float = 1.2,
  proximal_logp: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  importance_max: float = IMPORTANCE_MAX,
) -> tuple[jax.Array, Stats]:
  """−min(ρA, clip(ρ, ratio_min, ratio_max) A).

  DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3, without its KL term
  and, unless `reduce` is told "sequence_mean", without its normalisation by
  length. ratio_max 1.28 is DAPO's clip-higher, https://arxiv.org/abs/2503.14476.
  Arguments and result as in `cispo`.
  """
  del segment_ids
  advantage, log_ratio, weight, mask = _prepare(
    logp, behaviour_logp, advantage, mask, proximal_logp, importance_max
  )
  ratio = bounded_exp(log_ratio)
  term, clipped = _clipped_term(ratio, advantage, ratio_min, ratio_max)
  return _result(term, weight, ratio, clipped, mask)


def gspo(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
  *,
  ratio_min: float = 1 - 3e-4,
  ratio_max: float = 1 + 4e-4,
  proximal_logp: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  importance_max: float = IMPORTANCE_MAX,
) -> tuple[jax.Array, Stats]:
  """GRPO's term with the ratio of the whole segment, exp(mean log ρ).

  The same term stands at each trained token of a segment; `reduce` with
  "sequence_mean" makes it one term a sequence. https://arxiv.org/abs/2507.18071,
  eq. 5-7; an episode of several segments has a ratio for each, which is this
  project's choice.

  Arguments and result as in `cispo`; without segment_ids a row is a segment.
  """
  advantage, log_ratio, weight, mask = _prepare(
    logp, behaviour_logp, advantage, mask, proximal_logp, importance_max
  )
  ratio = bounded_exp(segment_mean(log_ratio, mask, segment_ids))
  term, clipped = _clipped_term(ratio, advantage, ratio_min, ratio_max)
  return _result(term, weight, ratio, clipped, mask)


def policy_gradient(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
  *,
  proximal_logp: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  importance_max: float = IMPORTANCE_MAX,
) -> tuple[jax.Array, Stats]:
  """−A · log π_θ, on-policy REINFORCE: no clip, no length term, no std.

  The form of Composer 2. Arguments and result as in `cispo`.
  """
  del segment_ids
  advantage, log_ratio, weight, mask = _prepare(
    logp, behaviour_logp, advantage, mask, proximal_logp, importance_max
  )
  term = -advantage * masked(logp, mask)
  ratio = bounded_exp(log_ratio)
  return _result(term, weight, ratio, jnp.zeros_like(mask), mask)


def kimi_k2_5(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
  *,
  log_ratio_min: float = math.log(0.8),
  log_ratio_max: float = math.log(1.25),
  tau: float = 1e-3,
  proximal_logp: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  importance_max: float = IMPORTANCE_MAX,
) -> tuple[jax.Array, Stats]:
  """−clip(ρ) A + τ (log ρ)².

  Outside [log_ratio_min, log_ratio_max] the first term has no gradient,
  whatever the sign of A; the second keeps its own everywhere and pulls back.
  Kimi K2.5, arXiv 2602.02276, eq. 1; the report leaves the bounds open.

  Args:
    logp: [B, T] nats.
    behaviour_logp: [B, T] nats.
    advantage: [B] or [B, T].
    mask: [B, T], tokens that are trained.
    log_ratio_min: lower bound of log ρ.
    log_ratio_max: upper bound of log ρ.
    tau: weight of the squared log-ratio.
    proximal_logp: as in `cispo`.
    segment_ids: as in `cispo`.
    importance_max: as in `cispo`.

  Returns:
    As `cispo`.
  """
  del segment_ids
  advantage, log_ratio, weight, mask = _prepare(
    logp, behaviour_logp, advantage, mask, proximal_logp, importance_max
  )
  bound = jnp.clip(log_ratio, log_ratio_min, log_ratio_max)
  inside = bound == log_ratio
  kept = jnp.where(inside, log_ratio, jax.lax.stop_gradient(bound))
  term = -bounded_exp(kept) * advantage + tau * log_ratio**2
  return _result(term, weight, bounded_exp(log_ratio), ~inside, mask)


def sft(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
) -> tuple[jax.Array, Stats]:
  """−A · log π_θ as a cross-entropy: A is a weight, nobody sampled anything.

  Arguments and result as in `cispo`; ρ counts as 1.
  """
  del behaviour_logp
  return policy_gradient(logp, jax.lax.stop_gradient(logp), advantage, mask)
