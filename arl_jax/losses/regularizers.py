"""Terms beside the policy loss: routers, entropy, distillation."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def entropy_bonus(entropy: jax.Array, mask: jax.Array) -> jax.Array:
  """−H of each trained token's distribution, [B, T], nats; minimised."""
  return jnp.where(mask.astype(bool), -entropy, 0.0)


def router_z(logits: jax.Array) -> jax.Array:
  """(log Σ exp)² of router logits [..., E] -> [...].

  Keeps them small. ST-MoE, https://arxiv.org/abs/2202.08906, eq. 5.
  """
  return jax.nn.logsumexp(logits, -1) ** 2


def router_balance(
  probabilities: jax.Array, experts: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """Load-balance loss of each token's sequence, [B, T]; 0 on padding.

  Σ_e f_e P_e of a segment: f is the share of its choices that fell on expert
  e, scaled to 1 when even, P the mean of the normalised probabilities. 1 at
  perfect balance (DeepSeek-V3, https://arxiv.org/abs/2412.19437, eq. 17-20).

  Args:
    probabilities: [B, T, E].
    experts: [B, T, K].
    segment_ids: [B, T], 0 = padding; tokens of a segment stand together.
  """
  t, e = probabilities.shape[1:]
  share = probabilities / probabilities.sum(-1, keepdims=True)
  chosen = jax.nn.one_hot(experts, e, dtype=jnp.float32).sum(-2)
  chosen *= e / experts.shape[-1]
  begins = segment_ids[:, 1:] != segment_ids[:, :-1]
  index = jnp.pad(jnp.cumsum(begins, -1), ((0, 0), (1, 0)))

  def row(share, chosen, index):
    sums = jax.ops.segment_sum(
      jnp.concatenate([share, chosen, jnp.ones((t, 1))], -1), index, t
    )
    count = jnp.maximum(sums[:, -1], 1.0)
    loss = (sums[:, :e] * sums[:, e : 2 * e]).sum(-1) / count**2
    return loss[index]

  return jnp.where(segment_ids > 0, jax.vmap(row)(share, chosen, index), 0.0)


def balanced_bias(
  bias: jax.Array, load: jax.Array, *, rate: float
) -> jax.Array:
  """Selection bias [..., E] after a step: bias + rate · sign(mean − load).

  Balances experts without a loss: the overloaded become less likely to be
  chosen, gates stay as they are. DeepSeek-V3, section 2.1.2.

  Args:
    bias: [..., E].
    load: [..., E], choices that fell on each expert in the whole batch.
    rate: size of the change.
  """
  mean = load.mean(-1, keepdims=True)
  return bias + rate * jnp.sign(mean - load).astype(bias.dtype)


def distillation(draft: jax.Array, target: jax.Array) -> jax.Array:
  """Cross-entropy of logits `draft` [..., V] to those of `target`, -> [...].

  The target is whole, not one token of it: what an MTP head is trained on.
  No gradient reaches the target.
  """
  target = jax.lax.stop_gradient(jax.nn.softmax(target))
  return -(target * jax.nn.log_softmax(draft)).sum(-1)
