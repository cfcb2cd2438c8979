"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from arl_jax.model.config import ModelConfig
from arl_jax.sharding import Spec

# A replayed expert must be at least this probable, relative to the last one
# that the router would choose itself. The published reports are silent.
PLAUSIBLE = 0.1

# Above every score: sigmoid scores with their bias, and softmax.
_FORCED = 1e6


def specs(config: ModelConfig) -> dict[str, Spec]:
  d, e = config.width, config.experts
  tree = {"router": Spec(shape=(d, e), axes=("width", None), fan_in=d)}
  if config.router_bias:
    tree["router_bias"] = Spec(shape=(e,), axes=(None,), init="zeros")
  if config.router == "sigmoid":
    tree["choice_bias"] = Spec(shape=(e,), axes=(None,), init="zeros")
  return tree


def route(
  params: Any,
  config: ModelConfig,
  x: jax.Array,
  replay: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
  """Chooses experts; computed in float32.

  Args:
    params: of the layer.
    config: the model's.
    x: [..., D].
    replay: [..., K] int32, experts to take instead of the router's own; -1 is
      free. An implausible or repeated one is replaced by the best of the
      router's own that is left. The gates are always the router's.

  Returns:
    gates [..., K], experts [..., K] int32, and "probabilities" [..., E] (of
    the softmax or the sigmoid) with "logits" [..., E].
  """
  logits = x.astype(jnp.float32) @ params["router"].astype(jnp.float32)
  if config.router_bias:
    logits += params["router_bias"].astype(jnp.float32)
  if config.router == "softmax":
    probabilities = jax.nn.softmax(logits, -1)
  else:
    probabilities = jax.nn.sigmoid(logits)
  score = jax.lax.stop_gradient(probabilities)
  if config.router == "sigmoid":
    score += jax.lax.stop_gradient(params["choice_bias"]).astype(jnp.float32)
  if config.expert_groups > 1:
    score = _best_groups(config, score)
  _, experts = jax.lax.top_k(score, config.experts_per_token)
  if replay is not None:
    forced = _plausible(probabilities, experts, replay, config.experts)
    # Forced ones come first; what is missing, the router chooses.
    score = jnp.where(forced, probabilities + _FORCED, score)
    _, experts = jax.lax.top_k(
      jax.lax.stop_gradient(score), config.experts_per_token
    )
  # Products with one-hot rows: their gradient is no scatter.
  chosen = jax.nn.one_hot(experts, config.experts, dtype=jnp.float32)
  gates = (probabilities[..., None, :] * chosen).sum(-1)
  if config.normalise_gates:
    gates = gates / (gates.sum(-1, keepdims=True) + 1e-20)
  record = {"probabilities": probabilities, "logits": logits}
  return gates * config.gate_scale, experts.astype(jnp.int32), record


def _best_groups(config: ModelConfig, score: jax.Array) -> jax.Array:
  """Scores outside the kept groups become -inf (DeepSeek-V3, section 2.1.2).

  A group counts as much as its two best experts together.
  """
  groups = score.reshape(*score.shape[:-1], config.expert_groups, -1)
  worth = jax.lax.top_k(groups, 2)[0].sum(-1)
  _, kept = jax.lax.top_k(worth, config.groups_kept)
  keep = jax.nn.one_hot(kept, config.expert_groups, dtype=jnp.bool_).any(-2)
  return jnp.where(keep[..., None], groups, -jnp.inf).reshape(score.shape)


def _plausible(probabilities, own, replay, experts):
  """[..., E] bool, replayed experts that the router doesn't find absurd."""
  last = jnp.take_along_axis(probabilities, own[..., -1:], -1)
  recorded = jax.nn.one_hot(replay, experts, dtype=jnp.bool_).any(-2)
  return recorded & (probabilities >= PLAUSIBLE * last)
