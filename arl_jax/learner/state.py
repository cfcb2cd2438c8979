"""What a training run carries from step to step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from arl_jax.model import transformer
from arl_jax.model.config import ModelConfig


@struct.dataclass
class TrainState:
  """A pytree; `train_step` takes and returns it, donated.

  Attributes:
    params: of the policy.
    opt_state: of the optimizer.
    step: [] int32, updates tried in the current phase.
    version: [] int32, policy version: publications so far.
    skipped: [] int32, updates refused because a gradient wasn't finite.
  """

  params: Any
  opt_state: Any
  step: jax.Array
  version: jax.Array
  skipped: jax.Array


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig:
  """AdamW with a linear warm-up and a linear decay.

  Attributes:
    learning_rate: at the top.
    warmup_steps: updates until then.
    decay_steps: updates until `final_share` of it, warm-up included; 0 keeps
      it constant.
    final_share: of the learning rate that remains.
    b1: decay of the first moment.
    b2: decay of the second moment.
    weight_decay: decoupled.
    clip_norm: largest global norm of a gradient.
  """

  learning_rate: float = 1e-3
  warmup_steps: int = 20
  decay_steps: int = 0
  final_share: float = 0.1
  b1: float = 0.9
  b2: float = 0.98
  weight_decay: float = 0.0
  clip_norm: float = 1.0


def optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """AdamW; clipping is the train step's, which reports the norm as well."""
  peak = config.learning_rate
  warm = optax.linear_schedule(
    peak / max(config.warmup_steps, 1), peak, config.warmup_steps
  )
  rest = max(config.decay_steps - config.warmup_steps, 1)
  end = peak * config.final_share if config.decay_steps else peak
  schedule = optax.join_schedules(
    [warm, optax.linear_schedule(peak, end, rest)], [config.warmup_steps]
  )
  return optax.adamw(
    schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay
  )


def create(
  model: ModelConfig, tx: optax.GradientTransformation, key: jax.Array
) -> TrainState:
  """A state with fresh parameters."""
  return with_optimizer(transformer.init(model, key), tx)


def with_optimizer(
  params: Any, tx: optax.GradientTransformation, version: int = 0
) -> TrainState:
  """A state that goes on from `params` with a fresh optimizer."""
  return TrainState(
    params=params,
    opt_state=jax.jit(tx.init)(params),
    step=jnp.zeros((), jnp.int32),
    version=jnp.asarray(version, jnp.int32),
    skipped=jnp.zeros((), jnp.int32),
  )
