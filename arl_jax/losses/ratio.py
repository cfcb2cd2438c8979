"""Importance ratios, and what corrects for a sampler unlike the learner.

Log-probs are [B, T], nats. Entries outside the mask may hold anything: they
reach neither value nor gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# exp(±this) is a finite float32 whose product with an advantage is too.
LARGEST_LOG_RATIO = 35.0

# Cap of proximal / μ as a weight.
IMPORTANCE_MAX = 2.0


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
  """`x` where the mask is set, else 0; by selection: 0 · NaN would be NaN."""
  return jnp.where(mask, x, 0.0)


def bounded_exp(log_ratio: jax.Array) -> jax.Array:
  """exp(log_ratio), constant beyond `LARGEST_LOG_RATIO` either way."""
  edge = jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
  inside = edge == log_ratio
  return jnp.exp(jnp.where(inside, log_ratio, jax.lax.stop_gradient(edge)))


def log_importance(
  logp: jax.Array, behaviour_logp: jax.Array, mask: jax.Array
) -> jax.Array:
  """Log π/μ [B, T], 0 outside the mask."""
  return masked(logp, mask) - masked(behaviour_logp, mask)


def segment_mean(
  x: jax.Array, mask: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
  """At each position the mean over the set positions of its segment.

  Args:
    x: [B, T].
    mask: [B, T] bool.
    segment_ids: [B, T]; tokens of a segment stand together. None: a row is one.

  Returns:
    [B, T]; 0 in segments without a set position.
  """
  x = masked(x, mask)
  if segment_ids is None:
    count = mask.sum(-1, keepdims=True)
    mean = x.sum(-1, keepdims=True) / jnp.maximum(count, 1)
    return jnp.broadcast_to(mean, x.shape)
  t = x.shape[1]
  begins = segment_ids[:, 1:] != segment_ids[:, :-1]
  index = jnp.pad(jnp.cumsum(begins, -1), ((0, 0), (1, 0)))[:, :t]

  def row(x, mask, index):
    total = jax.ops.segment_sum(x, index, t)
    count = jax.ops.segment_sum(mask.astype(x.dtype), index, t)
    return (total / jnp.maximum(count, 1))[index]

  return jax.vmap(row)(x, mask, index)


def truncated_importance(
  proximal_logp: jax.Array,
  behaviour_logp: jax.Array,
  mask: jax.Array,
  *,
  importance_max: float = IMPORTANCE_MAX,
) -> jax.Array:
  """min(proximal / μ, importance_max) as a constant weight [B, T].

  Corrects for what separates the sampler from the learner as it was when the
  step started: other numerics, other versions.
  """
  mask = mask.astype(bool)
  weight = bounded_exp(log_importance(proximal_logp, behaviour_logp, mask))
  return jax.lax.stop_gradient(
    masked(jnp.minimum(weight, importance_max), mask)
  )


def icepop_weight(
  proximal_logp: jax.Array,
  behaviour_logp: jax.Array,
  mask: jax.Array,
  *,
  importance_min: float = 0.5,
  importance_max: float = 5.0,
) -> jax.Array:
  """1 where proximal / μ lies in [importance_min, importance_max], else 0.

  A weight [B, T] of a loss's terms, as in IcePop: tokens on which sampler and
  learner disagree too much teach nothing. They still count in denominators.
  """
  mask = mask.astype(bool)
  ratio = bounded_exp(log_importance(proximal_logp, behaviour_logp, mask))
  kept = mask & (ratio >= importance_min) & (ratio <= importance_max)
  return kept.astype(ratio.dtype)


def sequence_weight(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantage: jax.Array,
  mask: jax.Array,
  *,
  log_gap_max: float,
  segment_ids: jax.Array | None = None,
) -> jax.Array:
  """0 for sequences with A < 0 that have become too unlikely, else 1.

  A sequence is dropped when the mean of log(μ/π) over its trained tokens is
  above `log_gap_max` (nats): pushing down further what the policy hardly does
  any more destabilises. A weight [B, T]; dropped tokens still count in
  denominators.

  Args:
    logp: [B, T], of the learner; a constant here.
    behaviour_logp: [B, T].
    advantage: [B] or [B, T].
    mask: [B, T].
    log_gap_max: nats a token.
    segment_ids: as in `segment_mean`.
  """
  mask = mask.astype(bool)
  advantage = advantage[:, None] if advantage.ndim == 1 else advantage
  gap = segment_mean(
    -jax.lax.stop_gradient(log_importance(logp, behaviour_logp, mask)),
    mask,
    segment_ids,
  )
  dropped = (gap > log_gap_max) & (advantage < 0)
  return (mask & ~dropped).astype(gap.dtype)
