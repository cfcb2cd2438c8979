"""Multi-token prediction: DeepSeek-V3's module, trained by self-distillation.

h'_t = block(project([norm(embed(ids[t+1])); norm(h_t)])), then its own norm
and the shared head: at t it predicts token t+2. DeepSeek-V3, arXiv 2412.19437,
section 2.2; the soft target follows Composer 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from arl_jax import sharding
from arl_jax.losses import regularizers
from arl_jax.model import attention, transformer
from arl_jax.model.config import ModelConfig
from arl_jax.model.logprobs import map_positions


def add_mtp(
  config: ModelConfig, params: Any, key: jax.Array
) -> tuple[ModelConfig, dict[str, Any]]:
  """Gives a model without an MTP module a fresh one, of the same dtype."""
  if config.mtp_heads:
    raise ValueError("model.mtp_heads is 1 already; nothing to add")
  config = dataclasses.replace(config, mtp_heads=1)
  fresh = sharding.initialise(
    transformer.specs(config)["mtp"], key, params["embed"].dtype
  )
  return config, {**params, "mtp": fresh}


def mtp_hidden(
  params: Any,
  config: ModelConfig,
  hidden: jax.Array,
  input_ids: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
) -> jax.Array:
  """What the shared head takes, [B, T-1, D]; arguments of `mtp_forward`."""
  p = params["mtp"]
  eps = config.norm_eps
  following = transformer.embed(params, config, input_ids[:, 1:])
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
    config.layer(config.layers - 1),
    joined @ p["project"],
    positions[:, :-1],
    segment_ids[:, :-1],
  )
  return attention.rms_norm(x, p["norm"], eps)


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
  return transformer.unembed(
    params,
    mtp_hidden(params, config, hidden, input_ids, positions, segment_ids),
  )


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
  draft = mtp_hidden(frozen, config, hidden, input_ids, positions, segment_ids)[
    :, :-1
  ]
  inside = (segment_ids[:, :-2] == segment_ids[:, 2:]) & mask[:, 2:]

  def score(head, real, draft, hidden):
    del real
    drafted = transformer.logits(head, draft)
    target = transformer.logits(head, hidden)
    loss = regularizers.distillation(drafted, target)
    agree = target.argmax(-1) == drafted.argmax(-1)
    return loss, agree.astype(jnp.float32)

  loss, agree = map_positions(
    score,
    transformer.head(frozen),
    inside,
    (draft, hidden[:, 1:-1]),
    sort=True,
  )
  return loss.sum(), inside.sum().astype(jnp.float32), agree.sum()
