"""Mixture-of-experts feed-forward layer with a softmax router."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from arl_jax.model.attention import rms_norm
from arl_jax.model.config import ModelConfig
from arl_jax.sharding import Spec


def specs(config: ModelConfig) -> dict[str, Spec]:
  d, e, f = config.width, config.experts, config.expert_width
  inward = ("experts", "width", "mlp")
  return {
    "norm": Spec(shape=(d,), axes=(None,), init="ones"),
    "router": Spec(shape=(d, e), axes=("width", None), fan_in=d),
    "gate": Spec(shape=(e, d, f), axes=inward, fan_in=d),
    "up": Spec(shape=(e, d, f), axes=inward, fan_in=d),
    "down": Spec(shape=(e, f, d), axes=("experts", "mlp", "width"), fan_in=f),
  }


def route(
  params: Any, config: ModelConfig, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Chooses experts.

  Returns:
    gates [..., E] (0 for experts not chosen, the others sum to 1),
    experts [..., K] int32 in order of probability, probabilities [..., E].
  """
  probabilities = jax.nn.softmax(x @ params["router"], axis=-1)
  _, experts = jax.lax.top_k(probabilities, config.experts_per_token)
  chosen = jax.nn.one_hot(experts, config.experts, dtype=x.dtype).sum(-2)
  gates = probabilities * chosen
  gates = gates / gates.sum(-1, keepdims=True)
  return gates, experts.astype(jnp.int32), probabilities


def apply(
  params: Any, config: ModelConfig, x: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Σ_e gate_e · down_e(silu(gate_e x) · up_e x) of the normed input.

  Every expert is evaluated for every token and the gates select: exact for any
  routing, and for few small experts on a CPU faster than sorting tokens.

  Args:
    params: of this layer.
    config: the model's.
    x: [B, T, D].

  Returns:
    [B, T, D] to be added to the residual stream, and an aux record with
    "experts" [B, T, K] and "probabilities", "chosen" [B, T, E].
  """
  x = rms_norm(x, params["norm"], config.norm_eps)
  gates, experts, probabilities = route(params, config, x)
  hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, params["gate"]))
  hidden *= jnp.einsum("btd,edf->btef", x, params["up"])
  y = jnp.einsum("btef,efd->btd", hidden * gates[..., None], params["down"])
  aux = {
    "experts": experts,
    "probabilities": probabilities,
    "chosen": (gates > 0).astype(x.dtype),
  }
  return y, aux
