"""Corrections for a sampler unlike the learner, derived by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import losses

# Tokens of one row: log(π/proximal), log(proximal/μ), A; all of logp −2.
_LOG_RATIO = np.array([0.1, 0.1, -0.1, 1.0, 1.0, -1.0], np.float32)
_GAP = np.array([math.log(1.5), 1.0, -1.0, -1.0, 3.0, 0.0], np.float32)
_ADVANTAGE = np.array([1.0, 2.0, -1.0, 0.5, -0.5, -1.0], np.float32)
# min(proximal/μ, 2); π/μ would be another number for each.
_WEIGHT = np.array([1.5, 2.0, 1 / np.e, 1 / np.e, 2.0, 1.0])
_ALL = np.ones((1, 6), bool)


def _arrays():
  logp = np.full((1, 6), -2.0, np.float32)
  proximal = logp - _LOG_RATIO
  return (logp, proximal - _GAP, _ADVANTAGE[None], _ALL), proximal


def _expected(loss):
  """Term and its derivative by logp, before the weight."""
  ratio, a = np.exp(_LOG_RATIO.astype(float)), _ADVANTAGE
  if loss == "cispo":  # ρ <= 5: no bound holds.
    return 2 * ratio * a, -ratio * a
  if loss == "policy_gradient":
    return 2 * a, -a
  if loss == "kimi_k2_5":
    # ρ = e^±1 lies outside 0.8 … 1.25, where only 2 τ log ρ is left.
    inside = np.array([1, 1, 1, 0, 0, 0])
    pull = 1e-3 * _LOG_RATIO
    return (
      -np.clip(ratio, 0.8, 1.25) * a + pull * _LOG_RATIO,
      -inside * ratio * a + 2 * pull,
    )
  if loss == "grpo":
    # e^1 with A > 0 stops at 1.2, e^−1 with A < 0 at 0.8.
    bounded = np.array([0, 0, 0, 1, 0, 1])
    clipped = np.where(bounded, np.clip(ratio, 0.8, 1.2), ratio)
    return -clipped * a, -(1 - bounded) * ratio * a
  # GSPO, of a segment each: its bounds stop ρ > 1 with A > 0, ρ < 1 with A < 0.
  bounded = np.array([1, 1, 1, 1, 0, 1])
  clipped = np.where(bounded, np.clip(ratio, 1 - 3e-4, 1 + 4e-4), ratio)
  return -clipped * a, -(1 - bounded) * ratio * a


_SEGMENTS = np.arange(6, 0, -1, dtype=np.int32)[None]


def test_proximal_takes_the_samplers_place_and_is_made_up_for(run, loss):
  arrays, proximal = _arrays()
  got = run(loss, *arrays, proximal_logp=proximal, segment_ids=_SEGMENTS)
  term, slope = _expected(loss)
  np.testing.assert_allclose(got.per_token[0], _WEIGHT * term, rtol=1e-5)
  np.testing.assert_allclose(
    got.gradient[0], _WEIGHT * slope, rtol=1e-5, atol=1e-9
  )
  # The ratio that is reported is the one that is bounded.
  np.testing.assert_allclose(got.ratio[0], np.exp(_LOG_RATIO), rtol=1e-6)


def test_cap_of_the_weight_is_a_hyperparameter(run, loss):
  arrays, proximal = _arrays()
  optional = {"proximal_logp": proximal, "segment_ids": _SEGMENTS}
  got = run(loss, *arrays, hyper={"importance_max": 3.0}, **optional)
  weight = np.minimum(np.exp(_GAP.astype(float)), 3.0)
  term, _ = _expected(loss)
  np.testing.assert_allclose(got.per_token[0], weight * term, rtol=1e-5)


def test_no_gradient_reaches_proximal_or_behaviour(loss):
  arrays, proximal = _arrays()
  loss_fn = getattr(losses, loss)

  def total(proximal, behaviour):
    logp, _, *rest, ids = map(jnp.asarray, (*arrays, _SEGMENTS))
    given = {"proximal_logp": proximal, "segment_ids": ids}
    return loss_fn(logp, behaviour, *rest, **given)[0].sum()

  for slope in jax.jit(jax.grad(total, (0, 1)))(proximal, arrays[1]):
    assert not slope.any()


@pytest.mark.parametrize("i", [0, 1, 2])
def test_proximal_equal_to_the_sampler_changes_nothing(run, batch, loss, i):
  arrays = batch(i)
  want = run(loss, *arrays)
  got = run(loss, *arrays, proximal_logp=arrays[1])
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)


def test_truncated_importance_is_a_constant():
  # e^0.5, the cap, e^−1, and a token that isn't trained.
  own = np.array([[-1.0, -1.0, -2.0, np.nan]], np.float32)
  sampler = np.array([[-1.5, -9.0, -1.0, np.nan]], np.float32)
  mask = np.array([[1, 1, 1, 0]])

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
  def slopes(own, sampler, mask):
    weight = losses.truncated_importance(own, sampler, mask)
    return weight.sum(), weight

  found, weight = slopes(own, sampler, mask)
  want = [[math.exp(0.5), 2.0, math.exp(-1), 0.0]]
  np.testing.assert_allclose(weight, want, rtol=1e-6)
  assert not np.any(found)


_icepop_weight = jax.jit(
  losses.icepop_weight, static_argnames=("importance_min", "importance_max")
)


def test_icepop_drops_tokens_on_which_the_two_disagree():
  ratio = np.array([[0.49, 0.51, 1.0, 4.9, 5.1, np.nan]], np.float32)
  mask = np.array([[1, 1, 1, 1, 1, 0]])
  sampler = np.where(mask > 0, np.float32(-7.0), np.float32(np.inf))
  weight = _icepop_weight(sampler + np.log(ratio), sampler, mask)
  np.testing.assert_array_equal(weight, [[0, 1, 1, 1, 0, 0]])
  assert weight.dtype == np.float32


def test_icepop_bounds_are_kept():
  # A ratio of exactly 1, then a hair above and below.
  own = np.array([[-1.0, -1.0 + 1e-6, -1.0 - 1e-6]], np.float32)
  weight = _icepop_weight(
    *(own, np.full_like(own, -1.0), np.ones((1, 3), bool)),
    importance_min=1.0,
    importance_max=1.0,
  )
  np.testing.assert_array_equal(weight, [[1, 0, 0]])


# Two segments of a row, then padding: means of log(μ/π) over trained tokens
# are (0.5 + 0.25) / 2 = 0.375 and 1.0; all numbers are exact.
_SEQ_GAP = np.array([[0.5, np.nan, 0.25, 1.0, np.inf]], np.float32)
_SEQ_MASK = np.array([[1, 0, 1, 1, 0]])
_SEQ_IDS = np.array([[2, 2, 2, 1, 0]])


@functools.partial(jax.jit, static_argnums=1)
def _sequence_weight(advantage, log_gap_max, segment_ids):
  logp = jnp.full((1, 5), -3.0)
  return losses.sequence_weight(
    *(logp, logp + _SEQ_GAP, advantage, jnp.asarray(_SEQ_MASK)),
    log_gap_max=log_gap_max,
    segment_ids=segment_ids,
  )


@pytest.mark.parametrize(
  ("log_gap_max", "want"),
  [
    (0.25, [0, 0, 0, 0, 0]),
    (0.375, [1, 0, 1, 0, 0]),  # Not above the bound.
    (1.0, [1, 0, 1, 1, 0]),
  ],
)
def test_sequence_that_became_unlikely_is_dropped(log_gap_max, want):
  weight = _sequence_weight(
    np.full((1, 5), -1.0, np.float32), log_gap_max, _SEQ_IDS
  )
  np.testing.assert_array_equal(weight, [want])


def test_sequence_is_dropped_for_a_negative_advantage_only():
  # The second sequence is as unlikely, but it was good, or neutral.
  for second in (1.0, 0.0):
    advantage = np.array([[-1, np.nan, -1, second, np.nan]], np.float32)
    weight = _sequence_weight(advantage, 0.25, _SEQ_IDS)
    np.testing.assert_array_equal(weight, [[0, 0, 0, 1, 0]])


def test_row_is_a_sequence_without_segments():
  # The mean of all three, 7/12, decides for all; advantage [B].
  for bound, kept in ((0.58, 0), (0.59, 1)):
    weight = _sequence_weight(np.array([-1.0], np.float32), bound, None)
    np.testing.assert_array_equal(weight, kept * _SEQ_MASK)


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_without_a_trained_token_have_no_weight(rows, packed):
  nothing = np.full((rows, 3), np.nan, np.float32)
  ids = np.zeros((rows, 3), np.int32) if packed else None

  @jax.jit
  def weights(x, none, ids):
    sequence = losses.sequence_weight(
      *(x, x, x, none), log_gap_max=0.1, segment_ids=ids
    )
    return (
      sequence,
      losses.icepop_weight(x, x, none),
      losses.truncated_importance(x, x, none),
    )

  for weight in weights(nothing, nothing > 0, ids):
    np.testing.assert_array_equal(weight, np.zeros((rows, 3)))


def test_sequence_weight_is_a_constant():
  @jax.jit
  @jax.grad
  def slope(logp):
    arrays = (logp, logp + 0.5, -jnp.ones((1, 5)), jnp.asarray(_SEQ_MASK))
    return losses.sequence_weight(*arrays, log_gap_max=0.3).sum()

  assert not slope(np.full((1, 5), -3.0, np.float32)).any()


# GSPO: three segments of a row, numbered anyhow, with holes in the mask.
_LENGTHS = (3, 1, 4)
_IDS = np.array([[7] * 3 + [2] + [5] * 4 + [0] * 2], np.int32)
_MASK = np.array([[1, 0, 1, 1, 0, 1, 1, 0, 0, 0]], bool)
_BOUNDS = {"ratio_min": 0.9, "ratio_max": 1.1}


def _packed():
  draw = np.random.default_rng(0)
  logp = draw.uniform(-3, -1, (1, 10)).astype(np.float32)
  # One ratio within the bounds, one held, and one not, for its sign.
  mean = np.repeat([[0.05, 0.6, 0.6, 0.0]], [*_LENGTHS, 2], 1)
  log_ratio = mean + draw.uniform(-0.02, 0.02, (1, 10))
  advantage = np.repeat([[1.0, 2.0, -1.5, np.nan]], [*_LENGTHS, 2], 1)
  return (
    logp,
    (logp - log_ratio).astype(np.float32),
    advantage.astype(np.float32),
  )


def test_gspo_ratio_is_the_geometric_mean_of_a_segment(run):
  logp, behaviour, advantage = _packed()
  got = run(
    "gspo", logp, behaviour, advantage, _MASK, hyper=_BOUNDS, segment_ids=_IDS
  )
  log_ratio = (logp - behaviour)[0].astype(float)
  first, second = (log_ratio[0] + log_ratio[2]) / 2, log_ratio[3]
  third = (log_ratio[5] + log_ratio[6]) / 2
  means = np.repeat([first, second, third, 0], [*_LENGTHS, 2])
  want = np.where(_MASK[0], np.exp(means), 0)
  np.testing.assert_allclose(got.ratio[0], want, rtol=1e-5)
  # The term stands at each trained token; dρ/dlogp = ρ / trained tokens of
  # the segment, through each of its two or one terms.
  one, three = np.exp(first), np.exp(third)
  values = [-one, 0, -one, -2.2, 0, 1.5 * three, 1.5 * three, 0, 0, 0]
  slopes = [-one, 0, -one, 0, 0, 1.5 * three, 1.5 * three, 0, 0, 0]
  np.testing.assert_allclose(got.per_token[0], values, rtol=1e-5)
  np.testing.assert_allclose(got.gradient[0], slopes, rtol=1e-5)
  np.testing.assert_array_equal(got.clipped[0], [0, 0, 0, 1, *[0] * 6])


def _alone(x):
  """Each segment in a row of its own, [3, 10]."""
  x, rows, at = np.asarray(x), [], 0
  for n in _LENGTHS:
    rows.append(np.pad(x[0, at : at + n], (0, 10 - n)))
    at += n
  return np.stack(rows)


def test_packed_segments_are_rows_of_their_own(run, loss):
  arrays = (*_packed(), _MASK)
  proximal = arrays[1] + np.float32(0.1)
  packed = run(loss, *arrays, segment_ids=_IDS, proximal_logp=proximal)
  # Of one segment each, so that nothing need say so.
  rows = run(loss, *map(_alone, arrays), proximal_logp=_alone(proximal))
  np.testing.assert_allclose(packed.value, rows.value, rtol=1e-6)
  for a, b in zip(packed[2:], rows[2:], strict=True):
    np.testing.assert_allclose(_alone(a), b, rtol=1e-6)


@pytest.mark.parametrize("poison", [1e4, -1e4, np.nan])
def test_neighbours_in_a_row_don_t_matter(run, loss, poison):
  logp, behaviour, advantage = _packed()
  own = _IDS == 5
  # Neighbours with absurd values; those that are no numbers aren't trained.
  mask = _MASK & own if np.isnan(poison) else _MASK
  bad = np.where(own, logp, np.float32(poison))
  want = run(loss, logp, behaviour, advantage, _MASK, segment_ids=_IDS)
  got = run(loss, bad, behaviour, advantage, mask, segment_ids=_IDS)
  for a, b in zip(got[2:], want[2:], strict=True):
    np.testing.assert_array_equal(a[own], b[own])
