"""Checksums of arrays, computed where they lie.

A digest is two sums, modulo 2^32, over the array's words. Each word is first
mixed with a hash of its index in the whole array, by steps that can be undone:
changing any one word changes both sums, and so does, but for one chance in
about 2^60, any other change. Sums don't depend on how the array is split, so
that every mesh gives the same digest, and just two numbers travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Of MurmurHash3's finaliser, and 2^32 / golden ratio.
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_GOLDEN = 0x9E3779B1


def digests(tree: Any) -> dict[str, str]:
  """A digest of each leaf.

  Args:
    tree: a pytree whose leaves are jax arrays (PRNG keys included), numpy
      arrays or Python numbers. It depends on a leaf's shape, on the bits of its
      elements and on their places; not on the dtype's name or the sharding.

  Returns:
    16 hexadecimal digits by the leaf's path, such as ".params['w']".
  """
  sums = {name: _sums(_bits(leaf)) for name, leaf in leaves(tree).items()}
  return {
    name: "".join(f"{int(x):08x}" for x in pair)
    for name, pair in jax.device_get(sums).items()
  }


def leaves(tree: Any) -> dict[str, Any]:
  """The leaves of a pytree by path, in its order."""
  flat = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def _bits(leaf: Any) -> jax.Array:
  """Something of the same bits that is safe to hand to `jax.jit`."""
  if isinstance(leaf, jax.Array):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jax.random.key_data(leaf)
    return leaf
  array = np.asarray(leaf)
  if array.dtype.itemsize < 8:
    return jnp.asarray(array)
  # JAX would narrow these to 32 bits.
  words = np.frombuffer(array.tobytes(), np.uint32)
  return jnp.asarray(words.reshape(*array.shape, array.dtype.itemsize // 4))


@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Two [] uint32 sums over an array of any shape and dtype."""
  words = _words(x)
  places = [
    lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    for axis in range(words.ndim)
  ]
  index = _index_hash(places, words.shape)
  mixed = _mix(words ^ index)
  zero = jnp.zeros((), jnp.uint32)
  # Both sums at once: otherwise some compilers store what they share. And both
  # as scalars: those are on every device, whatever the input's sharding.
  first, second = lax.reduce(
    (mixed, mixed * (index | 1)),
    (zero, zero),
    lambda one, two: (one[0] + two[0], one[1] + two[1]),
    tuple(range(words.ndim)),
  )
  return first, second


def _words(x: jax.Array) -> jax.Array:
  """The bits of `x` as uint32, two for 64 bits along a new last axis."""
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    parts = [_words(lax.real(x)), _words(lax.imag(x))]
    joined = jnp.stack(parts, axis=x.ndim)
    return joined.reshape(*x.shape, -1)
  integer = jnp.issubdtype(x.dtype, jnp.integer)
  bits = (jnp.iinfo if integer else jnp.finfo)(x.dtype).bits
  if bits >= 32:
    return lax.bitcast_convert_type(x, jnp.uint32)
  narrow = lax.bitcast_convert_type(x, f"uint{bits}")
  return narrow.astype(jnp.uint32)


def _index_hash(places: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
  """Hash of each index; no two are equal up to 2^32 elements.

  Args:
    places: along each axis; uint32, broadcastable to each other.
    shape: of the array that they are places in.
  """
  linear = jnp.zeros((), jnp.uint32)
  beyond = jnp.zeros((), jnp.uint32)
  for axis, place in enumerate(places):
    linear += place * _wrapped(math.prod(shape[axis + 1 :]))
    # Tells apart what lies a multiple of 2^32 elements apart.
    beyond += place * _wrapped(_GOLDEN * (2 * axis + 1))
  few = math.prod(shape) <= 1 << 32
  return _mix(linear + _wrapped(_GOLDEN)) + (0 if few else beyond)


def _mix(x: jax.Array) -> jax.Array:
  """A permutation of uint32 in which every bit depends on every bit."""
  x = (x ^ (x >> 16)) * _wrapped(_MIX[0])
  x = (x ^ (x >> 13)) * _wrapped(_MIX[1])
  return x ^ (x >> 16)


def _wrapped(number: int) -> np.uint32:
  return np.uint32(number % (1 << 32))
