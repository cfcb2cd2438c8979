"""A learner on eight devices makes the updates of one on a single device."""

import functools

import jax
import pytest

from arl_jax import sharding
from arl_jax.learner.throughput import OF_THE_MACHINE
from arl_jax.losses import by_name

# A loss of each kind for each reduction.
_REDUCED = {
  "token_mean": "cispo",
  "sequence_mean": "gspo(ratio_min=0.5, ratio_max=1.5)",
  "constant_length": "grpo",
}

_MESHES = [
  ({"data": 8}, "token_mean"),
  ({"fsdp": 8}, "sequence_mean"),
  ({"data": 2, "fsdp": 2, "expert": 2}, "constant_length"),
  ({"fsdp": 4, "tensor": 2}, "sequence_mean"),
  ({"expert": 4, "tensor": 2}, "token_mean"),
]


@pytest.fixture(scope="module")
def make(models, learner_of):
  """Learner of a reduction; rows of 12 need more than one of a device."""

  def learner(how, **where):
    return learner_of(
      models["moe"],
      own=by_name(_REDUCED[how]),
      row_length=12,
      reduction=how,
      constant_length=8,
      balance_weight=0.1,
      z_weight=0.1,
      **where,
    )

  return learner


@pytest.fixture(scope="module")
def alone(make, experiences):
  """Parameters and metrics after a step on one device."""

  @functools.cache
  def update(how):
    learner = make(how)
    metrics = learner.step(experiences)
    return jax.device_get(learner.state.params), metrics

  return update


@pytest.mark.parametrize(
  ("sizes", "how"), _MESHES, ids=lambda x: str(x).replace(" ", "")
)
def test_update_on_a_mesh_is_that_of_one_device(
  make, alone, experiences, assert_same_update, sizes, how
):
  want = alone(how)
  learner = make(how, mesh=sharding.make_mesh(**sizes))
  before = jax.tree.map(lambda x: x.sharding, learner.state)
  metrics = learner.step(experiences)
  params = jax.device_get(learner.state.params)
  assert_same_update((params, metrics), want, OF_THE_MACHINE)
  # The state lies as it did, so that nothing is compiled for another one.
  learner.publish()
  after = jax.tree.map(lambda x: x.sharding, learner.state)
  assert jax.tree.leaves(after) == jax.tree.leaves(before)
  for _ in range(2):
    again = learner.step(experiences)
    assert again["compilations"] == metrics["compilations"]
  assert (learner.state.step, learner.version) == (3, 1)


def test_weights_lie_where_the_rules_say(make):
  # Rows of the residual stream over fsdp, experts over expert.
  learner = make("token_mean", mesh=sharding.make_mesh(fsdp=4, expert=2))
  gate = learner.state.params["layers"]["000"]["moe"]["gate"]
  assert gate.shape == (4, 16, 16)
  assert gate.sharding.shard_shape(gate.shape) == (2, 4, 16)
