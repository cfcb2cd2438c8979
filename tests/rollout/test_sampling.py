"""Drawing: right distributions, and streams that depend on nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.rollout import sampling

# Compiled for few shapes and run a few times: optimising takes longer.
_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
_draw = _jit(sampling.draw)
_guess = _jit(sampling.guess)

_LOGITS = (np.random.default_rng(0).normal(size=16) * 1.5).astype(np.float32)
_MANY = 20_000


def _state(slots, size=16, bias=None, **fields):
  """How slots sample; a field is one value, or one a slot."""
  state = sampling.initial(slots, size)
  given = {
    name: jnp.broadcast_to(
      jnp.asarray(value, getattr(state, name).dtype), slots
    )
    for name, value in fields.items()
  }
  for place, (token, value) in enumerate((bias or {}).items()):
    given["biased"] = given.get("biased", state.biased).at[:, place].set(token)
    given["bias"] = given.get("bias", state.bias).at[:, place].set(value)
  return dataclasses.replace(state, **given)


def _part(state, first, end):
  return jax.tree.map(lambda x: x[first:end], state)


def _rows(logits, count):
  row = jnp.asarray(logits, jnp.float32)
  return jnp.broadcast_to(row, (count, len(row)))


def _many(logits, count=_MANY, ahead=0, **how):
  """A token for each seed in 0..count-1, all from the same logits."""
  # As many rows in every test, so that one program serves them.
  rows = _MANY if len(logits) < 100 else count
  state = _state(rows, len(logits), **{"seed": np.arange(rows), **how})
  found = jax.device_get(_draw(_rows(logits, rows), state, jnp.int32(ahead)))
  return jax.tree.map(lambda x: x[:count], found)


def _softmax(logits):
  p = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return p / p.sum()


def _assert_distributed(ids, p):
  expected = len(ids) * p
  counts = np.bincount(ids, minlength=len(p))
  # Rare tokens are put together so that each cell expects at least 5.
  rare = expected < 5
  cells = np.append(counts[~rare], counts[rare].sum())
  wanted = np.append(expected[~rare], expected[rare].sum())
  chi_2 = ((cells - wanted) ** 2 / np.maximum(wanted, 1)).sum()
  # Its mean and four of its standard deviations.
  freedom = max(len(cells) - 1, 1)
  assert chi_2 < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("sampled", [0, 7])
def test_tokens_of_many_seeds_are_distributed_as_the_softmax(
  temperature, sampled
):
  found = _many(_LOGITS, temperature=temperature, sampled=sampled)
  _assert_distributed(found.ids, _softmax(_LOGITS / temperature))
  assert found.finite.all()


def test_tokens_of_one_seed_are_distributed_as_the_softmax():
  found = _many(_LOGITS, seed=3, sampled=np.arange(_MANY))
  _assert_distributed(found.ids, _softmax(_LOGITS))


@pytest.mark.parametrize("other", ["index", "seed", "both"])
def test_neighbouring_draws_are_independent(other):
  logits = np.log([0.4, 0.3, 0.2, 0.1])
  here = _many(logits).ids
  change = {
    "index": {"sampled": 1},
    "seed": {"seed": np.arange(_MANY) + 1},
    "both": {"sampled": 1, "seed": np.arange(_MANY) - 1},
  }[other]
  there = _many(logits, **change).ids
  p = _softmax(logits)
  _assert_distributed(here * 4 + there, np.outer(p, p).reshape(-1))


def test_a_draw_ahead_is_that_of_the_later_index():
  now = _many(_LOGITS, 500, sampled=5).ids
  before = _many(_LOGITS, 500, sampled=2, ahead=3).ids
  np.testing.assert_array_equal(now, before)


def test_large_vocabulary_is_sampled_right():
  size, count = 50_000, 2000
  logits = np.random.default_rng(1).normal(size=size).astype(np.float32) * 3
  state = _state(count, size, seed=np.arange(count))
  ids = np.concatenate(
    [
      _draw(_rows(logits, 250), _part(state, i, i + 250)).ids
      for i in range(0, count, 250)
    ]
  )
  # Fifty groups of tokens, of neighbouring ids.
  _assert_distributed(ids // 1000, _softmax(logits).reshape(50, -1).sum(1))
  # And fifty by how likely tokens are.
  order = np.argsort(logits)
  rank = np.empty(size, int)
  rank[order] = np.arange(size)
  p = _softmax(logits)[order].reshape(50, -1).sum(1)
  _assert_distributed(rank[ids] // 1000, p)


def test_equally_likely_tokens_of_a_large_vocabulary_are():
  ids = _many(np.zeros(50_000), 1000).ids
  _assert_distributed(ids // 5000, np.full(10, 0.1))
  assert len(set(ids.tolist())) > 950


def test_temperature_zero_takes_the_most_likely_token():
  logits = np.random.default_rng(2).normal(size=(50, 16)).astype(np.float32)
  found = _draw(
    jnp.asarray(logits), _state(50, temperature=0.0, seed=np.arange(50))
  )
  np.testing.assert_array_equal(found.ids, logits.argmax(1))
  want = np.log([_softmax(row).max() for row in logits])
  # That of temperature 1; and drawn is it for certain.
  np.testing.assert_allclose(found.logp, want, atol=1e-5)
  assert not np.asarray(found.sampled_logp).any()
  tied = _many(np.array([1.0, 3.0, 3.0, 0.0]), 100, temperature=0.0)
  assert set(tied.ids.tolist()) == {1}


def test_log_prob_is_that_of_the_token_at_its_temperature():
  found = _many(_LOGITS, 1000, temperature=0.7)
  want = np.log(_softmax(_LOGITS / 0.7))[found.ids]
  np.testing.assert_allclose(found.logp, want, atol=1e-5)
  np.testing.assert_allclose(found.sampled_logp, want, atol=1e-5)


def _kept(z, top_k=0, top_p=1.0, min_p=0.0):
  """Tokens that the filters leave, one after the other."""
  order = np.argsort(-z)
  kept = order[: top_k or len(z)]
  mass = np.cumsum(_softmax(z[kept]))
  kept = kept[: np.searchsorted(mass, top_p) + 1] if top_p < 1 else kept
  p = _softmax(z)
  return {int(i) for i in kept if p[i] >= min_p * p.max()}


_FILTERS = [
  {"top_k": 1},
  {"top_k": 5},
  {"top_k": 16},
  {"top_k": 99},
  {"top_p": 0.01},
  {"top_p": 0.5},
  {"top_p": 0.93},
  {"min_p": 0.2},
  {"min_p": 1.0},
  {"top_k": 9, "top_p": 0.8, "min_p": 0.08},
  {"top_k": 3, "top_p": 0.99},
]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("filters", _FILTERS, ids=str)
def test_filters_keep_what_they_say(filters, temperature):
  z = _LOGITS / temperature
  kept = _kept(z, **filters)
  found = _many(_LOGITS, temperature=temperature, **filters)
  p = np.where(np.isin(np.arange(16), list(kept)), _softmax(z), 0.0)
  p /= p.sum()
  assert set(found.ids.tolist()) <= kept
  _assert_distributed(found.ids, p)
  # Training needs the policy's own distribution, importance weights both.
  own, drawn = np.log(_softmax(z)), np.log(np.where(p > 0, p, 1))
  np.testing.assert_allclose(found.logp, own[found.ids], atol=1e-5)
  np.testing.assert_allclose(found.sampled_logp, drawn[found.ids], atol=1e-5)


def test_tokens_as_likely_as_the_last_one_kept_are_kept():
  logits = np.array([2.0, 1.0, 1.0, 1.0, 0.0])
  for filters in ({"top_k": 2}, {"top_p": 0.6}):
    assert set(_many(logits, 500, **filters).ids.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 0.0])
def test_biases_are_added_to_the_logits(temperature):
  bias = {2: 3.0, 9: -4.0, 0: 1.5}
  biased = _LOGITS.copy()
  for token, value in bias.items():
    biased[token] += value
  found = _many(_LOGITS, bias=bias, temperature=temperature)
  if not temperature:
    assert set(found.ids.tolist()) == {int(biased.argmax())}
    return
  p = _softmax(biased / temperature)
  _assert_distributed(found.ids, p)
  own = np.log(_softmax(_LOGITS / temperature))
  np.testing.assert_allclose(found.logp, own[found.ids], atol=1e-5)
  want = np.log(p)[found.ids]
  np.testing.assert_allclose(found.sampled_logp, want, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_drawn(temperature):
  best = np.argsort(-_LOGITS)[:5].tolist()
  bias = dict.fromkeys(best, -np.inf)
  found = _many(_LOGITS, 5000, bias=bias, temperature=temperature)
  assert not set(found.ids.tolist()) & set(best)
  assert np.isfinite(found.sampled_logp).all()
  assert np.isfinite(found.logp).all()
  assert found.finite.all()


def test_impossible_tokens_are_never_drawn():
  logits = np.where(np.arange(16) % 3 == 1, _LOGITS, -np.inf)
  for how in ({}, {"top_k": 9}, {"top_p": 0.999}):
    found = _many(logits, 10_000, **how)
    assert set(found.ids.tolist()) <= {1, 4, 7, 10, 13}
    assert np.isfinite(found.sampled_logp).all()
  only = np.full(16, -np.inf)
  only[5] = 1.0
  found = _many(only, 500)
  assert (found.ids == 5).all()
  assert (found.logp == 0).all()


@pytest.mark.parametrize("how", [{}, {"top_k": 3, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
  "wrong",
  [[np.nan], [np.inf], [np.nan, np.inf, -np.inf], [-np.inf] * 16],
  ids=str,
)
def test_what_is_no_number_is_noticed(wrong, temperature, how):
  logits = np.tile(_LOGITS, (3, 1))
  logits[1, 2 : 2 + len(wrong)] = wrong[:14]
  logits[1, : len(wrong) - 14] = wrong[0]
  found = _draw(
    jnp.asarray(logits), _state(3, temperature=temperature, seed=1, **how)
  )
  np.testing.assert_array_equal(found.finite, [True, False, True])
  assert 0 <= found.ids[1] < 16
  # The others are as they would be.
  assert found.ids[0] == found.ids[2]
  assert np.isfinite(np.asarray(found.logp)[[0, 2]]).all()


def test_extreme_logits_are_numbers():
  logits = np.array([-1e4, 1e4, 0.0, 1e4 - 1, -1e4], np.float32)
  for temperature in (0.1, 1.0, 2.0):
    found = _many(logits, 4000, temperature=temperature)
    assert found.finite.all()
    p = _softmax(logits / temperature)
    _assert_distributed(found.ids, p)
    np.testing.assert_allclose(found.logp, np.log(p[found.ids]), atol=1e-2)


def test_draw_depends_on_seed_and_index_alone():
  random = np.random.default_rng(1)
  logits = jnp.asarray(random.normal(size=(8, 16)), jnp.float32)
  state = _state(
    8,
    temperature=[0.5, 1, 0, 1.2, 1, 0.7, 1, 1],
    seed=random.integers(0, 2**31 - 1, 8, np.int32),
    sampled=random.integers(0, 500, 8, np.int32),
    top_k=[0, 3, 0, 0, 5, 0, 0, 0],
    top_p=[1, 1, 1, 0.8, 1, 1, 1, 1],
  )
  found = jax.device_get(_draw(logits, state))
  # The same requests in other slots, among others.
  order = random.permutation(8)
  moved = _draw(logits[order], jax.tree.map(lambda x: x[order], state))
  for name in ("ids", "logp", "sampled_logp"):
    want = getattr(found, name)[order]
    np.testing.assert_allclose(getattr(moved, name), want, atol=1e-6)
  # And alone: without anyone who filters, by another branch.
  for i in range(8):
    one = _draw(logits[i : i + 1], _part(state, i, i + 1))
    assert one.ids[0] == found.ids[i]
    np.testing.assert_allclose(
      one.sampled_logp, found.sampled_logp[i], atol=1e-6
    )


def test_seeds_and_indices_give_different_draws():
  by_seed = _many(np.zeros(64), 100).ids
  by_index = _many(np.zeros(64), 100, seed=0, sampled=np.arange(_MANY)).ids
  for ids in (by_seed, by_index):
    assert len(set(ids.tolist())) > 30
  assert (by_seed != by_index).any()


def test_guess_of_the_same_logits_is_the_draw():
  for temperature in (0.0, 0.7, 1.0):
    state = _state(_MANY, seed=np.arange(_MANY), temperature=temperature)
    rows = _rows(_LOGITS, _MANY)
    every = jnp.arange(16, dtype=jnp.int32)
    drawn = _draw(rows, state, jnp.int32(2)).ids
    np.testing.assert_array_equal(_guess(rows, every, state, 2), drawn)
    # Of few tokens: the draw, where it is one of them.
    few = jnp.array([3, 4, 8, 11, 15], jnp.int32)
    guessed = np.asarray(_guess(rows[:, few], few, state, 2))
    among = np.isin(drawn, few)
    np.testing.assert_array_equal(guessed[among], np.asarray(drawn)[among])
    assert np.isin(guessed, few).all()


def test_close_distributions_agree_as_often_as_promised():
  other = _LOGITS + 0.3 * np.random.default_rng(3).normal(size=16)
  state = _state(_MANY, seed=np.arange(_MANY))
  every = jnp.arange(16, dtype=jnp.int32)
  drawn = _many(_LOGITS).ids
  guessed = np.asarray(_guess(_rows(other, _MANY), every, state, 0))
  _assert_distributed(guessed, _softmax(other))
  distance = 0.5 * np.abs(_softmax(_LOGITS) - _softmax(other)).sum()
  agreed = (drawn == guessed).mean()
  # Four standard errors.
  assert agreed > (1 - distance) / (1 + distance) - 2 / _MANY**0.5
