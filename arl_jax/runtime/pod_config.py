"""What a model needs to run on a pod, as data."""

import dataclasses

from arl_jax import losses
from arl_jax.learner import OptimizerConfig, StepConfig
from arl_jax.model.config import ModelConfig
from arl_jax.sharding import MeshConfig


def _make(cls, **values):
  return dataclasses.field(default_factory=lambda: cls(**values))


@dataclasses.dataclass(kw_only=True, slots=True)
class PodConfig:
  """Shapes of the programs on a pod.

  Attributes:
    model: the policy.
    train_mesh: of the learner.
    serve_mesh: of a rollout server replica.
    sequence_length: tokens of a packed row, and of a slot's cache.
    rows_per_shard: rows of a microbatch for each part of the mesh that holds
      rows of its own (data × fsdp × expert).
    microbatches: of an update.
    loss: of the policy, as in `LearnerConfig`.
    step: loss terms and precision.
    optimizer: and the precision of its moments.
    slots: requests that a replica decodes at once.
    prefill_rows: slots that one prefill call extends.
    prefill_chunk: tokens that it appends to each.
  """

  model: ModelConfig = _make(ModelConfig)
  train_mesh: MeshConfig = _make(MeshConfig)
  serve_mesh: MeshConfig = _make(MeshConfig)
  sequence_length: int = 32_768
  rows_per_shard: int = 1
  microbatches: int = 4
  loss: str = "cispo"
  step: StepConfig = _make(StepConfig, compute_dtype="bfloat16")
  optimizer: OptimizerConfig = _make(
    OptimizerConfig, learning_rate=1e-6, moment_dtype="bfloat16"
  )
  slots: int = 64
  prefill_rows: int = 1
  prefill_chunk: int = 512

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    self.model.validate()
    self.step.validate("step")
    self.optimizer.validate("optimizer")
    losses.by_name(self.loss)
    if self.model.vocab_size < 1:
      raise ValueError(f"model.vocab_size is {self.model.vocab_size}, not >= 1")
    for name in (
      "sequence_length",
      "rows_per_shard",
      "microbatches",
      "slots",
      "prefill_rows",
      "prefill_chunk",
    ):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} is {getattr(self, name)}, not >= 1")
    if self.prefill_chunk > self.sequence_length:
      raise ValueError(
        f"prefill_chunk {self.prefill_chunk} is longer than sequence_length"
        f" {self.sequence_length}"
      )
