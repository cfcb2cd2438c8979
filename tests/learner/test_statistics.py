"""Metrics as sums that parts of a batch add up to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from arl_jax.learner import statistics
from arl_jax.learner.packing import TokenBatch

_SHAPE = (4, 8)


def _batch(mask, behaviour_logp):
  empty = dict.fromkeys(TokenBatch.__dataclass_fields__)
  arrays = {"mask": mask, "behaviour_logp": behaviour_logp}
  return TokenBatch(**{**empty, **arrays})


@jax.jit
def _sums(gap, mask, ratio):
  """Of tokens whose log-probs differ by the gap."""
  behaviour = jnp.zeros(_SHAPE)
  stats = {"ratio": ratio, "clipped": ratio > 1}
  return statistics.of_tokens(gap, stats, _batch(mask, behaviour))


@jax.jit
def _quantile(histogram):
  return statistics.quantile(histogram, 0.99)


# One bin of the histogram: 16 a decade.
_BIN = 10 ** (1 / 16)


@settings(max_examples=60, deadline=None)
@given(
  arrays(np.float32, _SHAPE, elements=st.floats(-6.5, 1.5, width=32)),
  arrays(bool, _SHAPE),
)
def test_quantile_is_that_of_numpy_within_a_bin(exponent, mask):
  gap = (10.0**exponent).astype(np.float32)
  found = _quantile(_sums(gap, mask, gap).added["gap_histogram"])
  if not mask.any():
    assert found == 0
    return
  want = np.quantile(gap[mask], 0.99, method="inverted_cdf")
  assert want / 1.001 <= found <= want * _BIN * 1.001


@pytest.mark.parametrize(
  ("gap", "want"),
  # The smallest edge, the largest one, and what is no number.
  [(0.0, 1e-7 * _BIN), (1e9, 1e2), (np.inf, 1e2), (np.nan, 1e2)],
)
def test_quantile_of_what_lies_beyond_is_at_the_edge(gap, want):
  gaps = np.full(_SHAPE, gap, np.float32)
  mask = np.ones(_SHAPE, bool)
  found = _quantile(_sums(gaps, mask, gaps).added["gap_histogram"])
  assert found == pytest.approx(want, rel=1e-5)


# What comes from elsewhere.
_ADDED = {
  "loss": 3.0,
  "entropy": 6.0,
  "balance": 4.0,
  "z": 2.0,
  "mtp": 10.0,
  "mtp_agree": 1.0,
}
_COUNTS = {"policy": 2.0, "trained": 4.0, "real": 8.0, "drafted": 5.0}


def test_metrics_are_derived_by_hand():
  gap, ratio = np.full((2, *_SHAPE), np.nan, np.float32)
  mask = np.zeros(_SHAPE, bool)
  mask[0, :4] = True
  # log π − log μ; a gap is its size.
  gap[0, :4] = [0.5, -0.25, 0.0, -0.5]
  ratio[0, :4] = [1.0, 2.0, 3.0, 2.0]

  @jax.jit
  def run(sums, added, counts):
    sums = statistics.Sums(added=sums.added | added, largest=sums.largest)
    return [
      statistics.metrics(sums, counts, supervised=supervised)
      for supervised in (False, True)
    ]

  found, learned = run(_sums(gap, mask, ratio), _ADDED, _COUNTS)
  k3 = np.exp(gap[0, :4]) - 1 - gap[0, :4]
  want = {
    "loss": 1.5,
    "entropy": 1.5,
    "ratio": 2.0,
    "ratio_max": 3.0,
    "clipped": 0.75,
    "gap": 1.25 / 4,
    "gap_max": 0.5,
    "gap_p99": 0.5,
    # (1 + 2 + 3 + 2)² / (1 + 4 + 9 + 4).
    "effective_tokens": 64 / 18,
    "kl_k1": 0.25 / 4,
    "kl_k2": 0.5 * (0.25 + 0.0625 + 0.25) / 4,
    "kl_k3": k3.mean(),
    "router_balance": 0.5,
    "router_z": 0.25,
    "mtp_loss": 2.0,
    "mtp_agreement": 0.2,
  }
  assert set(found) == set(want)
  for name, value in want.items():
    assert found[name] == pytest.approx(value, rel=1e-5), name
  names = {"loss", "entropy", "mtp_loss", "mtp_agreement"}
  assert set(learned) == names | {"router_balance", "router_z"}


@pytest.mark.parametrize("weights", [np.ones(32), np.eye(32)[3]])
def test_effective_tokens_of_equal_and_of_one_weight(weights):
  # All of them, or one; however large the weights are.
  ratio = 7 * weights.reshape(_SHAPE).astype(np.float32)
  sums = _sums(ratio, np.ones(_SHAPE, bool), ratio).added
  found = sums["ratio"] ** 2 / sums["ratio_squared"]
  assert found == pytest.approx(weights.sum() ** 2 / (weights**2).sum())


def test_parts_add_up():
  draw = np.random.default_rng(0)
  gap, ratio = draw.exponential(size=(2, *_SHAPE)).astype(np.float32)
  whole = _sums(gap, np.ones(_SHAPE, bool), ratio)
  first = np.broadcast_to(np.arange(4)[:, None] < 1, _SHAPE)
  parts = [_sums(gap, mask, ratio) for mask in (first, ~first)]
  combined = statistics.combine(*parts)
  for a, b in zip(*map(jax.tree.leaves, (combined, whole)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
  "stats",
  [
    {},
    {"ratio": jnp.ones(_SHAPE)},
    {"ratio": jnp.ones(_SHAPE), "clipped": jnp.ones(4)},
  ],
)
def test_loss_without_its_stats_is_refused(stats):
  part = _batch(jnp.ones(_SHAPE, bool), jnp.zeros(_SHAPE))
  with pytest.raises(ValueError, match="must hold 'ratio' and 'clipped'"):
    statistics.of_tokens(jnp.zeros(_SHAPE), stats, part)
