import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.evaluation.statistics import (
  Interval,
  bootstrap_mean,
  bootstrap_ratio,
  paired_difference,
)


def test_mean_interval_is_that_of_the_normal_limit():
  # Standard error of the mean of 400 values with (population) standard
  # deviation s: s / 20; 95 % lie within 1.96 of them.
  values = np.random.default_rng(0).normal(2.0, 3.0, 400)
  interval = bootstrap_mean(values, seed=1, resamples=20_000)
  half = 1.96 * values.std() / 20
  assert interval.mean == pytest.approx(values.mean())
  assert interval.low == pytest.approx(values.mean() - half, abs=0.05 * half)
  assert interval.high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_coverage_is_near_the_confidence():
  # 200 samples of size 50 with mean 0: 95 % of intervals should hold 0; the
  # standard deviation of that share is sqrt(.95 * .05 / 200) = 1.5 %.
  generator = np.random.default_rng(0)
  held = 0
  for seed in range(200):
    i = bootstrap_mean(generator.normal(size=50), seed=seed, resamples=500)
    held += i.low <= 0 <= i.high
  assert 0.90 <= held / 200 <= 0.99


def test_same_seed_same_interval():
  values = np.arange(50.0)
  assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3)
  assert bootstrap_mean(values, seed=3) != bootstrap_mean(values, seed=4)


def test_blocks_do_not_change_the_result(monkeypatch):
  values = np.random.default_rng(0).normal(size=37)
  whole = bootstrap_mean(values, seed=0)
  monkeypatch.setattr("arl_jax.evaluation.statistics._BLOCK", 37 * 7)
  assert bootstrap_mean(values, seed=0) == whole


def test_weights_weigh():
  # (1 * 1 + 3 * 3) / 4
  interval = bootstrap_mean([1.0, 3.0], seed=0, weights=[1.0, 3.0])
  assert interval == Interval(2.5, 1.0, 3.0)
  equal = bootstrap_mean([1.0, 3.0, 4.0], seed=0, weights=[2.0, 2.0, 2.0])
  assert equal.to_json() == pytest.approx(
    bootstrap_mean([1.0, 3.0, 4.0], seed=0).to_json()
  )


def test_ratio_is_of_sums_not_the_mean_of_ratios():
  # (1 + 0 + 5) / (2 + 0 + 10) = 0.5, each task's own ratio being 1/2 or 0/0.
  interval = bootstrap_ratio([1, 0, 5], [2, 0, 10], seed=0)
  assert interval == Interval(0.5, 0.5, 0.5)
  # (9 + 0) / (10 + 90)
  assert bootstrap_ratio([9, 0], [10, 90], seed=0).mean == pytest.approx(0.09)


def test_ratio_without_denominators_is_null():
  interval = bootstrap_ratio([0, 0], [0, 0], seed=0)
  assert math.isnan(interval.mean)
  assert interval.to_json() == [None, None, None]


def test_paired_difference_sees_what_unpaired_intervals_hide():
  generator = np.random.default_rng(0)
  before = generator.normal(0.0, 10.0, 200)
  after = before + generator.normal(0.5, 1.0, 200)
  difference = paired_difference(before, after, seed=0)
  # Standard error 1 / sqrt(200) = 0.07 of the difference, 0.7 of each mean.
  change = after - before
  half = 1.96 * change.std() / 200**0.5
  assert difference.mean == pytest.approx(change.mean())
  assert difference.low == pytest.approx(change.mean() - half, abs=0.1 * half)
  assert difference.high == pytest.approx(change.mean() + half, abs=0.1 * half)
  assert difference.low > 0
  unpaired = bootstrap_mean(after, seed=0)
  assert unpaired.low < before.mean() < unpaired.high


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_interval_lies_within_the_values(values):
  interval = bootstrap_mean(values, seed=0, resamples=50)
  slack = 1e-9 * max(1.0, *map(abs, values))
  assert min(values) - slack <= interval.low <= interval.high
  assert interval.high <= max(values) + slack


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: bootstrap_mean([], seed=0), r"values has shape \[0\]"),
    (lambda: bootstrap_mean([[1.0]], seed=0), r"values has shape \[1, 1\]"),
    (lambda: bootstrap_mean([0, math.nan], seed=0), r"values\[1\] is nan"),
    (lambda: bootstrap_mean([1], seed=0, weights=[-1]), r"weights\[0\] is -1"),
    (lambda: bootstrap_mean([1], seed=0, resamples=0), "resamples 0"),
    (lambda: bootstrap_mean([1], seed=0, confidence=95), "confidence 95"),
    (lambda: bootstrap_ratio([1], [1, 2], seed=0), "denominators has 2"),
    (lambda: bootstrap_ratio([1], [-1], seed=0), r"denominators\[0\] is -1"),
    (lambda: paired_difference([1], [1, 2], seed=0), "after has 2 entries"),
  ],
)
def test_bad_input_is_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()
