"""Estimators of KL(π_θ ‖ π_ref) from tokens that π_θ sampled.

r = π_ref / π_θ. Schulman, http://joschu.net/blog/kl-approx.html. Arrays are
[B, T], nats; entries outside the mask reach neither value nor gradient.

Which one is for what: the mean of k1 is the KL, but its gradient is zero on
average (it is that of −log π_θ without a weight), so k1 belongs into the
reward: subtract it from the advantage (`penalised`). As a term of the loss use
k2, whose gradient, log(π_θ/π_ref) ∇log π_θ, is what k1 in the reward gives. k3
is never negative, but its variance explodes where the policies part (Composer
2); it is there to be watched.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from arl_jax.losses.ratio import bounded_exp, log_importance, masked


def kl_estimates(
  logp: jax.Array, reference_logp: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
  """k1 = −log r, k2 = ½ (log r)², k3 = r − 1 − log r, each [B, T]."""
  mask = mask.astype(bool)
  log_ratio = log_importance(reference_logp, logp, mask)
  return {
    "k1": -log_ratio,
    "k2": 0.5 * log_ratio**2,
    "k3": masked(bounded_exp(log_ratio) - 1 - log_ratio, mask),
  }


def penalised(
  advantage: jax.Array,
  logp: jax.Array,
  reference_logp: jax.Array,
  mask: jax.Array,
  *,
  weight: float,
) -> jax.Array:
  """A − weight · k1 of each token, [B, T], a constant: k1 in the reward.

  Args:
    advantage: [B] or [B, T].
    logp: [B, T].
    reference_logp: [B, T].
    mask: [B, T].
    weight: of the KL.
  """
  advantage = advantage[:, None] if advantage.ndim == 1 else advantage
  k1 = kl_estimates(logp, reference_logp, mask)["k1"]
  mask = mask.astype(bool)
  return jax.lax.stop_gradient(
    masked(jnp.broadcast_to(advantage, mask.shape), mask) - weight * k1
  )
