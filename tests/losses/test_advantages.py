import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.losses import group_advantages, has_signal

_TESTDATA = pathlib.Path(__file__).parents[1] / "testdata" / "losses"

# From independent float64 code, printed with nine decimals.
_GROUPS = json.loads((_TESTDATA / "advantages.json").read_text())


@pytest.mark.parametrize("group", _GROUPS, ids=lambda g: str(g["rewards"]))
def test_advantages_are_those_of_independent_code(group):
  rewards = np.array(group["rewards"], float)
  assert has_signal(rewards) == group["informative"]
  np.testing.assert_allclose(
    group_advantages(rewards), group["mean_centred"], atol=2e-9
  )
  np.testing.assert_allclose(
    group_advantages(rewards, baseline="leave_one_out"),
    group["leave_one_out"],
    atol=2e-9,
  )
  scaled = group_advantages(rewards, normalise_std=True)
  want = np.array(group["mean_centred"]) / (group["std_population"] + 1e-6)
  want = want if group["informative"] else np.zeros_like(rewards)
  np.testing.assert_allclose(scaled, want, atol=1e-7)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("normalise_std", [False, True])
def test_group_of_one_has_no_advantage(baseline, normalise_std):
  got = group_advantages(
    np.array([3.0]), baseline=baseline, normalise_std=normalise_std
  )
  np.testing.assert_array_equal(got, [0.0])


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_noise_is_not_a_signal(baseline):
  # Differences of 1e-9 over a standard deviation of 5e-10 would be ±1.
  rewards = 0.7 + np.array([0.0, 1e-9, -1e-9, 5e-10])
  assert not has_signal(rewards)
  got = group_advantages(rewards, baseline=baseline, normalise_std=True)
  np.testing.assert_array_equal(got, np.zeros(4))


def test_empty_group():
  assert group_advantages(np.zeros(0)).shape == (0,)
  assert not has_signal(np.zeros(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused(bad):
  with pytest.raises(ValueError, match="not all finite"):
    group_advantages(np.array([0.0, bad]))


def test_unknown_baseline_is_refused():
  with pytest.raises(ValueError, match="'median'"):
    group_advantages(np.zeros(2), baseline="median")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16))
def test_advantages_are_centred_and_bounded(rewards):
  rewards = np.array(rewards)
  n = len(rewards)
  plain = group_advantages(rewards)
  np.testing.assert_allclose(plain.sum(), 0, atol=1e-9)
  others = np.array([np.delete(rewards, i).mean() for i in range(n)])
  np.testing.assert_allclose(
    group_advantages(rewards, baseline="leave_one_out"),
    rewards - others,
    atol=1e-9,
  )
  # |r − r̄| ≤ sqrt(n − 1) standard deviations, whatever the rewards.
  scaled = group_advantages(rewards, normalise_std=True)
  assert np.abs(scaled).max() <= np.sqrt(n - 1) + 1e-9
