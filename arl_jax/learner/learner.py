"""Holds the train state on a mesh and turns experience into updates."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from arl_jax import losses, sharding
from arl_jax.learner import packing, state, throughput
from arl_jax.learner.experience import Experience
from arl_jax.learner.objective import StepConfig
from arl_jax.learner.packing import PackingStats, TokenBatch
from arl_jax.learner.state import OptimizerConfig, TrainState
from arl_jax.learner.step import make_score, make_train_step
from arl_jax.model.config import ModelConfig
from arl_jax.sharding import MeshConfig
from arl_jax.types import LossFn, Segment


def _make(cls, **values):
  return dataclasses.field(default_factory=lambda: cls(**values))


@dataclasses.dataclass(kw_only=True, slots=True)
class LearnerConfig:
  """Loss, shapes and places of an update.

  Attributes:
    loss: "cispo", "grpo", "gspo", "kimi_k2_5", "policy_gradient", "sft", or
      your own as "package.module:function"; hyper-parameters may follow, as in
      "grpo(ratio_max=1.28)" (see `losses.by_name`).
    row_length: tokens a row holds; segments are packed into rows.
    microbatch_tokens: tokens computed at once, in whole rows.
    microbatches: smallest number of them that a step is compiled for; it
      doubles as needed.
    mesh: of the devices.
    step: the other loss terms, and precision.
  """

  loss: str = "cispo"
  row_length: int = 320
  microbatch_tokens: int = 2240
  microbatches: int = 8
  mesh: MeshConfig = _make(MeshConfig, fsdp=1)
  step: StepConfig = _make(StepConfig)

  def validate(self, where: str) -> None:
    """Raises ValueError naming the field below `where` that can't be."""
    losses.by_name(self.loss)
    self.step.validate(f"{where}.step")
    for name in ("row_length", "microbatch_tokens", "microbatches"):
      if not getattr(self, name) >= 1:
        raise ValueError(f"{where}.{name} is {getattr(self, name)}, not >= 1")


class Learner:
  """Updates a policy.

  Each host of a mesh that spans several makes the same calls with the same
  experience, and places its own part of it.

  Step order. `step(experiences, substeps=n)` splits the experience of one
  publication into n parts and makes one update of each. With n = 1 and every
  task rolled out once, each token is trained once, by the very policy that
  sampled it (Composer 2). With n = 4 (Context-1) later parts are trained by a
  policy that has moved since: a behaviour log-prob is always the one recorded
  when the token was sampled, never computed anew, so that ρ there says how far
  the earlier parts have moved the policy. With `StepConfig.proximal` the
  learner's own log-probs before the first part take its place in ρ, and the
  sampler's are corrected for by a weight. The policy version counts
  publications (`publish`), not substeps.

  Attributes:
    state: the train state; read it, never keep parts of it: an update takes
      the buffers away.
    model: the policy's configuration.
    config: the learner's.
  """

  def __init__(
    self,
    model: ModelConfig,
    params: Any,
    config: LearnerConfig,
    optimizer: OptimizerConfig | optax.GradientTransformation,
    *,
    loss: LossFn | None = None,
    reference: Any = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    version: int = 0,
  ):
    """Takes over `params`.

    Args:
      model: the policy's configuration.
      params: float32, on any devices.
      config: the learner's.
      optimizer: a configuration, or any optax transform.
      loss: takes the place of `config.loss`.
      reference: parameters that a KL term holds on to.
      mesh: takes the place of `config.mesh`.
      seed: of the learner's own random choices.
      version: policy version of `params`.

    Raises:
      ValueError: names the field that can't be.
    """
    config.validate("learner")
    self.model, self.config = model, config
    self.loss = losses.by_name(config.loss) if loss is None else loss
    if config.step.kl_weight and reference is None:
      raise ValueError(
        f"learner.step.kl_weight is {config.step.kl_weight}, but there is no"
        " reference policy to hold on to"
      )
    if config.step.proximal and (
      "proximal_logp" not in losses.accepted(self.loss)
    ):
      raise ValueError(
        "learner.step.proximal is set, but the loss takes no proximal_logp"
      )
    if config.step.bias_rate and not (
      model.moe_layers and model.router == "sigmoid"
    ):
      raise ValueError(
        f"learner.step.bias_rate is {config.step.bias_rate}, but the model has"
        " no sigmoid router whose selection bias it could change"
      )
    self._mesh = mesh or config.mesh.make()
    self._frozen = ""
    tx = optimizer
    if isinstance(tx, OptimizerConfig):
      tx.validate("optimizer")
      self._frozen, tx = tx.frozen, state.optimizer(tx)
    self._tx = tx
    for name, tree in (("params", params), ("reference", reference)):
      if tree is not None:
        state.check_params(model, tree, name)
    with jax.set_mesh(self._mesh):
      places = state.abstract(model, tx, self._mesh, frozen=self._frozen)
      self._places = jax.tree.map(lambda x: x.sharding, places)
      self.state: TrainState = self._begin(params, seed, version)
      self._reference = None
      if reference is not None:
        self._reference = jax.tree.map(
          jnp.copy, _put(reference, self._places.params)
        )
    self._train_step = make_train_step(
      model,
      tx,
      self.loss,
      config.step,
      frozen=self._frozen,
      shardings=self._places,
    )
    self._score = make_score(model, config.step)
    throughput.compilations()
    self._flops_per_token = 6.0 * throughput.active_parameters(model)

  def _begin(self, params: Any, seed: int, version: int) -> TrainState:
    def begin(params: Any) -> TrainState:
      # Copied: an update takes the buffers away, and these are the caller's.
      return state.with_optimizer(
        jax.tree.map(jnp.copy, params),
        self._tx,
        frozen=self._frozen,
        seed=seed,
        version=version,
      )

    placed = _put(params, self._places.params)
    return jax.jit(begin, out_shardings=self._places)(placed)

  @property
  def version(self) -> int:
    """Policy version of the parameters, once they are published."""
    return int(self.state.version)

  @property
  def contents(self) -> dict[str, Any]:
    """All that a checkpoint must hold to go on, as a pytree."""
    if self._reference is None:
      return {"train": self.state}
    return {"train": self.state, "reference": self._reference}

  def take(self, contents: dict[str, Any]) -> None:
    """Goes on from restored `contents`."""
    self.state = contents["train"]
    self._reference = contents.get("reference")

  def publish(self) -> int:
    """Makes the parameters the next policy version."""
    number = np.asarray(self.version + 1, np.int32)
    self.state = self.state.replace(version=_put(number, self._places.version))
    return int(number)

  def step(
    self,
    experiences: Sequence[Experience],
    *,
    substeps: int = 1,
    row_length: int | None = None,
  ) -> dict[str, float]:
    """One training step: an update of each of `substeps` parts.

    Args:
      experiences: neighbours stay together as far as that goes.
      substeps: updates; parts without a trained token make none.
      row_length: takes the place of the configured one.

    Returns:
      Metrics of the step: means weighted by trained tokens, maxima of maxima,
      counts as they stand at the end. Empty if nothing could be trained.

    Raises:
      ValueError: as `packing.pack`, or for ids that the model doesn't know.
    """
    if substeps < 1:
      raise ValueError(f"substeps is {substeps}, not >= 1")
    bounds = np.linspace(0, len(experiences), substeps + 1).round().astype(int)
    parts = [experiences[a:b] for a, b in itertools.pairwise(bounds)]
    began = time.monotonic()
    batches = [
      self._pack(part, row_length)
      for part in parts
      if any(e.trained_tokens for e in part)
    ]
    with jax.set_mesh(self._mesh):
      scored = [(self._with_scores(batch), stats) for batch, stats in batches]
      found = []
      for batch, stats in scored:
        found.append(self._update(batch, stats, began))
        began = time.monotonic()
    return _merged(found)

  def _pack(
    self, experiences: Sequence[Experience], row_length: int | None
  ) -> tuple[TokenBatch, PackingStats]:
    for segment in (s for e in experiences for s in e.segments):
      self._check(segment)
    length = row_length or self.config.row_length
    rows = max(1, self.config.microbatch_tokens // length)
    shards = self._mesh.size // self._mesh.shape.get("tensor", 1)
    # Each part of the mesh that holds rows of its own has as many.
    rows = -(-rows // shards) * shards
    batch, stats = packing.pack(
      experiences,
      row_length=length,
      microbatch_rows=rows,
      microbatches=self.config.microbatches,
      seed=int(np.asarray(self.state.rng)[-1]),
    )
    return self._place(batch), stats

  def _check(self, segment: Segment) -> None:
    """Raises ValueError for what this model can't have sampled."""
    model = self.model
    low, high = segment.ids.min(initial=0), segment.ids.max(initial=0)
    if low < 0 or high >= model.vocab_size:
      raise ValueError(
        f"a segment holds ids {low} to {high}; the model knows 0 to"
        f" {model.vocab_size - 1}"
      )
    experts = segment.experts
    if experts is not None and (
      experts.shape[1:] != (model.moe_layers, model.experts_per_token)
      or experts.max(initial=-1) >= model.experts
    ):
      raise ValueError(
        f"a segment recorded experts {experts.shape[1:]} (layers, K) up to"
        f" {experts.max(initial=-1)}; the model has {model.moe_layers} layers"
        f" with {model.experts_per_token} of {model.experts}"
      )

  def _place(self, batch: TokenBatch) -> TokenBatch:
    """On the mesh: every host has the whole batch and gives its own part."""

    def place(x: np.ndarray) -> NamedSharding:
      axes = (None, "batch", *(None,) * (x.ndim - 2))[: x.ndim]
      spec = sharding.partition(axes, x.shape, self._mesh)
      return NamedSharding(self._mesh, spec)

    return _put(batch, jax.tree.map(place, batch))

  def _with_scores(self, batch: TokenBatch) -> TokenBatch:
    if self.config.step.proximal:
      batch = batch.replace(proximal_logp=self._score(self.state.params, batch))
    if self._reference is not None:
      batch = batch.replace(reference_logp=self._score(self._reference, batch))
    return batch

  def _update(
    self, batch: TokenBatch, stats: PackingStats, began: float
  ) -> dict[str, float]:
    self.state, metrics = self._train_step(self.state, batch)
    values = {k: float(v) for k, v in jax.device_get(metrics).items()}
    seconds = time.monotonic() - began
    devices = self._mesh.devices.flat
    peak = throughput.peak_flops(devices[0])
    # Virtual devices of a CPU share its cores.
    peak *= 1 if devices[0].platform == "cpu" else self._mesh.size
    speed = stats.tokens / seconds
    share = speed * self._flops_per_token / peak if peak else 0.0
    return values | {
      "packing_fill": stats.fill,
      "tokens": float(stats.tokens),
      "trained_tokens": float(stats.trained_tokens),
      "seconds": seconds,
      "tokens_per_second": speed,
      "share_of_peak_flops": share,
      "compilations": float(throughput.compilations()),
      "memory_bytes": float(throughput.memory_bytes()),
    }


def _put(tree: Any, places: Any) -> Any:
  """Arrays at their places, also where those belong to several processes."""

  def put(x: Any, place: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and (
      place.is_fully_addressable or not x.is_fully_addressable
    ):
      return jax.device_put(x, place)
    return jax.make_array_from_callback(
      x.shape, place, lambda index: np.asarray(x[index])
    )

  return jax.tree.map(put, tree, places)


# Of a step, what is added up over its substeps, and what stands at the end.
_ADDED = ("tokens", "trained_tokens", "seconds", "effective_tokens")
_LAST = ("skipped", "compilations", "memory_bytes")


def _merged(found: Sequence[dict[str, float]]) -> dict[str, float]:
  """Metrics of a step from those of its substeps."""
  if not found:
    return {}
  weights = np.array([values["trained_tokens"] for values in found])
  merged = {}
  for name in found[0]:
    column = np.array([values[name] for values in found])
    if name in _ADDED:
      value = column.sum()
    elif name in _LAST:
      value = column[-1]
    elif name.endswith("_max"):
      value = column.max()
    else:
      value = (column * weights).sum() / weights.sum()
    merged[name] = float(value)
  merged["tokens_per_second"] = merged["tokens"] / merged["seconds"]
  return merged
