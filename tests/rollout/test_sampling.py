import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.rollout.sampling import sample


@jax.jit
def _draw(logits, temperature, seeds, index):
  return sample(logits, temperature, seeds, index)


def _many(logits, count, temperature=1.0, index=0):
  """One token for each seed in 0..count-1, all from the same logits."""
  return map(
    np.asarray,
    _draw(
      jnp.broadcast_to(jnp.array(logits, jnp.float32), (count, len(logits))),
      jnp.full(count, temperature),
      jnp.arange(count),
      jnp.full(count, index),
    ),
  )


_LOGITS = np.random.default_rng(0).normal(size=16) * 1.5


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("index", [0, 7])
def test_tokens_are_distributed_as_the_softmax(temperature, index):
  ids, _ = _many(_LOGITS, 40_000, temperature, index)
  p = np.exp(_LOGITS / temperature)
  expected = 40_000 * p / p.sum()
  counts = np.bincount(ids, minlength=16)
  # χ² with 15 degrees of freedom exceeds 37.7 once in a thousand times; rare
  # tokens are put together so that each cell expects at least 5.
  rare = expected < 5
  cells = np.append(counts[~rare], counts[rare].sum())
  wanted = np.append(expected[~rare], expected[rare].sum())
  chi_2 = ((cells - wanted) ** 2 / np.maximum(wanted, 1)).sum()
  assert chi_2 < 37.7


def test_draws_of_one_request_are_distributed_as_the_softmax():
  count = 40_000
  ids, _ = _draw(
    jnp.broadcast_to(jnp.array(_LOGITS, jnp.float32), (count, 16)),
    jnp.ones(count),
    jnp.full(count, 3),
    jnp.arange(count),
  )
  p = np.exp(_LOGITS) / np.exp(_LOGITS).sum()
  counts = np.bincount(ids, minlength=16)
  variation = 0.5 * np.abs(counts / count - p).sum()
  # E|x − p| of a binomial is sqrt(2 p (1 − p) / (π n)); twice that in all.
  expected = 0.5 * np.sqrt(2 * p * (1 - p) / np.pi / count).sum()
  assert variation < 2 * expected


def test_log_prob_is_that_of_the_drawn_token_at_its_temperature():
  ids, logp = _many(_LOGITS, 1000, 0.7)
  scaled = _LOGITS / 0.7
  want = (scaled - np.log(np.exp(scaled).sum()))[ids]
  np.testing.assert_allclose(logp, want, atol=1e-5)
  assert len(set(ids)) > 8


def test_draw_depends_on_seed_and_index_alone():
  draw = np.random.default_rng(1)
  logits = draw.normal(size=(8, 16)).astype(np.float32)
  temperature = draw.uniform(0.5, 1.5, 8).astype(np.float32)
  seed = draw.integers(0, 2**31 - 1, 8, np.int32)
  index = draw.integers(0, 500, 8, np.int32)
  ids, logp = _draw(logits, temperature, seed, index)
  # The same requests in other slots, among others.
  order = draw.permutation(8)
  ids_2, logp_2 = _draw(*(x[order] for x in (logits, temperature, seed, index)))
  np.testing.assert_array_equal(ids_2, np.asarray(ids)[order])
  np.testing.assert_allclose(logp_2, np.asarray(logp)[order], atol=1e-6)
  one, _ = _draw(logits[3:4], temperature[3:4], seed[3:4], index[3:4])
  assert one[0] == ids[3]


def test_seeds_and_indices_give_different_draws():
  by_seed, _ = _many(np.zeros(64), 100)
  by_index, _ = _draw(
    jnp.zeros((100, 64)), jnp.ones(100), jnp.zeros(100, int), jnp.arange(100)
  )
  for ids in (by_seed, np.asarray(by_index)):
    assert len(set(ids)) > 30
  assert (by_seed != by_index).any()


@pytest.mark.parametrize("only", [0, 5, 15])
def test_tokens_of_probability_zero_are_never_drawn(only):
  logits = np.full(16, -np.inf)
  logits[only] = 1.0
  ids, logp = _many(logits, 5000)
  assert (ids == only).all()
  assert (logp == 0).all()


def test_holes_in_the_distribution_are_never_drawn():
  logits = np.where(np.arange(16) % 3 == 1, _LOGITS, -np.inf)
  ids, logp = _many(logits, 20_000)
  assert set(ids) == {1, 4, 7, 10, 13}
  assert np.isfinite(logp).all()


def test_impossible_tokens_are_never_drawn_from_a_large_vocabulary():
  # With this seed the parallel sum alone would draw an impossible token.
  random = np.random.default_rng(0)
  logits = (random.normal(size=4096) * 3).astype(np.float32)
  logits[random.random(4096) < 0.5] = -np.inf
  ids, logp = _draw(
    jnp.asarray(logits)[None],
    jnp.ones(1),
    jnp.array([332597], jnp.int32),
    jnp.zeros(1, jnp.int32),
  )
  assert np.isfinite(logits[np.asarray(ids)[0]])
  assert np.isfinite(np.asarray(logp)[0])
