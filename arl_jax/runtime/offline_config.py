"""The configuration of training from files: conversations, recorded groups."""

import dataclasses
import pathlib

from arl_jax import losses
from arl_jax.data.sources import SourceConfig
from arl_jax.learner import LearnerConfig, OptimizerConfig
from arl_jax.losses.advantages import BASELINES
from arl_jax.model.config import ModelConfig


def _make(cls, **values):
  return dataclasses.field(default_factory=lambda: cls(**values))


@dataclasses.dataclass(kw_only=True, slots=True)
class OfflineConfig:
  """Everything a run on files is made from.

  Attributes:
    seed: of fresh parameters and of the order of the data.
    run_dir: where the run leaves its files.
    smoke: a few small updates, to see that all parts work.
    checkpoint: published model to start from: a folder as Hugging Face has it
      or a .gguf file. Empty: a fresh one, as `model` says.
    tokenizer: folder or .gguf file with a tokenizer and its chat template;
      empty: that of `checkpoint`. Recorded groups need none.
    model: of a fresh policy.
    add_mtp: give a published model without an MTP module a fresh one.
    remat: takes the place of the model's (see `ModelConfig`).
    sources: what is trained on; either conversations (with the loss "sft") or
      recorded groups (with a loss of rollouts).
    baseline: of recorded groups, "mean" or "leave_one_out".
    normalise_std: also divide advantages by the group's standard deviation.
    steps: updates.
    batch_tokens: of an update: examples are taken until there are as many.
    learner: loss, shapes and places.
    optimizer: of the run.
    checkpoint_every: updates between checkpoints.
    keep_checkpoints: newest ones kept.
    checkpoint_quota: bytes that all checkpoints may take; 0 sets no bound.
    export: folder that the trained model is written to at the end, as Hugging
      Face has it; empty writes none.
  """

  seed: int = 0
  run_dir: str = "runs/sft"
  smoke: bool = False
  checkpoint: str = ""
  tokenizer: str = ""
  model: ModelConfig = _make(ModelConfig)
  add_mtp: bool = False
  remat: str = "none"
  sources: tuple[SourceConfig, ...] = ()
  baseline: str = "mean"
  normalise_std: bool = False
  steps: int = 100
  batch_tokens: int = 8192
  learner: LearnerConfig = _make(
    LearnerConfig, loss="sft", row_length=2048, microbatch_tokens=8192
  )
  optimizer: OptimizerConfig = _make(OptimizerConfig, learning_rate=1e-5)
  checkpoint_every: int = 50
  keep_checkpoints: int = 3
  checkpoint_quota: int = 0
  export: str = ""

  @property
  def on_groups(self) -> bool:
    """Whether recorded groups are trained on."""
    return any(source.kind == "groups" for source in self.sources)

  def resolve(self) -> None:
    """Applies `smoke` and checks every field.

    Raises:
      ValueError: names the field, its value and what would be right.
    """
    if self.smoke:
      self.steps = min(self.steps, 3)
      self.batch_tokens = min(self.batch_tokens, 512)
      self.learner.row_length = min(self.learner.row_length, 512)
      self.learner.microbatch_tokens = min(self.learner.microbatch_tokens, 512)
    self.model.validate()
    self.learner.validate("learner")
    self.optimizer.validate("optimizer")
    if not self.sources:
      raise ValueError("sources is empty; name at least one data set")
    for i, source in enumerate(self.sources):
      source.validate(f"sources[{i}]")
    supervised = losses.is_supervised(losses.by_name(self.learner.loss))
    if len({s.kind == "groups" for s in self.sources}) > 1:
      raise ValueError("sources mixes conversations with recorded groups")
    if supervised == self.on_groups:
      raise ValueError(
        f"learner.loss is {self.learner.loss!r}; conversations are trained with"
        " 'sft', recorded groups with a loss of rollouts such as 'cispo'"
      )
    if self.on_groups and not (self.checkpoint or self.model.vocab_size):
      raise ValueError(
        "model.vocab_size is 0; recorded groups bring no tokenizer that knows"
      )
    if not self.on_groups and not (self.tokenizer or self.checkpoint):
      raise ValueError("tokenizer is empty, and so is checkpoint; name one")
    if self.baseline not in BASELINES:
      raise ValueError(
        f"baseline is {self.baseline!r}, none of {list(BASELINES)}"
      )
    run_dir = pathlib.Path(self.run_dir).resolve()
    if self.export and pathlib.Path(self.export).resolve() == run_dir:
      raise ValueError(
        f"export is {self.export!r}, the run's own folder; name another"
      )
    if supervised and self.learner.step.supervised() != self.learner.step:
      raise ValueError(
        "learner.step compares with a sampler or a reference, which"
        " conversations don't have; leave its reduction, proximal, icepop,"
        " log_gap_max, kl_weight and entropy_weight as they are by default"
      )
    for name in (
      *("steps", "batch_tokens", "checkpoint_every", "keep_checkpoints"),
    ):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} is {getattr(self, name)}, not >= 1")
    if self.checkpoint_quota < 0:
      raise ValueError(f"checkpoint_quota is {self.checkpoint_quota}, not >= 0")
