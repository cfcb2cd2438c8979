"""Multi-token prediction: DeepSeek-V3's module, trained by self-distillation.

h'_t = block(project([norm(embed(ids[t+1])); norm(h_t)])), then its own norm
and the shared head: at t it predicts token t+2. DeepSeek-V3, arXiv 2412.19437,
section 2.2; the soft target follows Composer 2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from arl_jax.model import attention, transformer
from arl_jax.model.config import ModelConfig


def mtp_forward(
  params: Any,
  config: ModelConfig,
  hidden: jax.Array,
  input_ids: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
) -> jax.Array:
  """Logits [B, T-1, V]; entry t predicts token t+2.

  Args:
    params: with "mtp".
    config: the model's.
    hidden: [B, T, D] trunk output after the final norm.
    input_ids: [B, T].
    positions: [B, T].
    segment_ids: [B, T]; 0 = padding.
  """
  p = params["mtp"]
  eps = config.norm_eps
  following = transformer.embed(params, input_ids[:, 1:])
  joined = jnp.concatenate(
    [
      attention.rms_norm(following, p["embed_norm"], eps),
      attention.rms_norm(hidden[:, :-1], p["hidden_norm"], eps),
    ],
    -1,
  )
  x, _ = transformer.block(
    p["block"],
    config,
    joined @ p["project"],
    positions[:, :-1],
    segment_ids[:, :-1],
  )
  return transformer.unembed(params, attention.rms_norm(x, p["norm"], eps))


def distillation(
  params: Any,
  config: ModelConfig,
  hidden: jax.Array,
  input_ids: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  mask: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Cross-entropy to the main head's distribution one position later.

  Trunk and head are behind a stop-gradient: only the module learns.

  Args:
    params: the policy's.
    config: the model's.
    hidden: [B, T, D] trunk output.
    input_ids: [B, T].
    positions: [B, T].
    segment_ids: [B, T].
    mask: [B, T] bool; position t+2 must be set for entry t to count.

  Returns:
    Sum of cross-entropies (nats), count, and the number of entries where both
    heads have the same first choice.
  """
  frozen = {**jax.lax.stop_gradient(params), "mtp": params["mtp"]}
  hidden = jax.lax.stop_gradient(hidden)
  draft = mtp_forward(
    frozen, config, hidden, input_ids, positions, segment_ids
  )[:, :-1]
  target = transformer.unembed(frozen, hidden[:, 1:-1])
  inside = (segment_ids[:, :-2] == segment_ids[:, 2:]) & mask[:, 2:]
  loss = -(jax.nn.softmax(target) * jax.nn.log_softmax(draft)).sum(-1)
  agree = target.argmax(-1) == draft.argmax(-1)
  return (
    jnp.where(inside, loss, 0.0).sum(),
    inside.sum().astype(jnp.float32),
    jnp.where(inside, agree, False).sum().astype(jnp.float32),
  )
