"""Other policies that an update is made with, and other arithmetic."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import losses
from arl_jax.model import token_logprobs


@pytest.fixture(scope="module")
def logp(model, experiences):
  """Parameters -> log-probs of all trained tokens, in order."""
  segments = [s for e in experiences for s in e.segments]
  ids, mask = np.zeros((2, len(segments), 16), np.int32)
  heat = np.ones(ids.shape, np.float32)
  for i, segment in enumerate(segments):
    ids[i, : len(segment)] = segment.ids
    mask[i, : len(segment)] = segment.trained
    heat[i] = segment.temperature

  @jax.jit
  def score(params):
    rows, temperature = jnp.asarray(ids), jnp.asarray(heat)
    return token_logprobs(params, model, rows, temperature=temperature)[0]

  return lambda params: np.asarray(score(params))[mask > 0]


@pytest.fixture(scope="module")
def updated(model, learner_of, experiences):
  """Parameters and metrics after a plain step."""
  learner = learner_of(model)
  metrics = learner.step(experiences)
  return jax.device_get(learner.state.params), metrics


def _flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def test_proximal_policy_is_the_one_before_the_first_substep(
  params, model, learner_of, experiences, logp
):
  def recording(logp, behaviour_logp, advantage, mask, *, proximal_logp=None):
    """Metrics: the two log-probs in place of ratio and clipped."""
    per_token, _ = losses.grpo(
      logp, behaviour_logp, advantage, mask, proximal_logp=proximal_logp
    )
    return per_token, {"ratio": proximal_logp, "clipped": logp}

  learner = learner_of(model, own=recording, proximal=True)
  metrics = learner.step(experiences, substeps=2)
  assert learner.state.step == 2
  before = logp(params).mean()
  assert metrics["ratio"] == pytest.approx(before, rel=1e-5)
  # The second part was trained by a policy that had moved.
  assert abs(metrics["clipped"] - before) > 0.1
  # The next step begins where this one ended.
  between = logp(learner.state.params).mean()
  metrics = learner.step(experiences)
  for name in ("ratio", "clipped"):
    assert metrics[name] == pytest.approx(between, rel=1e-4)


def test_behaviour_policy_is_the_recorded_one_in_every_substep(
  params, model, learner_of, experiences
):
  def recording(logp, behaviour_logp, advantage, mask):
    per_token, stats = losses.cispo(logp, behaviour_logp, advantage, mask)
    return per_token, {**stats, "ratio": behaviour_logp}

  learner = learner_of(model, own=recording)
  metrics = learner.step(experiences, substeps=2)
  segments = [s for e in experiences for s in e.segments]
  recorded = np.concatenate([s.behaviour_logp[s.trained] for s in segments])
  assert metrics["ratio"] == pytest.approx(recorded.mean(), rel=1e-5)


@pytest.fixture(scope="module")
def given(params):
  """Arrays of the caller's: a policy and its reference."""
  policy = jax.tree.map(jnp.array, params)
  return policy, jax.tree.map(lambda x: 0.8 * x, policy)


@pytest.fixture(scope="module")
def held(model, given, learner_of, experiences):
  """KL form, weight -> learner after a step, its parameters and metrics."""

  @functools.cache
  def update(form, weight=0.3):
    learner = learner_of(
      model,
      loss="policy_gradient",
      params=given[0],
      reference=given[1],
      kl_form=form,
      kl_weight=weight,
    )
    metrics = learner.step(experiences)
    return learner, jax.device_get(learner.state.params), metrics

  return update


def test_kl_in_the_reward_and_in_the_loss_are_one_gradient(
  held, given, logp, assert_close
):
  # Of −(A − w k1) log π and of w k2: w k1 ∇log π in both, on any batch.
  _, reward, metrics = held("reward")
  _, in_loss, others = held("loss")
  assert_close(reward, in_loss)
  _, free, _ = held("loss", 0.0)
  change = _flat(reward) - _flat(free)
  assert np.linalg.norm(change) > 1e-2 * np.linalg.norm(_flat(free))
  # Estimates are of KL(π_θ ‖ π_ref), means over trained tokens.
  log_ratio = logp(given[1]) - logp(given[0])
  for name, want in (
    ("k1", -log_ratio),
    ("k2", 0.5 * log_ratio**2),
    ("k3", np.exp(log_ratio) - 1 - log_ratio),
  ):
    for found in (metrics, others):
      got = found[f"reference_kl_{name}"]
      assert got == pytest.approx(want.mean(), rel=1e-4)


@pytest.mark.parametrize("form", ["reward", "loss"])
def test_reference_and_the_callers_policies_never_change(
  held, given, params, experiences, form
):
  learner, _, first = held(form)
  second, third = (learner.step(experiences) for _ in range(2))
  assert third["compilations"] == second["compilations"]
  assert second["reference_kl_k2"] != first["reference_kl_k2"]
  kept = learner.contents["reference"]
  for policy, reference, own, want in zip(
    *map(jax.tree.leaves, (*given, kept, params)), strict=True
  ):
    np.testing.assert_array_equal(policy, want)
    np.testing.assert_array_equal(reference, np.float32(0.8) * want)
    np.testing.assert_array_equal(own, reference)


def test_without_a_reference_there_is_no_kl_to_it(updated):
  assert not any(name.startswith("reference") for name in updated[1])


def test_supervised_loss_has_no_sampler_to_compare_with(
  model, learner_of, experiences, logp, params
):
  learner = learner_of(model, loss="sft")
  metrics = learner.step(experiences)
  assert not {
    name
    for name in metrics
    if name.startswith(("ratio", "gap", "kl", "clipped", "effective"))
  }
  weights = np.repeat(
    [e.advantage for e in experiences], [e.trained_tokens for e in experiences]
  )
  want = -(weights * logp(params)).mean()
  assert metrics["loss"] == pytest.approx(want, rel=1e-5)
  assert metrics["entropy"] > 0


@pytest.mark.parametrize("remat", ["block", "dots"])
def test_recomputing_changes_no_gradient(
  model, learner_of, experiences, updated, assert_close, remat
):
  # What `updated` computes keeps everything: "none".
  assert model.remat == "none"
  learner = learner_of(dataclasses.replace(model, remat=remat))
  metrics = learner.step(experiences)
  assert_close(learner.state.params, updated[0])
  assert metrics["grad_norm"] == pytest.approx(
    updated[1]["grad_norm"], rel=1e-5
  )


def test_bfloat16_compute_moves_float32_weights_much_the_same(
  model, params, learner_of, experiences, updated
):
  learner = learner_of(model, compute_dtype="bfloat16")
  metrics = learner.step(experiences)
  dtypes = {x.dtype.name for x in jax.tree.leaves(learner.state.params)}
  assert dtypes == {"float32"}
  before = _flat(params)
  moved = _flat(learner.state.params) - before
  wanted = _flat(updated[0]) - before
  # bfloat16 has 8 bits; a few products deep, directions agree closely.
  cosine = moved @ wanted / np.linalg.norm(moved) / np.linalg.norm(wanted)
  assert cosine > 0.98
  assert metrics["entropy"] == pytest.approx(updated[1]["entropy"], rel=0.05)
  assert metrics["entropy"] != updated[1]["entropy"]
