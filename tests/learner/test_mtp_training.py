"""The MTP module learns what the policy will say, whether that moves or not."""

import jax
import numpy as np
import pytest

from arl_jax import losses
from arl_jax.learner import (
  Experience,
  Learner,
  LearnerConfig,
  OptimizerConfig,
  StepConfig,
)
from arl_jax.model import ModelConfig, init
from arl_jax.types import NO_VERSION, Role, Segment

_TRUNK = "^(embed|layers|norm|head)"
_CONFIG = ModelConfig(
  vocab_size=24, width=32, layers=1, heads=2, experts=0, dense_width=64
)


def _experiences():
  """Walks around a ring: the next token follows from the last, mostly."""
  draw = np.random.default_rng(0)
  found = []
  for i in range(16):
    steps = np.where(draw.random(32) < 0.9, 1, 5)
    ids = (np.cumsum(steps) % _CONFIG.vocab_size).astype(np.int32)
    sampled = np.arange(32) > 0
    found.append(
      Experience(
        segments=(
          Segment(
            ids=ids,
            roles=np.where(sampled, Role.SAMPLED, Role.PROMPT).astype(np.uint8),
            sampled=sampled,
            behaviour_logp=np.where(sampled, -3.0, 0.0).astype(np.float32),
            policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
          ),
        ),
        advantage=1.0 if i % 2 else -0.5,
      )
    )
  return found


@pytest.mark.parametrize("kind", ["sft", "cispo"])
@pytest.mark.parametrize("frozen", [_TRUNK, ""])
def test_the_module_learns(kind, frozen):
  params = init(_CONFIG, jax.random.key(0))
  # The head of a fresh policy says nothing that could be guessed.
  params["embed"] = params["embed"] * 4
  before = jax.tree.map(np.asarray, params)
  learner = Learner(
    _CONFIG,
    params,
    LearnerConfig(
      row_length=64,
      microbatch_tokens=256,
      microbatches=2,
      step=StepConfig(mtp_share=1.0),
    ),
    OptimizerConfig(learning_rate=3e-3, warmup_steps=1, frozen=frozen),
    loss=losses.sft if kind == "sft" else losses.by_name(kind),
  )
  found = [learner.step(_experiences()) for _ in range(40)]
  assert found[-1]["mtp_loss"] < 0.9 * found[0]["mtp_loss"]
  assert found[-1]["mtp_agreement"] > found[0]["mtp_agreement"] + 0.1
  after = learner.state.params
  moved = {
    name
    for name in before
    if any(
      not np.array_equal(a, b)
      for a, b in zip(
        jax.tree.leaves(before[name]), jax.tree.leaves(after[name]), strict=True
      )
    )
  }
  assert moved == ({"mtp"} if frozen else set(before))
