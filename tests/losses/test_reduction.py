import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from arl_jax.losses import reduce

_HOW = ("token_mean", "constant_length", "sequence_mean")


@functools.partial(jax.jit, static_argnames="how")
def _reduce(per_token, mask, how, **counts):
  return reduce(per_token, mask, how=how, constant_length=8, **counts)


# 1 and 3 of one row, 5 of another, and a row without trained tokens; the 100
# of a tool token is in nothing.
_TERMS = jnp.array([[1.0, 100.0, 3.0], [100.0, 5.0, jnp.nan], [9.0, 9.0, 9.0]])
_MASK = jnp.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize(
  ("how", "want"),
  [
    ("token_mean", (9.0, 3.0)),
    ("constant_length", (9.0, 3 * 8.0)),  # The empty row counts,
    ("sequence_mean", (2.0 + 5.0, 2.0)),  # and here it doesn't.
  ],
)
def test_numerator_and_denominator_by_hand(how, want):
  assert _reduce(_TERMS, _MASK, how=how) == want
  # Compilers may turn a product with a mask into a selection; without one NaN
  # would stay.
  with jax.disable_jit():
    assert reduce(_TERMS, _MASK, how=how, constant_length=8) == want


def test_counts_of_the_packer_take_the_place_of_rows():
  # The three tokens are one episode, of two in the batch.
  weight = jnp.where(_MASK, 1 / 3, jnp.nan)
  got = _reduce(
    *(_TERMS, _MASK, "sequence_mean"),
    episode_weight=weight,
    episodes=jnp.array(1),
  )
  np.testing.assert_allclose(got, (3.0, 1.0), rtol=1e-6)
  got = _reduce(*(_TERMS, _MASK, "constant_length"), episodes=jnp.array(2))
  assert got == (9.0, 16.0)


@pytest.mark.parametrize("how", _HOW)
def test_nothing_outside_the_mask_has_a_gradient(how):
  def numerator(terms):
    return reduce(terms, _MASK, how=how, constant_length=8)[0]

  slope = jax.grad(numerator)(_TERMS)
  weight = [[0.5, 0, 0.5], [0, 1, 0], [0, 0, 0]]
  want = weight if how == "sequence_mean" else _MASK
  np.testing.assert_array_equal(slope, want)


@pytest.mark.parametrize("how", _HOW)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_trained_is_zero(how, shape):
  nothing = jnp.full(shape, jnp.nan)
  numerator, denominator = _reduce(nothing, nothing > 0, how=how)
  assert numerator == 0
  assert denominator == (8 * shape[0] if how == "constant_length" else 0)


@st.composite
def _partitions(draw):
  shape = (6, 5)
  # Multiples of 1/8: sums of them are exact, however they are made.
  terms = draw(arrays(np.int32, shape, elements=st.integers(-80, 80))) / 8
  mask = draw(arrays(bool, shape))
  part_of = draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
  return terms.astype(np.float32), mask, np.array(part_of)


@pytest.mark.parametrize("how", _HOW)
@settings(max_examples=40, deadline=None)
@given(_partitions())
def test_parts_of_a_batch_add_up_to_it(how, drawn):
  terms, mask, part_of = drawn
  whole = _reduce(terms, mask, how=how)
  parts = [
    _reduce(terms[rows], mask[rows], how=how)
    for rows in (part_of == part for part in set(part_of))
  ]
  numerators, denominators = zip(*parts, strict=True)
  np.testing.assert_allclose(sum(numerators), whole[0], rtol=1e-6, atol=1e-5)
  assert sum(denominators) == whole[1]


@settings(max_examples=40, deadline=None)
@given(_partitions())
def test_parts_of_packed_episodes_add_up(drawn):
  # Episodes of two rows each: parts cut through them.
  terms, mask, part_of = drawn
  trained = mask.reshape(3, -1).sum(-1)
  weight = np.repeat(1 / np.maximum(trained, 1), 2)[:, None] * mask
  given_ = {
    "episode_weight": weight.astype(np.float32),
    "episodes": np.int32((trained > 0).sum()),
  }

  def numerator(rows):
    kept = terms[rows], mask[rows], "sequence_mean"
    cut = {**given_, "episode_weight": given_["episode_weight"][rows]}
    return _reduce(*kept, **cut)[0]

  means = terms.reshape(3, -1).sum(-1, where=mask.reshape(3, -1))
  want = (means / np.maximum(trained, 1)).sum()
  got = sum(numerator(part_of == part) for part in set(part_of))
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_unknown_reduction_is_refused():
  with pytest.raises(ValueError, match="reduction is 'mean', none of"):
    reduce(_TERMS, _MASK, how="mean")


@pytest.mark.parametrize("length", [None, 0, -1])
def test_constant_length_needs_one(length):
  with pytest.raises(ValueError, match=f"constant_length is {length}, not"):
    reduce(_TERMS, _MASK, how="constant_length", constant_length=length)
