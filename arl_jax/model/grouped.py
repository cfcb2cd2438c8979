"""Matrix products of sorted rows, each group with a matrix of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.ops import gmm

from arl_jax import sharding

# Rows of a group that are multiplied at once on a CPU.
_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 16

# Of JAX's TPU kernel: rows, and the most columns.
_TILE_ROWS, _TILE = 512, 1024


def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """Row r times the matrix of its group.

  Args:
    x: [R, D], rows sorted by group.
    w: [E, D, F].
    sizes: [E] int32, rows of each group. Rows beyond their sum come out as
      anything.

  Returns:
    [R, F].
  """
  platform = sharding.platform()
  if platform == "cpu":
    return _blocked(x, w, sizes)
  if platform == "tpu":
    # `ragged_dot` is dense on some generations; this kernel is on none.
    rows = x.shape[0]
    x = jnp.pad(x, ((0, -rows % _TILE_ROWS), (0, 0)))
    return gmm(x, w, sizes.astype(jnp.int32), x.dtype, _tiles)[:rows]
  return jax.lax.ragged_dot(x, w, sizes)


def _tiles(rows: int, inner: int, outer: int) -> tuple[int, int, int]:
  """Of the TPU kernel; the largest that fit the vector memory of v5e to v6e."""
  del rows
  return _TILE_ROWS, min(inner, _TILE), min(outer, _TILE)


@jax.custom_vjp
def _blocked(x, w, sizes):
  """`ragged_dot` on a CPU multiplies every row by every matrix; this doesn't.

  Groups are taken in order, in blocks. The last block of a group reaches into
  the next one, which then overwrites what isn't its own.
  """
  return _product(x, w, sizes, 0)


def _product(x, w, sizes, contracted):
  """X times w, or times its transpose for `contracted` 1."""
  rows, block = x.shape[0], _block_size(x.shape[0], w.shape[0])
  padded = jnp.pad(x, ((0, block), (0, 0)))
  starts = jnp.cumsum(sizes) - sizes

  def group(e, out):
    matrix = jax.lax.dynamic_index_in_dim(w, e, keepdims=False)

    def multiply(i, out):
      at = starts[e] + i * block
      part = jax.lax.dynamic_slice_in_dim(padded, at, block)
      y = jax.lax.dot_general(part, matrix, (((1,), (contracted,)), ((), ())))
      return jax.lax.dynamic_update_slice_in_dim(out, y, at, 0)

    return jax.lax.fori_loop(0, -(-sizes[e] // block), multiply, out)

  out = jnp.zeros((rows + block, w.shape[2 - contracted]), x.dtype)
  return jax.lax.fori_loop(0, w.shape[0], group, out)[:rows]


def _outer(x, g, sizes, dtype):
  """Σ of x_r g_rᵀ over the rows of each group, [E, D, F]."""
  block = _block_size(x.shape[0], sizes.shape[0])
  x, g = (jnp.pad(a, ((0, block), (0, 0))) for a in (x, g))
  starts = jnp.cumsum(sizes) - sizes

  def group(e, out):
    def add(i, total):
      at = i * block
      inside = (jnp.arange(block) < sizes[e] - at)[:, None]
      a, b = (
        jax.lax.dynamic_slice_in_dim(z, starts[e] + at, block) for z in (x, g)
      )
      a = jnp.where(inside, a, 0)
      return total + jnp.dot(a.T, b, preferred_element_type=jnp.float32)

    zero = jnp.zeros(out.shape[1:], jnp.float32)
    total = jax.lax.fori_loop(0, -(-sizes[e] // block), add, zero)
    return jax.lax.dynamic_update_index_in_dim(out, total.astype(dtype), e, 0)

  out = jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), dtype)
  return jax.lax.fori_loop(0, sizes.shape[0], group, out)


def _block_size(rows: int, groups: int) -> int:
  mean = 1 << max(rows // max(groups, 1), 1).bit_length()
  return min(max(mean, _SMALLEST_BLOCK), _LARGEST_BLOCK)


def _forward(x, w, sizes):
  return _blocked(x, w, sizes), (x, w, sizes)


def _backward(kept, g):
  x, w, sizes = kept
  return _product(g, w, sizes, 1), _outer(x, g, sizes, w.dtype), None


_blocked.defvjp(_forward, _backward)
