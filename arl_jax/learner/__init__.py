"""The learner: groups of episodes in, one update out."""

from arl_jax.learner.experience import Experience, of_group
from arl_jax.learner.learner import Learner, LearnerConfig
from arl_jax.learner.objective import StepConfig
from arl_jax.learner.packing import TokenBatch, pack
from arl_jax.learner.state import OptimizerConfig, TrainState
from arl_jax.learner.step import make_train_step

__all__ = [
  "Experience",
  "Learner",
  "LearnerConfig",
  "OptimizerConfig",
  "StepConfig",
  "TokenBatch",
  "TrainState",
  "make_train_step",
  "of_group",
  "pack",
]
