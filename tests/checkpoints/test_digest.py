import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from arl_jax.checkpoints import digest

DTYPES = (
  *(jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn),
  *(jnp.int32, jnp.uint32, jnp.int16, jnp.int8, jnp.uint8, jnp.int4, jnp.bool_),
  jnp.complex64,
)


def _digest(x):
  (value,) = digest.digests(x).values()
  return value


def _random(dtype, shape=(8, 12), seed=0):
  values = np.random.default_rng(seed).integers(-8, 8, shape)
  return jnp.asarray(values).astype(dtype)


def _by_hand(words):
  """The definition again, with Python's numbers instead of wrapped arrays."""

  def mix(x):
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16

  first = second = 0
  for index, word in enumerate(words):
    place = mix((index + 0x9E3779B1) % 2**32)
    mixed = mix(word ^ place)
    first += mixed
    second += mixed * (place | 1)
  return f"{first % 2**32:08x}{second % 2**32:08x}"


def test_digest_is_the_defined_sum():
  assert _digest(jnp.zeros((0, 3))) == _by_hand([]) == "0" * 16
  # 1.0 and -2.0 as bits; a shape only gives the order.
  x = jnp.asarray([[1.0, -2.0], [0.0, 1.0]])
  assert _digest(x) == _by_hand([0x3F800000, 0xC0000000, 0, 0x3F800000])
  # 1.0 in bfloat16 is 0x3F80; a narrow element is a word of its own.
  assert _digest(jnp.ones(2, jnp.bfloat16)) == _by_hand([0x3F80, 0x3F80])
  assert _digest(jnp.asarray([True, False])) == _by_hand([1, 0])
  assert _digest(jnp.asarray([-1, 3], jnp.int8)) == _by_hand([0xFF, 3])
  assert _digest(jnp.asarray([-1, 3], jnp.int4)) == _by_hand([0xF, 3])
  # 64 bits are two words, the lower first; 1.5 is 0x3FF80000_00000000.
  assert _digest(np.float64(1.5)) == _by_hand([0, 0x3FF80000])
  assert _digest(np.asarray([-1, 2])) == _by_hand(
    [0xFFFFFFFF, 0xFFFFFFFF, 2, 0]
  )
  # Real part, then imaginary part.
  assert _digest(jnp.complex64(1 - 2j)) == _by_hand([0x3F800000, 0xC0000000])
  assert _digest(jnp.int32(7)) == _by_hand([7])


def test_leaves_are_named_by_their_path():
  tree = {"b": (jnp.int32(1), np.int32(1)), "a": 1.5, "none": None}
  assert list(digest.digests(tree)) == ["['a']", "['b'][0]", "['b'][1]"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_device_agree(dtype):
  x = _random(dtype)
  assert _digest(np.asarray(x)) == _digest(x)


def test_prng_keys_are_their_data():
  keys = jax.random.split(jax.random.key(3), 4)
  assert _digest(keys) == _digest(jax.random.key_data(keys))


def _sharded(x, shape, spec, axis_type):
  mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(axis_type,) * 2)
  return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sharding_of_any_dtype_does_not_matter(dtype):
  x = _random(dtype)
  parts = _sharded(x, (4, 2), ("a", "b"), AxisType.Auto)
  assert _digest(parts) == _digest(x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_mesh_does_not_matter(axis_type):
  x = _random(jnp.bfloat16)
  expected = _digest(x)
  for shape in ((4, 2), (2, 4)):
    for spec in (("a", "b"), ("b",), (("a", "b"),), ()):
      found = _digest(_sharded(x, shape, spec, axis_type))
      assert found == expected, (shape, spec)


def test_nothing_large_travels_or_is_stored():
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
  place = NamedSharding(mesh, PartitionSpec("a", "b"))
  x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=place)
  compiled = digest._sums.lower(x).compile()
  # 128 KiB on each of 8 devices.
  assert compiled.memory_analysis().argument_size_in_bytes == 1 << 17
  assert compiled.memory_analysis().temp_size_in_bytes < 1 << 12
  moved = re.findall(r"= \(?u\d+\[([\d,]*)\]\S* all-\w+\(", compiled.as_text())
  assert moved
  assert all(np.prod([int(n or 1) for n in m.split(",")]) <= 8 for m in moved)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_every_flipped_bit_changes_both_sums(dtype):
  x = np.asarray(_random(dtype, (3, 5)))
  before = _digest(x)
  for bit in range(8 * x.nbytes):
    raw = bytearray(x.tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    after = _digest(np.frombuffer(raw, x.dtype).reshape(x.shape))
    assert after[:8] != before[:8]
    assert after[8:] != before[8:]


def test_order_and_pairs_of_changes_are_seen():
  x = np.arange(64, dtype=np.float32).reshape(8, 8)
  found = {_digest(x), _digest(x.T.copy()), _digest(x[::-1].copy())}
  # Two signs at once: in a plain sum, the two highest bits would cancel.
  for i in range(1, 8):
    y = x.copy()
    y[0, i], y[i, 0] = -y[0, i], -y[i, 0]
    found.add(_digest(y))
    z = x.copy()
    z[[0, i]] = z[[i, 0]]
    found.add(_digest(z))
  assert len(found) == 3 + 7 + 7


def test_places_beyond_2_to_the_32_differ():
  # Rows of 2^31 words: those of rows 0 and 2 are 2^32 apart.
  places = [np.asarray([0, 2], np.uint32), np.asarray([5, 5], np.uint32)]
  one, two = digest._index_hash(places, (4, 1 << 31))
  assert one != two
