"""What a learner does with its state, its experience and its policies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from arl_jax import losses
from arl_jax.learner import Experience, LearnerConfig, OptimizerConfig
from arl_jax.learner import learner as module
from arl_jax.sharding import MeshConfig


@pytest.fixture(scope="module")
def plain(model, learner_of):
  """() -> one learner of the default loss, as it was made."""
  learner = learner_of(model)
  made = jax.device_get(learner.contents)

  def again():
    learner.take(jax.tree.map(jnp.array, made))
    return learner

  return again


@pytest.fixture(scope="module")
def updated(plain, experiences):
  """Parameters and metrics after its first step."""
  learner = plain()
  metrics = learner.step(experiences)
  return jax.device_get(learner.state.params), metrics


def _paths(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _moved(one, two):
  """Difference of each parameter that isn't the same in both."""
  one, two = _paths(one), _paths(two)
  differences = {name: one[name] - two[name] for name in one}
  return {name: x for name, x in differences.items() if x.any()}


def _norm(arrays):
  return np.sqrt(sum(np.square(x).sum() for x in arrays))


@pytest.fixture
def packed(monkeypatch):
  """Arguments of every call of `pack`, as they come."""
  calls, pack = [], module.packing.pack

  def spy(experiences, **how):
    calls.append((list(experiences), how))
    return pack(experiences, **how)

  monkeypatch.setattr(module.packing, "pack", spy)
  return calls


def test_metrics_of_a_step(updated, experiences):
  _, metrics = updated
  lengths = [9, 5, 7, 12, 3, 11, 10]
  assert metrics["tokens"] == sum(lengths)
  assert metrics["trained_tokens"] == sum(e.trained_tokens for e in experiences)
  assert metrics["packing_fill"] == pytest.approx(sum(lengths) / 64)
  speed = metrics["tokens"] / metrics["seconds"]
  assert metrics["tokens_per_second"] == pytest.approx(speed)
  assert 0 < metrics["share_of_peak_flops"] < 1
  assert metrics["memory_bytes"] > 1e6
  assert all(np.isfinite(x) for x in metrics.values())
  assert all(type(x) is float for x in metrics.values())


def test_nothing_to_train_makes_no_update(plain, segment, params):
  learner = plain()
  silent = Experience(segments=(segment(6, 0, trained=False),), advantage=1.0)
  for found in ([silent], [silent] * 5, []):
    assert learner.step(found, substeps=2) == {}
  assert learner.state.step == 0
  assert not _moved(learner.state.params, params)


def test_substeps_train_each_token_once_in_order(plain, experiences, packed):
  learner = plain()
  metrics = learner.step(experiences, substeps=2)
  parts = [part for part, _ in packed]
  assert len(parts) == 2
  assert [e for part in parts for e in part] == list(experiences)
  assert metrics["trained_tokens"] == sum(e.trained_tokens for e in experiences)
  assert learner.state.step == 2
  # Neither version nor publication: that is a step of its own.
  assert learner.version == 0


def test_more_substeps_than_episodes_train_each_token_once(
  plain, experiences, packed
):
  learner = plain()
  metrics = learner.step(experiences, substeps=9)
  # One is silent, and makes no update.
  assert [len(part) for part, _ in packed] == [1] * 4
  assert metrics["trained_tokens"] == sum(e.trained_tokens for e in experiences)
  assert learner.state.step == 4


def test_metrics_of_substeps_are_weighed_by_tokens():
  one = {"loss": 1.0, "ratio_max": 3.0, "skipped": 0.0, "tokens": 8.0}
  two = {"loss": 4.0, "ratio_max": 2.0, "skipped": 1.0, "tokens": 2.0}
  for values, trained in ((one, 1.0), (two, 2.0)):
    values |= {"trained_tokens": trained, "seconds": 2.0}
    values |= {"effective_tokens": trained, "tokens_per_second": 0.0}
  assert module._merged([one, two]) == {
    "loss": 3.0,
    "ratio_max": 3.0,
    "skipped": 1.0,
    "tokens": 10.0,
    "trained_tokens": 3.0,
    "seconds": 4.0,
    "effective_tokens": 3.0,
    "tokens_per_second": 2.5,
  }
  assert module._merged([]) == {}


def test_publication_is_the_next_version(plain, experiences, updated):
  learner = plain()
  assert learner.publish() == 1
  metrics = learner.step(experiences)
  assert learner.version == 1
  assert learner.publish() == 2
  # And nothing else: the same program makes the same update.
  assert metrics["compilations"] == learner.step(experiences)["compilations"]
  assert metrics["loss"] == updated[1]["loss"]


def test_first_version_may_be_another(model, params, sgd):
  learner = module.Learner(model, params, LearnerConfig(), sgd, version=7)
  assert learner.version == 7
  assert learner.publish() == 8


def test_order_of_rows_is_drawn_anew_and_goes_on_after_a_restart(
  plain, experiences, packed
):
  learner = plain()
  learner.step(experiences)
  kept = jax.device_get(learner.contents)
  learner.step(experiences)
  want = jax.device_get(learner.state)
  learner.take(jax.tree.map(jnp.array, kept))
  learner.step(experiences)
  seeds = [how["seed"] for _, how in packed]
  assert seeds[0] != seeds[1] == seeds[2]
  for a, b in zip(*map(jax.tree.leaves, (learner.state, want)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_seed_is_that_of_the_rows(model, params, sgd):
  keys = [
    module.Learner(model, params, LearnerConfig(), sgd, seed=seed).state.rng
    for seed in (0, 1, 1)
  ]
  assert not np.array_equal(keys[0], keys[1])
  np.testing.assert_array_equal(keys[1], keys[2])


def test_row_length_of_a_step_may_differ(
  plain, experiences, updated, packed, assert_close
):
  learner = plain()
  metrics = learner.step(experiences, row_length=24)
  assert packed[0][1]["row_length"] == 24
  # As many whole rows as the tokens of a microbatch allow.
  assert packed[0][1]["microbatch_rows"] == 64 // 24
  assert_close(learner.state.params, updated[0])
  assert metrics["loss"] == pytest.approx(updated[1]["loss"], rel=1e-5)


def test_frozen_parameters_neither_move_nor_count(
  model, params, learner_of, experiences, updated
):
  frozen = OptimizerConfig(
    frozen="attention|embed", moment_dtype="bfloat16", warmup_steps=1
  )
  learner = learner_of(model, tx=frozen)
  state = _paths(learner.state.opt_state)
  moments = {name: x.dtype for name, x in state.items() if x.ndim}
  assert {d.name for d in moments.values()} == {"bfloat16"}
  trained = {f"layers/000/mlp/{n}" for n in ("norm", "gate", "up", "down")}
  trained |= {"norm"}
  for name in trained:
    assert sum(key.endswith(f"/{name}") for key in moments) >= 2
  assert not any("attention" in key or "embed" in key for key in moments)
  metrics = learner.step(experiences)
  assert set(_moved(learner.state.params, params)) == trained
  # What SGD changes is its rate, 100, times the gradient.
  change = _moved(updated[0], params)
  want = _norm(change[name] for name in trained) / 100
  assert metrics["grad_norm"] == pytest.approx(want, rel=1e-4)
  assert metrics["grad_norm"] < 0.9 * updated[1]["grad_norm"]
  for name in ("loss", "entropy", "ratio"):
    assert metrics[name] == pytest.approx(updated[1][name], rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("frozen", [".", "^(embed|layers|norm)"])
def test_nothing_left_to_train_is_refused(model, learner_of, name, frozen):
  with pytest.raises(ValueError, match=r"optimizer\.frozen .* nothing to trai"):
    learner_of(model, tx=OptimizerConfig(name=name, frozen=frozen))


def test_gradient_is_clipped_to_its_norm(
  model, params, learner_of, experiences, updated
):
  learner = learner_of(model, tx=optax.sgd(1.0), clip_norm=0.1)
  metrics = learner.step(experiences)
  # What is reported is the norm before.
  want = updated[1]["grad_norm"]
  assert metrics["grad_norm"] == pytest.approx(want, rel=1e-5)
  assert want > 0.2
  moved = _moved(learner.state.params, params)
  assert _norm(moved.values()) == pytest.approx(0.1, rel=1e-4)


def test_loss_comes_from_the_configuration_or_the_caller(model, learner_of):
  named = learner_of(model, loss="cispo(ratio_max=0.5)").loss
  assert (named.func, named.keywords) == (losses.cispo, {"ratio_max": 0.5})
  assert learner_of(model, own=losses.sft, loss="grpo").loss is losses.sft


def test_mesh_is_that_of_the_configuration(model, params, sgd):
  for mesh, size in ((MeshConfig(fsdp=1), 1), (MeshConfig(data=2, fsdp=2), 4)):
    learner = module.Learner(model, params, LearnerConfig(mesh=mesh), sgd)
    embed = learner.state.params["embed"]
    assert len(embed.sharding.device_set) == size
    assert embed.sharding.shard_shape(embed.shape) == (64, 16 // mesh.fsdp)
  # All devices there are.
  config = LearnerConfig(mesh=MeshConfig(data=2))
  embed = module.Learner(model, params, config, sgd).state.params["embed"]
  assert embed.sharding.shard_shape(embed.shape) == (64, 4)


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({"row_length": 0}, "learner.row_length is 0, not >= 1"),
    ({"microbatch_tokens": 0}, "learner.microbatch_tokens is 0"),
    ({"microbatches": 0}, "learner.microbatches is 0"),
    ({"loss": "ppo"}, "'ppo' is neither one of"),
    ({"mesh": MeshConfig(data=3)}, "does not fit 8 devices"),
  ],
)
def test_impossible_configuration_is_refused(model, params, sgd, change, match):
  with pytest.raises(ValueError, match=match):
    module.Learner(model, params, LearnerConfig(**change), sgd)


@pytest.mark.parametrize(
  ("terms", "match"),
  [
    ({"kl_weight": 0.1}, "kl_weight is 0.1, but there is no reference"),
    ({"proximal": True, "loss": "sft"}, "the loss takes no proximal_logp"),
    ({"bias_rate": 0.1}, "bias_rate is 0.1, but the model has no sigmoid"),
    ({"reduction": "mean"}, "learner.step.reduction is 'mean', none of"),
    ({"reduction": "constant_length"}, "learner.step.constant_length is 0"),
    ({"kl_form": "k3"}, "learner.step.kl_form is 'k3'"),
    ({"compute_dtype": "f8"}, "learner.step.compute_dtype is 'f8'"),
    ({"kl_weight": -0.1}, "learner.step.kl_weight is -0.1, not >= 0"),
    ({"entropy_weight": np.inf}, "learner.step.entropy_weight is inf"),
    ({"mtp_share": 0.0}, "learner.step.mtp_share is 0.0"),
    ({"clip_norm": 0.0}, "learner.step.clip_norm is 0.0, not > 0"),
  ],
)
def test_impossible_terms_are_refused(model, learner_of, terms, match):
  with pytest.raises(ValueError, match=match):
    learner_of(model, **terms)
