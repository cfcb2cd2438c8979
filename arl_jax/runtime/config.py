"""The configuration of a run; every field is a flag (--config.rl.steps=10)."""

import dataclasses
import difflib
import math

from arl_jax import checkpoints, losses
from arl_jax.actors.config import ActorConfig
from arl_jax.learner import LearnerConfig, OptimizerConfig, StepConfig
from arl_jax.losses.advantages import BASELINES
from arl_jax.model.config import ModelConfig
from arl_jax.queueing.messages import MAX_GROUP_SIZE
from arl_jax.queueing.task_source import ORDERS, parse_mixture
from arl_jax.rollout.engine_config import EngineConfig
from arl_jax.sharding import MeshConfig
from arl_jax.weights.config import WeightsConfig

MODES = ("train", "rollout_only", "train_only", "simulated_learner")


def _make(cls, **values):
  return dataclasses.field(default_factory=lambda: cls(**values))


@dataclasses.dataclass(kw_only=True, slots=True)
class WarmStartConfig:
  """Supervised training on the play of a script or of a teacher.

  Attributes:
    opening_steps: updates on first turns only, of questions made from random
      words: copying from the question forms there.
    opening_row_length: tokens of a row in these updates.
    episodes: demonstrations, one a training task, then a second, and so on.
    demonstrations: directory with recorded groups, whose episodes are shown in
      place of the script's: of `launch.demonstrate`, or of a run that recorded
      groups of the same problem, such as one of mode "rollout_only". All are
      taken, whatever `episodes` is.
    filter: keeps demonstrations by Context-1's rules, which go by recall (see
      `data.trajectory_filter`).
    steps: updates in all, those on openings included; 0 for no warm start.
    batch_tokens: of an update.
    optimizer: of this phase.
  """

  opening_steps: int = 400
  opening_row_length: int = 128
  episodes: int = 3000
  demonstrations: str = ""
  filter: bool = False
  steps: int = 800
  batch_tokens: int = 1900
  optimizer: OptimizerConfig = _make(
    OptimizerConfig, name="muon", decay_steps=800
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class RLConfig:
  """Reinforcement learning.

  Attributes:
    steps: each trains on groups and publishes new weights.
    tasks_per_step: groups.
    group_size: rollouts of a task, at least 2.
    max_staleness: policy versions between a group's oldest trained token and
      the learner that trains on it, at most; with 0 a step's groups are sampled
      by the weights that it updates. Above 0 only with `cluster.actors`.
    tries: of a task whose rollouts failed for reasons of infrastructure.
    epochs: over the tasks, after which the run ends even before `steps`; 0 for
      as many as it takes.
    mixture: how often tasks of each source come, as in "easy=1,hard=3"; a
      task's source is `provenance["source"]`. Empty takes all tasks alike.
    order: of the tasks in an epoch of a source, "shuffled" or, as a curriculum,
      "hops": those with fewer hops first.
    skip_below: tasks whose rollouts had a lower mean reward when they were
      tried last are left out: they are too hard yet.
    skip_above: likewise with a higher one: they are learned already.
    substeps: updates that a step's groups are split into, each group in one;
      the behaviour log-prob stays the one recorded at sampling, so that later
      substeps are off-policy by ρ (see `Learner`).
    baseline: of the group, "mean" or "leave_one_out".
    normalise_std: also divide advantages by the group's standard deviation.
    record_groups: writes each step's groups to `groups/<step>.jsonl` in the run
      directory, to be trained on again (see `OfflineConfig`).
    optimizer: of this phase.
  """

  steps: int = 100
  tasks_per_step: int = 8
  group_size: int = 8
  max_staleness: int = 0
  tries: int = 3
  epochs: int = 0
  mixture: str = ""
  order: str = "shuffled"
  skip_below: float = -math.inf
  skip_above: float = math.inf
  substeps: int = 1
  baseline: str = "mean"
  normalise_std: bool = False
  record_groups: bool = False
  optimizer: OptimizerConfig = _make(
    OptimizerConfig, learning_rate=1e-3, warmup_steps=5
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class Config(ActorConfig):
  """Everything a run is made from; see also `ActorConfig`.

  Attributes:
    run_dir: where the run leaves its files.
    checkpoint: a published model that training begins from, a Hugging Face
      folder or a .gguf file, which also says what `model` and the tokenizer
      are; empty begins from random parameters of `model`.
    mode: "train"; "rollout_only" updates nothing and records each step's
      groups; "train_only" takes the groups that another run recorded, in the
      same order; "simulated_learner" publishes unchanged weights instead of
      updates, to see what rollouts can deliver.
    replay: with "train_only", the directory of that other run.
    simulated_seconds: that an update takes with "simulated_learner".
    smoke: reduces every size, to see in a minute that all parts work.
    checkpoint_every: updates between checkpoints, besides those at the end of
      each phase and on interruption.
    keep_checkpoints: newest ones kept.
    keep_best_checkpoints: kept beside them, by the mean reward of the rollouts
      since the commit before.
    checkpoint_quota: bytes that all checkpoints may take; 0 sets no bound.
    evaluation_seed: of held-out rollouts, the same before and after.
    report_episodes: whole trajectories that the report shows, before and
      after each.
    serve_mesh: of the devices that a server splits parameters and caches over,
      those of all its hosts; by default there is one. Where the learner or the
      evaluator samples, it does so with one device.
  """

  run_dir: str = "runs/quickstart"
  checkpoint: str = ""
  mode: str = "train"
  replay: str = ""
  simulated_seconds: float = 1.0
  smoke: bool = False
  checkpoint_every: int = 50
  keep_checkpoints: int = 3
  keep_best_checkpoints: int = 0
  checkpoint_quota: int = 0
  evaluation_seed: int = 1234
  report_episodes: int = 3
  model: ModelConfig = _make(ModelConfig, scaled_embedding=True)
  engine: EngineConfig = _make(EngineConfig)
  serve_mesh: MeshConfig = _make(MeshConfig, fsdp=1)
  learner: LearnerConfig = _make(
    LearnerConfig, step=StepConfig(balance_weight=1e-3)
  )
  warm_start: WarmStartConfig = _make(WarmStartConfig)
  rl: RLConfig = _make(RLConfig)
  weights: WeightsConfig = _make(WeightsConfig)

  def resolve(self) -> None:
    """Applies `smoke` and checks every field.

    Raises:
      ValueError: names the field, its value and what would be right.
    """
    if self.smoke:
      self._reduce()
    self.agent.validate()
    if self.checkpoint:
      self.model = checkpoints.load_config(self.checkpoint)
      self.tokenizer = self.tokenizer or self.checkpoint
    self.model.validate()
    self.engine.validate()
    self.script.validate()
    self.weights.validate("weights")
    self.cluster.validate()
    self._validate_serve_mesh()
    self._validate_tasks()
    if self.rl.baseline not in BASELINES:
      raise ValueError(
        f"rl.baseline is {self.rl.baseline!r}, none of {list(BASELINES)}"
      )
    if self.cluster.actors and not self.weights.folder:
      self.weights.folder = f"{self.run_dir}/weights"
    for name in ("search.beta", "search.final_beta"):
      if not 0 < _field(self, name) < math.inf:
        raise ValueError(f"{name} is {_field(self, name)}, not > 0 and finite")
    self.learner.validate("learner")
    if losses.is_supervised(losses.by_name(self.learner.loss)):
      raise ValueError("learner.loss is 'sft'; that is no loss of rollouts")
    for name in _AT_LEAST_ONE:
      value = _field(self, name)
      if value < 1:
        raise ValueError(f"{name} is {value}, not >= 1")
    if not 2 <= self.rl.group_size <= MAX_GROUP_SIZE:
      raise ValueError(
        f"rl.group_size is {self.rl.group_size}, not in 2..{MAX_GROUP_SIZE}: a"
        " rollout alone has nothing to be compared with"
      )
    for name in (
      *("warm_start.opening_steps", "warm_start.steps", "rl.steps"),
      "report_episodes",
      *("keep_best_checkpoints", "checkpoint_quota"),
    ):
      if _field(self, name) < 0:
        raise ValueError(f"{name} is {_field(self, name)}, not >= 0")
    if self.warm_start.steps < self.warm_start.opening_steps:
      raise ValueError(
        f"warm_start.steps {self.warm_start.steps} is less than its"
        f" opening_steps {self.warm_start.opening_steps}"
      )
    opening = self.tasks.hops * (self.tasks.clue_words + 1) + 4
    opening += self.agent.message_tokens
    opens = self.warm_start.opening_steps > 0
    if opens and self.warm_start.opening_row_length < opening:
      raise ValueError(
        "warm_start.opening_row_length is"
        f" {self.warm_start.opening_row_length}; a question and a message need"
        f" up to {opening}"
      )
    for name in ("warm_start", "rl"):
      _field(self, name).optimizer.validate(f"{name}.optimizer")
    if self.agent.token_budget > self.learner.row_length:
      raise ValueError(
        f"learner.row_length {self.learner.row_length} can't hold a context of"
        f" agent.token_budget {self.agent.token_budget}; raise it"
      )

  def policy(self, vocab_size: int) -> ModelConfig:
    """The model that is trained.

    Args:
      vocab_size: of the tokenizer.

    Raises:
      ValueError: the checkpoint's model has fewer rows than that.
    """
    if not self.checkpoint:
      return dataclasses.replace(self.model, vocab_size=vocab_size)
    if self.model.vocab_size < vocab_size:
      raise ValueError(
        f"tokenizer {self.tokenizer} has {vocab_size} tokens, checkpoint"
        f" {self.checkpoint} only {self.model.vocab_size}"
      )
    return self.model

  def _validate_serve_mesh(self) -> None:
    self.serve_mesh.validate("serve_mesh")
    sizes = dataclasses.asdict(self.serve_mesh)
    if self.serve_mesh != MeshConfig(fsdp=1) and not self.cluster.actors:
      raise ValueError(
        f"serve_mesh is {sizes}, but without cluster.actors a run has no"
        " servers; its sizes must be 1"
      )
    hosts, devices = self.cluster.server_hosts, math.prod(sizes.values())
    if devices > 0 and devices % hosts:
      raise ValueError(
        f"serve_mesh {sizes} has {devices} devices, which {hosts} hosts"
        " (cluster.server_hosts) can't have in equal parts; with an axis of -1"
        " it takes all of theirs"
      )

  def _validate_tasks(self) -> None:
    rl = self.rl
    for name, least in (("max_staleness", 0), ("tries", 1), ("epochs", 0)):
      if getattr(rl, name) < least:
        raise ValueError(f"rl.{name} is {getattr(rl, name)}, not >= {least}")
    if rl.max_staleness and not self.cluster.actors:
      raise ValueError(
        f"rl.max_staleness is {rl.max_staleness}, but without cluster.actors a"
        " run is strictly on-policy; it must be 0"
      )
    if self.mode not in MODES:
      raise ValueError(f"mode is {self.mode!r}, none of {', '.join(MODES)}")
    if (self.mode == "train_only") != bool(self.replay):
      raise ValueError(
        f"mode is {self.mode!r} and replay {self.replay!r}: train_only, and"
        " nothing else, needs the directory of a run with recorded groups"
      )
    if self.mode == "train_only" and self.cluster.actors:
      raise ValueError(
        f"cluster.actors is {self.cluster.actors}, but with mode 'train_only'"
        " groups come from replay; it must be 0"
      )
    if not 0 <= self.simulated_seconds < math.inf:
      raise ValueError(
        f"simulated_seconds is {self.simulated_seconds}, not >= 0"
      )
    parse_mixture(rl.mixture)
    if rl.order not in ORDERS:
      raise ValueError(f"rl.order is {rl.order!r}, none of {', '.join(ORDERS)}")
    if not rl.skip_below <= rl.skip_above:
      raise ValueError(
        f"rl.skip_below is {rl.skip_below}, not <= rl.skip_above"
        f" {rl.skip_above}"
      )

  def _reduce(self) -> None:
    """Smaller sizes; what is smaller already stays."""
    for name, most in _SMOKE.items():
      *path, last = name.split(".")
      owner = _field(self, ".".join(path)) if path else self
      setattr(owner, last, min(getattr(owner, last), most))


_SMOKE = {
  "tasks.train": 200,
  "tasks.heldout": 24,
  "warm_start.episodes": 200,
  "warm_start.steps": 100,
  "warm_start.opening_steps": 10,
  "rl.steps": 3,
  "rl.tasks_per_step": 2,
  "rl.group_size": 8,
  "engine.max_concurrent_decodes": 16,
  "engine.prefill_rows": 8,
  "model.layers": 1,
  "model.width": 32,
  "model.head_dim": 16,
  "model.expert_width": 32,
  "checkpoint_every": 25,
}

_AT_LEAST_ONE = (
  "checkpoint_every",
  "keep_checkpoints",
  "corpus.chunk_tokens",
  "corpus.vocab_size",
  "tasks.train",
  "tasks.heldout",
  "tasks.clue_words",
  "tasks.hops",
  "search.handles",
  "search.results",
  "search.snippet_tokens",
  "search.grep_limit",
  "search.max_answer",
  "search.beta_epochs",
  "warm_start.episodes",
  "warm_start.opening_row_length",
  "warm_start.batch_tokens",
  "rl.tasks_per_step",
  "rl.substeps",
)


def _field(config, path: str):
  for name in path.split("."):
    config = getattr(config, name)
  return config


def explain_field(config: object, path: str) -> str:
  """Why a dotted field that a flag names isn't there; "" if it is."""
  owner, known = config, ""
  for name in path.split("."):
    if not dataclasses.is_dataclass(owner):
      return f"{known or 'config'} has no fields, so no {name!r}"
    names = [f.name for f in dataclasses.fields(owner)]
    name, bracket, _ = name.partition("[")
    if bracket and name in names:
      return ""  # A part of a list, which the flags' library reads itself.
    if name not in names:
      close = difflib.get_close_matches(name, names, 3) or names
      return (
        f"{known or 'config'} has no field {name!r}; there is"
        f" {', '.join(close)}"
      )
    owner, known = getattr(owner, name), f"{known}.{name}".lstrip(".")
  return ""
