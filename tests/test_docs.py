"""The loss that docs/losses.md shows passes its own battery, and trains."""

import pathlib
import re

import jax
import numpy as np

from arl_jax.learner import (
  Experience,
  Learner,
  LearnerConfig,
  OptimizerConfig,
)
from arl_jax.model import ModelConfig, init
from arl_jax.testing import check
from arl_jax.types import NO_VERSION, Role, Segment

_TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "losses.md").read_text()


def _shown():
  """The first block of code."""
  code = re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL)[0]
  body = [x for x in code.splitlines() if x and not x.startswith(("#", "im"))]
  assert len(body) <= 15
  namespace = {}
  exec(code, namespace)
  return namespace["my_loss"]


def test_the_loss_shown_passes_the_battery():
  failed = [r for r in check(_shown()) if not r.passed]
  assert not failed, [f"{r.name}: {r.message}" for r in failed]


def test_the_loss_shown_trains():
  config = ModelConfig(
    vocab_size=32, width=16, layers=1, heads=2, head_dim=8, expert_width=16
  )
  draw = np.random.default_rng(0)
  sampled = np.arange(12) > 3
  experiences = [
    Experience(
      segments=(
        Segment(
          ids=draw.integers(0, 32, 12, np.int32),
          roles=np.where(sampled, Role.SAMPLED, Role.PROMPT).astype(np.uint8),
          sampled=sampled,
          behaviour_logp=np.where(sampled, -3.5, 0).astype(np.float32),
          policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
        ),
      ),
      advantage=advantage,
    )
    for advantage in (1.0, 1.0, -1.0, -1.0)
  ]
  learner = Learner(
    config,
    init(config, jax.random.key(0)),
    LearnerConfig(row_length=24, microbatch_tokens=48, microbatches=1),
    OptimizerConfig(learning_rate=0.01, warmup_steps=1),
    loss=_shown(),
  )
  losses = [learner.step(experiences)["loss"] for _ in range(12)]
  assert losses[-1] < losses[0] - 0.1
