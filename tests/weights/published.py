"""Small versions, and what tests of them share."""

import contextlib
import errno

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from arl_jax import sharding
from arl_jax.weights import Publisher, Subscriber
from arl_jax.weights.storage import Storage

SPECS = {
  "embed": sharding.Spec(shape=(32, 16), axes=("vocab", "width")),
  "layer": {
    "up": sharding.Spec(shape=(16, 24), axes=("width", "mlp")),
    "experts": sharding.Spec(
      shape=(8, 16, 6), axes=("experts", "width", "mlp")
    ),
    "choice_bias": sharding.Spec(shape=(8,), axes=(None,), init="zeros"),
    "scale": sharding.Spec(shape=(), axes=(), init="ones"),
  },
}


def weights(number=0, mesh=None):
  """Float32; from one number to the next a few elements change a little."""
  tree = sharding.initialise(SPECS, jax.random.key(0))

  def moved(path, x):
    x = np.array(x)
    flat = x.reshape(-1)
    for n in range(1, number + 1):
      seed = [n, sum(map(ord, jax.tree_util.keystr(path)))]
      places = np.random.default_rng(seed).integers(0, flat.size, 3)
      flat[places] += 0.01 * n
    return x

  tree = jax.tree_util.tree_map_with_path(moved, tree)
  if mesh is None:
    return jax.tree.map(jnp.asarray, tree)
  return jax.device_put(tree, sharding.shardings(SPECS, mesh))


def rounded(tree):
  """As bfloat16 in numpy, selection biases apart."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: np.asarray(x).astype(
      np.float32 if path[-1].key == "choice_bias" else jnp.bfloat16
    ),
    tree,
  )


def like(mesh=None):
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rounded(weights())
  )
  if mesh is None:
    return shapes
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    shapes,
    sharding.shardings(SPECS, mesh),
  )


def whole(mesh):
  return NamedSharding(mesh, PartitionSpec())


def publish(publisher, *numbers, mesh=None):
  for number in numbers:
    publisher.publish(weights(number, mesh), number)
    publisher.wait()


@contextlib.contextmanager
def publishing(folder, *numbers, lineage=("a",), mesh=None, **options):
  """A publisher that has published these numbers."""
  publisher = Publisher(folder, lineage, **options)
  try:
    publish(publisher, *numbers, mesh=mesh)
    yield publisher
  finally:
    with contextlib.suppress(OSError):
      publisher.close()


@contextlib.contextmanager
def subscribed(folder, wanted=None, **options):
  subscriber = Subscriber(
    folder, like() if wanted is None else wanted, **options
  )
  try:
    yield subscriber
  finally:
    subscriber.close()


def assert_is(fetched, number):
  """That these are the bits of the weights with that number."""
  assert fetched.version.number == number
  expected = rounded(weights(number))
  assert jax.tree.structure(fetched.params) == jax.tree.structure(expected)
  for found, right in zip(
    *map(jax.tree.leaves, (fetched.params, expected)), strict=True
  ):
    assert found.dtype == right.dtype
    assert np.asarray(found).tobytes() == right.tobytes()


def numbers(folder):
  """Of the versions that are there, torn ones included."""
  return [place.number for place in Storage(folder).places()]


def file_of(folder, number, name="shard-00000.bin"):
  (found,) = [p for p in Storage(folder).places() if p.number == number]
  return folder / "versions" / str(found) / name


def is_full(caught):
  return caught.value.errno in (errno.ENOSPC, errno.EDQUOT)
