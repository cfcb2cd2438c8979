"""What an update minimises, put together by hand from its parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from arl_jax import losses
from arl_jax.learner import StepConfig, objective, pack


@pytest.fixture(scope="module")
def batch(experiences):
  """Four rows, with made-up log-probs of other policies."""
  found, _ = pack(experiences, row_length=16, microbatch_rows=4)
  draw = np.random.default_rng(0)
  made_up = draw.uniform(-6, -2, (2, *found.ids.shape)).astype(np.float32)
  return found.replace(proximal_logp=made_up[0], reference_logp=made_up[1])


def _part(batch):
  return jax.tree.map(lambda x: jnp.asarray(x[0] if x.ndim else x), batch)


@pytest.mark.parametrize(
  ("reduction", "policy"),
  [("token_mean", None), ("sequence_mean", 4), ("constant_length", 5 * 8)],
)
def test_denominators_are_counts_of_the_whole_batch(batch, reduction, policy):
  config = StepConfig(reduction=reduction, constant_length=8, mtp_share=0.5)
  found = objective.denominators(batch, config)
  # Half of the rows: entries t and t+2 of one segment, and t+2 is trained.
  drafted = 0
  for ids, mask in zip(
    batch.segment_ids[0, :2], batch.mask[0, :2], strict=True
  ):
    drafted += sum(ids[t] == ids[t + 2] and mask[t + 2] for t in range(14))
  trained = batch.mask.sum()
  assert {k: int(v) for k, v in found.items()} == {
    "trained": trained,
    "real": 57,
    "drafted": drafted,
    "policy": policy or trained,
  }


def test_denominators_of_nothing_are_one(batch):
  nothing = batch.replace(
    mask=np.zeros_like(batch.mask),
    segment_ids=np.zeros_like(batch.segment_ids),
    trained_episodes=np.int32(0),
  )
  for reduction in ("token_mean", "sequence_mean"):
    found = objective.denominators(nothing, StepConfig(reduction=reduction))
    assert {float(x) for x in found.values()} == {1.0}


_WEIGHTS = StepConfig(
  reduction="sequence_mean",
  kl_weight=0.3,
  kl_form="loss",
  entropy_weight=0.2,
  balance_weight=0.1,
  z_weight=0.05,
  mtp_weight=0.7,
  mtp_share=0.5,
)


def test_total_is_the_weighted_sum_of_means(models, params_of, batch):
  model = models["moe"]

  @jax.jit
  def run(params, batch):
    counts = objective.denominators(batch, _WEIGHTS)
    total, sums = objective.numerators(
      params, model, losses.grpo, _WEIGHTS, _part(batch), counts
    )
    logp, entropy, *_ = objective.score(params, model, _part(batch))
    return total, sums.added, counts, logp, entropy

  total, sums, counts, logp, entropy = jax.device_get(
    run(params_of(model), batch)
  )
  mask = batch.mask[0]
  log_ratio = (batch.reference_logp[0] - logp)[mask]
  want = (
    sums["loss"] / 4
    - 0.2 * entropy[mask].mean()
    + 0.3 * (0.5 * log_ratio**2).mean()
    + 0.1 * sums["balance"] / 57
    + 0.05 * sums["z"] / 57
    + 0.7 * sums["mtp"] / counts["drafted"]
  )
  assert total == pytest.approx(want, rel=1e-5)
  assert sums["entropy"] == pytest.approx(entropy[mask].sum(), rel=1e-5)
  # The policy's own sum is that of its terms, each by its episode's weight.
  terms, _ = jax.jit(losses.grpo)(
    logp,
    *(batch.behaviour_logp[0], batch.advantage[0], mask),
    proximal_logp=batch.proximal_logp[0],
  )
  policy = (np.asarray(terms) * batch.episode_weight[0]).sum()
  assert sums["loss"] == pytest.approx(policy, rel=1e-5)


def test_entropy_bonus_raises_entropy(models, learner_of, experiences):
  # Nothing but the bonus: advantages are 0. A small step of plain gradient
  # descent raises H by rate · |w ∇H|² / w.
  flat = [dataclasses.replace(e, advantage=0.0) for e in experiences]
  weight, rate = 0.5, 1e-3
  learner = learner_of(
    models["dense"],
    loss="policy_gradient",
    tx=optax.sgd(rate),
    entropy_weight=weight,
  )
  first, second = learner.step(flat), learner.step(flat)
  assert first["loss"] == 0
  want = rate * first["grad_norm"] ** 2 / weight
  assert want > 1e-4
  assert second["entropy"] - first["entropy"] == pytest.approx(want, rel=0.02)


def _ones(logp, behaviour_logp, advantage, mask, *, proximal_logp=None):
  """A loss whose terms are 1: what is left of them are the weights."""
  terms = jnp.where(mask, 1.0, 0.0) + 0 * jnp.where(mask, logp, 0.0)
  return terms, {}


def _terms(batch, config, logp):
  part = _part(batch)
  run = jax.jit(lambda p, x: objective._policy_terms(x, _ones, config, p)[0])
  return np.asarray(run(part, logp))


@pytest.fixture
def logp(batch):
  draw = np.random.default_rng(1)
  return draw.uniform(-7, -3, batch.ids.shape[1:]).astype(np.float32)


@pytest.mark.parametrize("proximal", [True, False])
def test_icepop_weighs_by_the_policy_that_began_the_step(batch, logp, proximal):
  if not proximal:
    batch = batch.replace(proximal_logp=None)
  began = batch.proximal_logp[0] if proximal else logp
  ratio = np.exp(began - batch.behaviour_logp[0])
  want = batch.mask[0] & (ratio >= 0.5) & (ratio <= 5)
  got = _terms(batch, StepConfig(icepop=True), logp)
  np.testing.assert_array_equal(got, want)
  assert 0 < want.sum() < batch.mask.sum()


@pytest.mark.parametrize("proximal", [True, False])
@pytest.mark.parametrize("kl_form", ["reward", "loss"])
def test_sequences_that_became_unlikely_are_left_out(
  batch, logp, proximal, kl_form
):
  # Whole segments, whatever a KL takes off the advantage of single tokens.
  if not proximal:
    batch = batch.replace(proximal_logp=None)
  began = batch.proximal_logp[0] if proximal else logp
  part = batch.replace(advantage=np.where(batch.segment_ids == 1, -1.0, 1.0))
  want = np.array(batch.mask[0])
  for row in range(4):
    inside = batch.mask[0, row] & (batch.segment_ids[0, row] == 1)
    gap = (batch.behaviour_logp[0, row] - began[row])[inside].mean()
    want[row, inside] = gap <= 0.1
  config = StepConfig(log_gap_max=0.1, kl_weight=10.0, kl_form=kl_form)
  got = _terms(part, config, logp)
  np.testing.assert_array_equal(got, want)
  assert 0 < want.sum() < batch.mask.sum()


def test_selection_bias_is_not_rounded_for_computing():
  # 1/3 has no exact form in bfloat16.
  third = jnp.full(2, 1 / 3)
  params = {"layers": {}, "q": third, "choice_bias": third}
  computed = objective.as_computed(params, "bfloat16")
  assert computed["q"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(computed["choice_bias"], params["choice_bias"])


def test_supervised_terms_compare_with_no_other_policy():
  config = StepConfig(
    reduction="constant_length",
    constant_length=8,
    proximal=True,
    icepop=True,
    log_gap_max=0.5,
    kl_weight=0.1,
    entropy_weight=0.1,
    balance_weight=0.3,
    compute_dtype="bfloat16",
  )
  assert config.supervised() == StepConfig(
    constant_length=8, balance_weight=0.3, compute_dtype="bfloat16"
  )
