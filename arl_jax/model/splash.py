"""Causal attention within packed segments on TPU, by JAX's splash kernel."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as pallas_splash
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

_LANES = 128

# Keys that meet a block of queries at once inside the kernel. Their scores are
# what fills the vector memory.
_COMPUTE = 512

# Smallest block for a window: below it, the fixed cost of a grid step counts
# for more than the masked scores that a smaller block saves.
_SMALLEST_WINDOW_BLOCK = 256


def splash_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  scale: float,
  window: int = 0,
  sinks: jax.Array | None = None,
  head_axis: str | None = None,
  batch_axes: tuple[str, ...] = (),
  block: int = 1024,
  interpret: bool = False,
) -> jax.Array:
  """softmax(scale q k) v over earlier keys of the same segment.

  XLA does not partition Pallas kernels, so under a mesh of more than one
  device (`jax.set_mesh`) each device runs the kernel on its own batch rows and
  heads. Key-value heads are repeated as far as `head_axis` needs. A mesh axis
  that is named neither in `batch_axes` nor as `head_axis` repeats the work, and
  its devices sum their equal gradients: leave none.

  Args:
    q: [B, H, T, k].
    k: [B, G, T, k]; G divides H.
    v: [B, G, T, n].
    segment_ids: [B, T] int32, 0 = padding. Padding sees earlier padding.
    scale: multiplies q k.
    window: keys that a query sees, itself included; 0 = all.
    sinks: [H] logits that take part in a head's softmax without a value.
    head_axis: mesh axis that splits H.
    batch_axes: mesh axes that split B.
    block: most queries, and keys, in one step of the kernel. 1024 fits the
      vector memory of TPU v5e, v5p and v6e in bfloat16.
    interpret: runs the kernel on any device, slowly, for tests.

  Returns:
    [B, H, T, n].

  Raises:
    ValueError: heads or batch rows cannot be split as asked, or `window` or
      `block` is out of range.
  """
  b, h, t, _ = q.shape
  groups = k.shape[1]
  if h % groups:
    raise ValueError(f"q has {h} heads, not a multiple of k's {groups}")
  if window < 0:
    raise ValueError(f"window {window} is negative; 0 means no window")
  if block < _LANES or block % _LANES:
    raise ValueError(f"block {block} is not a positive multiple of {_LANES}")

  mesh = jax.sharding.get_abstract_mesh()
  free = _free_axes(mesh)
  heads = head_axis if free.get(head_axis or "", 1) > 1 else None
  rows = tuple(name for name in batch_axes if free.get(name, 1) > 1)
  head_shards = free[heads] if heads else 1
  row_shards = math.prod(free[name] for name in rows)
  if h % head_shards:
    raise ValueError(
      f"q has {h} heads, which mesh axis {heads!r} of {head_shards} cannot"
      " split"
    )
  if b % row_shards:
    raise ValueError(
      f"q has {b} batch rows, which mesh axes {rows} of {row_shards} cannot"
      " split"
    )
  repeats = next(
    r
    for r in range(1, h // groups + 1)
    if h // groups % r == 0 and groups * r % head_shards == 0
  )
  if repeats > 1:
    k, v = jnp.repeat(k, repeats, 1), jnp.repeat(v, repeats, 1)

  if window:
    # A block of queries meets the blocks that its window touches: about a
    # block more than the window, so a small window wants small blocks.
    wanted = 1 << (window - 1).bit_length()
    block = min(block, max(_SMALLEST_WINDOW_BLOCK, wanted))
  blocks = -(-t // block)
  size = -(-t // (blocks * _LANES)) * _LANES
  padding = blocks * size - t
  if padding:
    # Later than every real token, so causality alone hides it.
    wide = ((0, 0), (0, 0), (0, padding), (0, 0))
    q, k, v = jnp.pad(q, wide), jnp.pad(k, wide), jnp.pad(v, wide)
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))

  def local(q, k, v, segment_ids, sinks):
    kernel = _kernel(q.shape[1], blocks * size, size, window, interpret)

    def one(q, k, v, ids):
      own = None if sinks is None else _sinks(sinks)
      return kernel(q, k, v, pallas_splash.SegmentIds(ids, ids), own)

    return jax.vmap(one)(q, k, v, segment_ids)

  if math.prod(free.values()) > 1:
    split = PartitionSpec(rows or None, heads)
    local = jax.shard_map(
      local,
      in_specs=(
        *(split, split, split),
        PartitionSpec(rows or None),
        PartitionSpec(heads),
      ),
      out_specs=split,
      axis_names=set(free),
      # The kernel's outputs do not say over which axes they vary.
      check_vma=False,
    )
  out = local((q * scale).astype(q.dtype), k, v, segment_ids, sinks)
  return out[:, :, :t]


@jax.custom_vjp
def _sinks(sinks: jax.Array) -> jax.Array:
  """The same sinks, with a gradient of their own type.

  The kernel computes with sinks in float32 but gives their gradient the type
  of its output, which a loop over layers cannot add up.
  """
  return sinks


def _sinks_forward(sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
  return sinks, sinks


def _sinks_backward(sinks: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
  return (grad.astype(sinks.dtype),)


_sinks.defvjp(_sinks_forward, _sinks_backward)


def _free_axes(mesh: AbstractMesh) -> dict[str, int]:
  """Size of each axis that no enclosing `shard_map` has already split."""
  return {
    name: size
    for name, size, kind in zip(
      mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
    )
    if kind != AxisType.Manual
  }


class Band(pallas_splash.LocalMask):
  """A causal mask whose blocks cost little to look at.

  The kernel asks of each block whether it has any and all of its pairs, with
  T² answers for T tokens. All but the blocks on the band's edges have one
  answer throughout, and give it once.
  """

  def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
    queries, keys = idx
    youngest = queries.start - (keys.stop - 1)
    oldest = queries.stop - 1 - keys.start
    most = self.window_size[0]
    if oldest < 0 or (most is not None and youngest > most):
      return np.zeros((1, 1), np.bool_)
    if youngest >= 0 and (most is None or oldest <= most):
      return np.ones((1, 1), np.bool_)
    return super().__getitem__(idx)


def _kernel(heads: int, t: int, size: int, window: int, interpret: bool):
  """The kernel of one row of `t` tokens, in blocks of `size`."""
  mask = Band((t, t), (window - 1 if window else None, 0), offset=0)
  compute = max(
    c for c in range(_LANES, min(size, _COMPUTE) + 1, _LANES) if size % c == 0
  )
  return pallas_splash.make_splash_mha_single_device(
    pallas_splash.MultiHeadMask([mask] * heads),
    # Not the fused backward pass: it writes a copy of dq for each block of
    # keys.
    block_sizes=pallas_splash.BlockSizes(
      block_q=size,
      block_kv=size,
      block_kv_compute=compute,
      block_q_dkv=size,
      block_kv_dkv=size,
      block_kv_dkv_compute=compute,
      block_q_dq=size,
      block_kv_dq=size,
    ),
    interpret=interpret,
  )
