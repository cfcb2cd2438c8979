"""Small commits, and what tests of them share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.checkpoints.store import CheckpointStore

# For tests in which what orbax reads or writes isn't right.
NOISY = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning",
  "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


def small(seed=0):
  draw = np.random.default_rng(seed)
  return {
    "w": jnp.asarray(draw.normal(size=(16, 8)), jnp.float32),
    "m": jnp.asarray(draw.normal(size=(16, 8)), jnp.bfloat16),
    "step": jnp.int32(seed),
  }


def save(folder, *numbers, keep=3, scores=(), **options):
  """Commits whose state and record tell their number."""
  store = CheckpointStore(folder, keep=keep, **options)
  for i, number in enumerate(numbers):
    score = scores[i] if scores else None
    store.save(number, small(number), {"position": number}, score=score)
  store.close()


def restore(folder, like=None, *, number=None, fall_back=False, **options):
  store = CheckpointStore(folder, keep=3, **options)
  like = small() if like is None else like
  try:
    return store.restore(like, number=number, fall_back=fall_back)
  finally:
    store.close()


def names(folder):
  return sorted(p.name for p in folder.iterdir())


def assert_same_bits(one, two):
  assert jax.tree.structure(one) == jax.tree.structure(two)
  for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = map(jax.random.key_data, (a, b))
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_is(commit, number):
  assert commit.number == number
  assert commit.record == {"position": number}
  assert_same_bits(commit.state, small(number))
