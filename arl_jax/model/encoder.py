"""A text encoder: BERT, as sentence embedders such as MiniLM have it.

Devlin et al. 2019, arXiv 1810.04805: embeddings of token, place and kind,
normalised; layers of attention in both directions and of a feed-forward network
with GELU, each added to its input and normalised after that. The vector of a
text is the mean of its tokens' last states, of length 1 (Reimers and Gurevych
2019, arXiv 1908.10084).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# Vectors are compared across machines, so no device's fast products.
_PRECISION = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """Shape of an encoder.

  Attributes:
    vocab_size: of the tokenizer.
    width: of states, and of vectors.
    layers: number of them.
    heads: of attention; they divide `width`.
    hidden: width of the feed-forward networks.
    positions: longest text, in tokens.
    norm_eps: of the normalisations.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  hidden: int
  positions: int
  norm_eps: float

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not value > 0:
        raise ValueError(f"encoder.{field.name} is {value}, not above 0")
    if self.width % self.heads:
      raise ValueError(
        f"encoder.heads is {self.heads}, which doesn't divide width"
        f" {self.width}"
      )


def shapes(config: EncoderConfig) -> dict[str, Any]:
  """Shapes of all parameters, as nested as they are."""
  d, f = config.width, config.hidden
  norm = {"scale": (d,), "bias": (d,)}
  layer = {
    **{n: {"kernel": (d, d), "bias": (d,)} for n in ("q", "k", "v", "out")},
    "attention_norm": norm,
    "up": {"kernel": (d, f), "bias": (f,)},
    "down": {"kernel": (f, d), "bias": (d,)},
    "norm": norm,
  }
  return {
    "tokens": (config.vocab_size, d),
    "positions": (config.positions, d),
    "kind": (d,),
    "norm": norm,
    "layers": {str(i): layer for i in range(config.layers)},
  }


def hidden_states(
  params: Any, config: EncoderConfig, ids: jax.Array, mask: jax.Array
) -> jax.Array:
  """Last states of texts.

  Args:
    params: as `shapes` says, float32.
    config: of the encoder.
    ids: [B, T] int32, T at most `config.positions`.
    mask: [B, T] bool, False at padding, which nothing attends to.

  Returns:
    [B, T, width] float32; of no meaning at padding.
  """
  x = params["tokens"][ids] + params["positions"][: ids.shape[1]]
  x = _norm(x + params["kind"], params["norm"], config)
  for i in range(config.layers):
    layer = params["layers"][str(i)]
    attended = _attention(x, layer, config, mask)
    x = _norm(x + attended, layer["attention_norm"], config)
    inner = jax.nn.gelu(_linear(x, layer["up"]), approximate=False)
    x = _norm(x + _linear(inner, layer["down"]), layer["norm"], config)
  return x


def encode(
  params: Any, config: EncoderConfig, ids: jax.Array, mask: jax.Array
) -> jax.Array:
  """Vectors of texts: [B, width] float32, of length 1.

  Arguments of `hidden_states`; a row without any token gives zeros.
  """
  states = hidden_states(params, config, ids, mask)
  states = jnp.where(mask[..., None], states, 0.0)
  count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1)
  mean = states.sum(axis=1) / count
  length = jnp.sqrt(jnp.sum(mean * mean, axis=-1, keepdims=True))
  return mean / jnp.maximum(length, 1e-12)


def _attention(
  x: jax.Array, layer: Any, config: EncoderConfig, mask: jax.Array
) -> jax.Array:
  heads = config.heads
  q, k, v = (
    _linear(x, layer[n]).reshape(*x.shape[:2], heads, -1) for n in "qkv"
  )
  scores = jnp.einsum("bthd,bshd->bhts", q, k, precision=_PRECISION)
  scores = scores * (q.shape[-1] ** -0.5)
  # A finite number, as rows without any token would be NaN otherwise.
  scores = jnp.where(mask[:, None, None, :], scores, -1e30)
  weights = jax.nn.softmax(scores, axis=-1)
  mixed = jnp.einsum("bhts,bshd->bthd", weights, v, precision=_PRECISION)
  return _linear(mixed.reshape(x.shape), layer["out"])


def _linear(x: jax.Array, p: Any) -> jax.Array:
  return jnp.matmul(x, p["kernel"], precision=_PRECISION) + p["bias"]


def _norm(x: jax.Array, p: Any, config: EncoderConfig) -> jax.Array:
  centred = x - x.mean(axis=-1, keepdims=True)
  variance = (centred * centred).mean(axis=-1, keepdims=True)
  scaled = centred * jax.lax.rsqrt(variance + config.norm_eps)
  return scaled * p["scale"] + p["bias"]
