"""Values of independent float64 code, printed with nine decimals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import losses

# Name among the expected values -> loss, reduction.
_GOLDEN = {
  "cispo": ("cispo", "token_mean"),
  "cispo_two_sided": ("cispo", "token_mean"),
  "grpo_clip_token_mean": ("grpo", "token_mean"),
  "grpo_clip_constant_length": ("grpo", "constant_length"),
  "grpo_clip_sequence_mean": ("grpo", "sequence_mean"),
  "policy_gradient": ("policy_gradient", "token_mean"),
  "kimi_k2_5": ("kimi_k2_5", "token_mean"),
  "gspo": ("gspo", "sequence_mean"),
}
_BATCHES = range(3)
_PRECISION = pytest.mark.parametrize(
  ("dtype", "tolerance"), [("float64", 1e-6), ("float32", 1e-5)]
)
_PRINTED = 1e-9


def test_every_expected_value_is_tested(read):
  batches = read("policy_losses")
  assert len(batches) == len(_BATCHES)
  for each in batches:
    assert set(each["expected"]) == {*_GOLDEN, "kl_to_reference"}


@pytest.mark.parametrize("name", _GOLDEN)
@pytest.mark.parametrize("i", _BATCHES)
@_PRECISION
def test_value_and_gradient(
  run, read, batch, padded, name, i, dtype, tolerance
):
  data = read("policy_losses")[i]
  want = data["expected"][name]
  loss, how = _GOLDEN[name]
  hyper, counts = dict(want["hyperparameters"]), {}
  reduction = {"how": how}
  if how == "constant_length":
    reduction["constant_length"] = hyper.pop("constant_length")
    # Rows that only pad the batch are no episodes.
    counts["episodes"] = np.int32(len(data["mask"]))
  with jax.enable_x64(dtype == "float64"):
    got = run(
      loss, *batch(i, dtype), hyper=hyper, reduction=reduction, counts=counts
    )
  assert got.value.dtype == got.gradient.dtype == dtype
  assert got.denominator == want["denominator"]
  for a, b in (
    (got.value, want["numerator"]),
    (got.value / got.denominator, want["loss"]),
    (got.gradient, padded(want["grad_numerator"])),
  ):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=_PRINTED)


@pytest.mark.parametrize("i", _BATCHES)
@_PRECISION
def test_kl_to_reference(read, batch, padded, i, dtype, tolerance):
  data = read("policy_losses")[i]
  logp, _, _, mask = batch(i, dtype)
  with jax.enable_x64(dtype == "float64"):
    reference = padded(data["reference_logp"], dtype)
    found = jax.jit(losses.kl_estimates)(logp, reference, mask)
    found = jax.device_get(found)
  assert set(found) == set(data["expected"]["kl_to_reference"])
  for name, want in data["expected"]["kl_to_reference"].items():
    assert found[name].dtype == dtype
    np.testing.assert_allclose(
      found[name].sum(), want["numerator"], rtol=tolerance, atol=_PRINTED
    )
    assert mask.sum() == want["denominator"]


# Worked numbers that other projects publish in their own tests.


@pytest.fixture
def peer(read):
  entries = read("peer_values")
  assert len(entries) == 8
  return lambda name: next(e for e in entries if e["name"] == name)


def _row(*values):
  return [jnp.array([value], jnp.float32) for value in values]


def _bounds(entry):
  return {name: entry[name] for name in ("ratio_min", "ratio_max")}


@pytest.mark.parametrize(
  ("name", "loss"),
  [("PPO-clip, three tokens", "grpo"), ("CISPO, same tokens", "cispo")],
)
def test_three_tokens_of_a_peer(run, peer, name, loss):
  entry = peer(name)
  want = entry["expected"]
  logp, behaviour, advantage = _row(
    entry["logp"], entry["behaviour_logp"], entry["advantage"]
  )
  mask = jnp.ones((1, 3), bool)
  got = run(loss, logp, behaviour, advantage, mask, hyper=_bounds(entry))
  near = {"rtol": 0, "atol": entry["tolerance"]}
  np.testing.assert_allclose(got.value / got.denominator, want["mean"], **near)
  if "ratio" in want:
    np.testing.assert_allclose(got.ratio[0], want["ratio"], **near)
  if "per_token" in want:
    np.testing.assert_allclose(got.per_token[0], want["per_token"], **near)


def test_cispo_with_gradient_of_a_peer(run, peer):
  entry = peer("CISPO with gradient")
  logp, ratio, advantage = _row(
    entry["logp"], entry["ratio"], entry["advantage"]
  )
  behaviour, mask = logp - jnp.log(ratio), jnp.ones((1, 4), bool)
  got = run("cispo", logp, behaviour, advantage, mask, hyper=_bounds(entry))
  want = entry["expected"]
  near = {"rtol": entry["tolerance"]}
  np.testing.assert_allclose(got.per_token[0], want["per_token"], **near)
  np.testing.assert_allclose(got.gradient[0], want["grad_logp"], **near)


def test_truncated_importance_of_a_peer(peer):
  entry = peer("truncated importance weights")
  own, sampler = _row(entry["learner_old_logp"], entry["sampler_logp"])
  mask = jnp.ones((1, 3), bool)
  weight = losses.truncated_importance(
    own, sampler, mask, importance_max=entry["cap"]
  )
  want, near = entry["expected"], {"rtol": 0, "atol": entry["tolerance"]}
  np.testing.assert_allclose(weight[0], want["token"], **near)
  # That of the whole sequence is the product of those of its tokens.
  loose = losses.truncated_importance(own, sampler, mask, importance_max=100.0)
  np.testing.assert_allclose(loose.prod(), want["sequence_uncapped"], **near)


def test_leave_one_out_of_peers(peer):
  entry = peer("leave-one-out")
  for rewards, want in zip(entry["groups"], entry["expected"], strict=True):
    got = losses.group_advantages(np.array(rewards), baseline="leave_one_out")
    np.testing.assert_allclose(got, want, rtol=0, atol=entry["tolerance"])


@pytest.mark.parametrize(
  "how", ["token_mean", "sequence_mean", "constant_length"]
)
def test_reduction_of_a_peer(peer, how):
  entry = peer("reductions")
  (case,) = (c for c in entry["cases"] if c["how"] == how)
  numerator, denominator = losses.reduce(
    jnp.array(case["loss"], jnp.float32),
    jnp.array(case["mask"]),
    how=how,
    constant_length=case.get("constant_length"),
  )
  np.testing.assert_allclose(
    numerator / denominator, case["expected"], rtol=entry["tolerance"]
  )


def test_microbatches_of_a_peer(peer):
  entry = peer("microbatches")
  parts = [
    losses.reduce(row, jnp.ones_like(row))
    for values in entry["microbatches"]
    for row in _row(values)
  ]
  numerator, denominator = (sum(x) for x in zip(*parts, strict=True))
  assert numerator / denominator == entry["expected"]["global_token_mean"]
  wrong = np.mean([n / d for n, d in parts])
  assert wrong == entry["expected"]["wrong_mean_of_means"]


def test_kl_with_a_nan_outside_the_mask_of_a_peer(peer):
  entry = peer("KL with a NaN outside the mask")
  logp, reference = (
    jnp.array([[np.nan if x is None else x for x in entry[name]]])
    for name in ("logp", "reference_logp")
  )
  found = losses.kl_estimates(logp, reference, jnp.array([entry["mask"]]))
  assert {float(x.sum()) for x in found.values()} == {entry["expected"]}
