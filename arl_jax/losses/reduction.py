"""From terms per token to one number, exact for every way to cut a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

REDUCTIONS = ("token_mean", "constant_length", "sequence_mean")


def reduce(
  per_token: jax.Array,
  mask: jax.Array,
  *,
  how: str = "token_mean",
  constant_length: int | None = None,
  episode_weight: jax.Array | None = None,
  episodes: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Numerator and denominator; microbatches and devices add up both.

  They are divided once, after the sums over the whole batch, so that neither
  packing nor microbatches nor data parallelism can change the result.

  - "token_mean": Σ terms / trained tokens.
  - "constant_length": Σ terms / (episodes × constant_length), episodes without
    a trained token included (Dr. GRPO, https://arxiv.org/abs/2503.20783).
  - "sequence_mean": the mean over episodes of their own token means; episodes
    without a trained token don't count (DeepSeekMath, eq. 3).

  Args:
    per_token: [B, T].
    mask: [B, T], trained tokens.
    how: one of the above.
    constant_length: tokens, for "constant_length".
    episode_weight: [B, T], 1 / (trained tokens of the token's episode), from
      the packer, for "sequence_mean". None: a row is an episode.
    episodes: [], from the packer: for "constant_length" all of them, for
      "sequence_mean" those with a trained token. None: rows are counted.

  Raises:
    ValueError: an unknown `how`, or "constant_length" without a length.
  """
  if how not in REDUCTIONS:
    raise ValueError(f"reduction is {how!r}, none of {list(REDUCTIONS)}")
  mask = mask.astype(bool)
  terms = jnp.where(mask, per_token, 0.0)
  dtype = per_token.dtype
  if how == "token_mean":
    return terms.sum(), mask.sum().astype(dtype)
  if how == "constant_length":
    if constant_length is None or not constant_length >= 1:
      raise ValueError(f"constant_length is {constant_length}, not >= 1 token")
    rows = jnp.asarray(mask.shape[0]) if episodes is None else episodes
    return terms.sum(), rows.astype(dtype) * constant_length
  trained = mask.sum(-1)
  if episode_weight is None:
    row_weight = 1 / jnp.maximum(trained, 1).astype(dtype)
    episode_weight = jnp.broadcast_to(row_weight[:, None], mask.shape)
  count = (trained > 0).sum() if episodes is None else episodes
  weight = jnp.where(mask, episode_weight, 0.0).astype(dtype)
  return (terms * weight).sum(), count.astype(dtype)
