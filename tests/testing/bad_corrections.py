"""Losses that take proximal_logp and correct for it wrongly; unusual good ones.

Without it, each is GRPO.
"""

from arl_jax.losses import grpo, icepop_weight, truncated_importance


def good_icepop(logp, behaviour_logp, advantage, mask, *, proximal_logp=None):
  """Drops tokens on which sampler and learner disagree, weights none."""
  if proximal_logp is None:
    return grpo(logp, behaviour_logp, advantage, mask)
  per_token, stats = grpo(logp, proximal_logp, advantage, mask)
  kept = icepop_weight(proximal_logp, behaviour_logp, mask)
  return per_token * kept, stats


def good_other_keywords(logp, behaviour_logp, advantage, mask, **others):
  """Is given every optional array and wants none."""
  del others
  return grpo(logp, behaviour_logp, advantage, mask)


def corrected_twice(
  logp, behaviour_logp, advantage, mask, *, proximal_logp=None
):
  """ρ = π/μ, and proximal/μ besides."""
  per_token, stats = grpo(logp, behaviour_logp, advantage, mask)
  if proximal_logp is not None:
    per_token *= truncated_importance(proximal_logp, behaviour_logp, mask)
  return per_token, stats


def not_weighted(logp, behaviour_logp, advantage, mask, *, proximal_logp=None):
  """ρ = π/proximal, and nothing for what separates proximal and μ."""
  base = behaviour_logp if proximal_logp is None else proximal_logp
  return grpo(logp, base, advantage, mask)


def weight_without_cap(
  logp, behaviour_logp, advantage, mask, *, proximal_logp=None
):
  return grpo(
    logp,
    behaviour_logp,
    advantage,
    mask,
    proximal_logp=proximal_logp,
    importance_max=1e3,
  )


def halved_by_proximal(
  logp, behaviour_logp, advantage, mask, *, proximal_logp=None
):
  per_token, stats = grpo(
    logp, behaviour_logp, advantage, mask, proximal_logp=proximal_logp
  )
  return per_token / (1 if proximal_logp is None else 2), stats
