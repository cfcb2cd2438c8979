"""Positions, and their rotary embedding, plain or stretched."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from arl_jax.model.config import RopeConfig


def frequencies(config: RopeConfig, dim: int) -> np.ndarray:
  """Radians a position of each pair, [dim / 2] float32.

  Stretching follows YaRN (arXiv 2309.00071, section 3.2) or Llama 3.1: fast
  pairs stay, slow ones are divided by the factor, those between are mixed.
  """
  plain = config.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
  if config.kind == "plain":
    return plain.astype(np.float32)
  if config.kind == "llama3":
    turns = config.original_length * plain / (2 * math.pi)
    keep = np.clip((turns - config.low) / (config.high - config.low), 0, 1)
  else:
    first = _pair_of_turns(config, dim, config.high)
    last = _pair_of_turns(config, dim, config.low)
    if config.truncate:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    # Equal ends would divide by zero.
    width = last - first if last != first else 1e-3
    keep = 1 - np.clip((np.arange(dim // 2) - first) / width, 0, 1)
  return (plain * (keep + (1 - keep) / config.factor)).astype(np.float32)


def _pair_of_turns(config: RopeConfig, dim: int, turns: float) -> float:
  """The pair, as a real number, that turns so often in the old context."""
  wavelength = config.original_length / (turns * 2 * math.pi)
  return dim * math.log(wavelength) / (2 * math.log(config.theta))


def rotate(x: jax.Array, positions: jax.Array, config: RopeConfig) -> jax.Array:
  """Rotates the pairs of each head by position times frequency.

  Args:
    x: [B, T, heads, dim].
    positions: [B, T] int32.
    config: of the embedding.

  Returns:
    [B, T, heads, dim]. Interleaved pairs come out as two halves: scores don't
    change when queries and keys are permuted alike.
  """
  half = x.shape[-1] // 2
  frequency = jnp.asarray(frequencies(config, x.shape[-1]))
  angle = positions[..., None].astype(jnp.float32) * frequency
  sin = (jnp.sin(angle) * config.amplitude)[:, :, None, :].astype(x.dtype)
  cos = (jnp.cos(angle) * config.amplitude)[:, :, None, :].astype(x.dtype)
  if config.interleaved:
    a, b = x[..., 0::2], x[..., 1::2]
  else:
    a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def segment_positions(segment_ids: jax.Array) -> jax.Array:
  """[B, T] int32 positions that start from 0 in every segment."""
  t = segment_ids.shape[1]
  index = jnp.arange(t)[None]
  first = segment_ids != jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :t]
  return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)
