"""The text encoder against the same formulas in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.model import encoder
from arl_jax.model.encoder import EncoderConfig

CONFIG = EncoderConfig(
  vocab_size=11,
  width=12,
  layers=2,
  heads=3,
  hidden=20,
  positions=9,
  norm_eps=1e-5,
)


def random_params(config, seed=0):
  draw = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: draw.normal(0, 0.4, shape).astype(np.float32),
    encoder.shapes(config),
    is_leaf=lambda x: isinstance(x, tuple),
  )


def by_hand(params, config, ids):
  """One text without padding, in float64, head by head."""
  p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

  def norm(x, q):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + config.norm_eps) * q["scale"] + (
      q["bias"]
    )

  def linear(x, q):
    return x @ q["kernel"] + q["bias"]

  x = norm(p["tokens"][ids] + p["positions"][: len(ids)] + p["kind"], p["norm"])
  size = config.width // config.heads
  erf = np.vectorize(math.erf)
  for i in range(config.layers):
    layer = p["layers"][str(i)]
    q, k, v = (linear(x, layer[n]) for n in "qkv")
    heads = []
    for h in range(config.heads):
      at = slice(h * size, (h + 1) * size)
      weights = np.exp(q[:, at] @ k[:, at].T / math.sqrt(size))
      heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, at])
    mixed = linear(np.concatenate(heads, -1), layer["out"])
    x = norm(x + mixed, layer["attention_norm"])
    inner = linear(x, layer["up"])
    inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
    x = norm(x + linear(inner, layer["down"]), layer["norm"])
  mean = x.mean(0)
  return mean / np.linalg.norm(mean)


def encode(params, ids, mask):
  params = jax.tree.map(jnp.asarray, params)
  return encoder.encode(params, CONFIG, jnp.asarray(ids), jnp.asarray(mask))


def test_equals_the_formulas():
  params = random_params(CONFIG)
  texts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1, 2, 3]]
  ids, mask = np.zeros((3, 9), np.int32), np.zeros((3, 9), bool)
  for row, text in enumerate(texts):
    ids[row, : len(text)] = text
    mask[row, : len(text)] = True
  found = encode(params, ids, mask)
  for row, text in zip(found, texts, strict=True):
    np.testing.assert_allclose(row, by_hand(params, CONFIG, text), atol=1e-5)


def test_padding_matters_not():
  params = random_params(CONFIG)
  ids = np.asarray([[1, 2, 3, 7, 7, 7]], np.int32)
  mask = np.asarray([[1, 1, 1, 0, 0, 0]], bool)
  padded = encode(params, ids, mask)
  alone = encode(params, ids[:, :3], mask[:, :3])
  np.testing.assert_allclose(padded, alone, atol=1e-6)
  empty = encode(params, ids, np.zeros_like(mask))
  np.testing.assert_array_equal(empty, np.zeros((1, 12)))


def test_refuses_sizes_that_cannot_be():
  with pytest.raises(ValueError, match="heads is 5, which doesn't divide"):
    EncoderConfig(11, 12, 2, 5, 20, 9, 1e-5)
  with pytest.raises(ValueError, match=r"encoder\.layers is 0, not above 0"):
    EncoderConfig(11, 12, 0, 3, 20, 9, 1e-5)
