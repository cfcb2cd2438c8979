"""Metrics of an update, as sums and maxima that parts of a batch add up to.

A mean of means over microbatches or devices would weigh tokens unequally, so
everything stays a sum, a maximum or a histogram until the batch is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from arl_jax import losses
from arl_jax.learner.packing import TokenBatch

Metrics = dict[str, jax.Array]

# Edges of the histogram of |log π − log μ|, nats: 16 bins a decade.
_DECADES = (-7, 2)
_BINS = 16 * (_DECADES[1] - _DECADES[0])


class Sums(struct.PyTreeNode):
  """Attributes: added and largest, by name; how parts of a batch combine."""

  added: Any
  largest: Any


def combine(one: Sums, other: Sums) -> Sums:
  return Sums(
    added=jax.tree.map(jnp.add, one.added, other.added),
    largest=jax.tree.map(jnp.maximum, one.largest, other.largest),
  )


def of_tokens(
  logp: jax.Array, stats: Mapping[str, jax.Array], part: TokenBatch
) -> Sums:
  """What the trained tokens of a microbatch say about the update.

  Args:
    logp: [R, T], nats, of the learner.
    stats: of the loss, "ratio" and "clipped" [R, T].
    part: the microbatch.
  """
  mask = part.mask
  for name in ("ratio", "clipped"):
    if name not in stats or stats[name].shape != mask.shape:
      raise ValueError(
        f"the loss returned stats {sorted(stats)}; it must hold 'ratio' and"
        " 'clipped', both [B, T] (python -m arl_jax.testing.check_loss)"
      )
  ratio = jnp.where(mask, stats["ratio"], 0.0)
  # Sampled from μ, so μ takes the place of π_θ in the estimators, and the
  # learner that of the reference: an estimate of KL(μ ‖ π_θ).
  kl = losses.kl_estimates(part.behaviour_logp, logp, mask)
  gap = jnp.where(mask, jnp.abs(logp - part.behaviour_logp), 0.0)
  added = {
    "ratio": ratio.sum(),
    "ratio_squared": (ratio**2).sum(),
    "clipped": jnp.where(mask, stats["clipped"], 0.0).sum(),
    "gap": gap.sum(),
    "gap_histogram": _histogram(gap, mask),
    **{f"kl_{name}": value.sum() for name, value in kl.items()},
  }
  if part.reference_logp is not None:
    to_reference = losses.kl_estimates(logp, part.reference_logp, mask)
    for name, value in to_reference.items():
      added[f"reference_kl_{name}"] = value.sum()
  return Sums(added=added, largest={"ratio": ratio.max(), "gap": gap.max()})


def _histogram(gap: jax.Array, mask: jax.Array) -> jax.Array:
  """[_BINS] counts over the logarithm of the gap."""
  low, high = _DECADES
  place = (jnp.log10(jnp.maximum(gap, 10.0**low)) - low) / (high - low)
  index = jnp.clip(place * _BINS, 0, _BINS - 1)
  # A gap that isn't a number is as large as can be.
  index = jnp.where(jnp.isnan(index), _BINS - 1, index).astype(jnp.int32)
  return jax.ops.segment_sum(
    mask.reshape(-1).astype(jnp.float32), index.reshape(-1), _BINS
  )


def quantile(histogram: jax.Array, q: float) -> jax.Array:
  """Upper edge, nats, of the bin that holds the q-quantile; 0 if empty."""
  low, high = _DECADES
  reached = jnp.cumsum(histogram) >= q * histogram.sum()
  edge = 10.0 ** (low + (jnp.argmax(reached) + 1) * (high - low) / _BINS)
  return jnp.where(histogram.sum() > 0, edge, 0.0)


def metrics(
  sums: Sums, counts: Mapping[str, jax.Array], *, supervised: bool
) -> Metrics:
  """Means over the whole batch.

  Args:
    sums: over all microbatches.
    counts: denominators (see `objective.denominators`).
    supervised: there is no behaviour policy, so nothing compared with it.
  """
  added = sums.added
  found = {"loss": added["loss"] / counts["policy"]}
  per_trained = ["entropy"]
  if not supervised:
    per_trained += ["ratio", "clipped", "gap", "kl_k1", "kl_k2", "kl_k3"]
    per_trained += [n for n in added if n.startswith("reference_kl_")]
    found["gap_p99"] = jnp.minimum(
      quantile(added["gap_histogram"], 0.99), sums.largest["gap"]
    )
    found |= {f"{k}_max": v for k, v in sums.largest.items()}
    # Kish: how many tokens of equal weight would be worth as much.
    found["effective_tokens"] = added["ratio"] ** 2 / jnp.maximum(
      added["ratio_squared"], 1e-30
    )
  found |= {name: added[name] / counts["trained"] for name in per_trained}
  for name in ("balance", "z"):
    if name in added:
      found[f"router_{name}"] = added[name] / counts["real"]
  if "mtp" in added:
    found["mtp_loss"] = added["mtp"] / counts["drafted"]
    found["mtp_agreement"] = added["mtp_agree"] / counts["drafted"]
  return found
