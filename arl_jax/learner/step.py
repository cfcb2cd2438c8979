"""One update: microbatches summed, divided once by global counts."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from arl_jax.learner.packing import TokenBatch
from arl_jax.learner.state import TrainState
from arl_jax.losses.policy import reduce
from arl_jax.model import logprobs, mtp, transformer
from arl_jax.model.config import ModelConfig
from arl_jax.model.rope import segment_positions
from arl_jax.types import LossFn

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(kw_only=True, slots=True)
class StepConfig:
  """Weights of the terms beside the policy loss.

  Attributes:
    balance_weight: of the routers' load-balance loss.
    mtp_weight: of the MTP module's distillation; its gradient reaches the
      module only. 0 leaves the module as it is.
    mtp_share: of each microbatch's rows that the module learns from.
    clip_norm: largest global norm of the gradient.
    compute_dtype: of the forward and backward pass, "float32" or "bfloat16";
      parameters, sums of gradients and updates stay as they are.
  """

  balance_weight: float = 1e-3
  mtp_weight: float = 1.0
  mtp_share: float = 0.25
  clip_norm: float = 1.0
  compute_dtype: str = "float32"

  def validate(self, where: str) -> None:
    """Raises ValueError naming the field below `where` that can't be."""
    if self.compute_dtype not in ("float32", "bfloat16"):
      raise ValueError(
        f"{where}.compute_dtype is {self.compute_dtype!r}, not 'float32' or"
        " 'bfloat16'"
      )


def make_train_step(
  model: ModelConfig,
  tx: optax.GradientTransformation,
  loss_fn: LossFn,
  config: StepConfig,
) -> Callable[[TrainState, TokenBatch], tuple[TrainState, Metrics]]:
  """Builds `train_step(state, batch) -> (state, metrics)`, jitted, donated.

  Gradients of every term are sums over tokens, added up over the microbatches
  and divided once by that term's count in the whole batch: the result doesn't
  depend on how the batch was cut, but for one term that is made of rows: the
  share of them that the MTP module sees. An update whose gradient isn't finite
  is skipped and counted. Metrics are means, also over the whole batch.
  """

  def train_step(
    state: TrainState, batch: TokenBatch
  ) -> tuple[TrainState, Metrics]:
    denominators = _counts(batch, config)

    def microbatch(i, carry):
      gradient, sums = carry
      part = jax.tree.map(lambda x: x[i] if x.ndim else x, batch)
      grad, more = jax.grad(_numerators, has_aux=True)(
        state.params, model, loss_fn, config, part, denominators
      )
      return jax.tree.map(jnp.add, (gradient, sums), (grad, more))

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    sums = {name: jnp.zeros(()) for name in _SUMS}
    gradient, sums = jax.lax.fori_loop(
      0, batch.microbatches, microbatch, (zeros, sums)
    )
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)
    scale = jnp.minimum(1.0, config.clip_norm / (norm + 1e-12))
    gradient = jax.tree.map(lambda g: g * scale, gradient)
    updates, opt_state = tx.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep_finite(new, old):
      return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    new_state = TrainState(
      params=keep_finite(params, state.params),
      opt_state=keep_finite(opt_state, state.opt_state),
      step=state.step + 1,
      version=state.version,
      skipped=state.skipped + jnp.where(finite, 0, 1),
    )
    return new_state, _metrics(sums, denominators, norm, new_state)

  return jax.jit(train_step, donate_argnums=0)


# Sums over tokens that the metrics are made from.
_SUMS = (
  "loss",
  "entropy",
  "ratio",
  "clipped",
  "gap",
  "k2",
  "balance",
  "mtp",
  "mtp_agree",
)


def _as_computed(params, dtype):
  """Parameters in the compute dtype, but for biases that decide by little."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x if path[-1].key == "choice_bias" else x.astype(dtype),
    params,
  )


def _mtp_rows(rows: int, config: StepConfig) -> int:
  return max(1, round(rows * config.mtp_share))


def _counts(batch: TokenBatch, config: StepConfig) -> Mapping[str, jax.Array]:
  """Denominator of each term, over the whole batch; at least 1."""
  rows = _mtp_rows(batch.ids.shape[1], config)
  seg, mask = batch.segment_ids[:, :rows], batch.mask[:, :rows]
  drafted = (seg[..., :-2] == seg[..., 2:]) & mask[..., 2:]
  counts = {
    "trained": batch.mask.sum(),
    "real": (batch.segment_ids > 0).sum(),
    "drafted": drafted.sum(),
  }
  return {k: jnp.maximum(v, 1).astype(jnp.float32) for k, v in counts.items()}


def _numerators(params, model, loss_fn, config, part, denominators):
  """Loss of a microbatch, already over global counts, and metric sums."""
  params = _as_computed(params, config.compute_dtype)
  positions = segment_positions(part.segment_ids)
  hidden, record = transformer.hidden_states(
    params, model, part.ids, positions, part.segment_ids
  )
  logp, entropy = logprobs.from_hidden(
    params,
    hidden,
    part.ids,
    part.segment_ids,
    temperature=part.temperature,
    wanted=part.mask,
  )
  per_token, stats = loss_fn(
    logp, part.behaviour_logp, part.advantage, part.mask
  )
  numerator, _ = reduce(per_token, part.mask)
  total = numerator / denominators["trained"]
  balance = jnp.zeros(())
  if model.moe_layers:
    balance = record["balance"].mean(-1).sum()
  total += config.balance_weight * balance / denominators["real"]
  drafted = jnp.zeros(()), jnp.zeros(()), jnp.zeros(())
  if model.mtp_heads and config.mtp_weight:
    rows = slice(0, _mtp_rows(part.ids.shape[0], config))
    drafted = mtp.distillation(
      params,
      model,
      hidden[rows],
      part.ids[rows],
      positions[rows],
      part.segment_ids[rows],
      part.mask[rows],
    )
    total += config.mtp_weight * drafted[0] / denominators["drafted"]
  difference = jnp.where(part.mask, logp - part.behaviour_logp, 0.0)
  sums = {
    "loss": numerator,
    "entropy": jnp.where(part.mask, entropy, 0.0).sum(),
    "ratio": stats["ratio"].sum(),
    "clipped": stats["clipped"].sum(),
    "gap": jnp.abs(difference).sum(),
    "k2": 0.5 * (difference**2).sum(),
    "balance": balance,
    "mtp": drafted[0],
    "mtp_agree": drafted[2],
  }
  return total, jax.lax.stop_gradient(sums)


def _metrics(sums, denominators, norm, state: TrainState) -> Metrics:
  per_trained = ("loss", "entropy", "ratio", "clipped", "gap", "k2")
  metrics = {k: sums[k] / denominators["trained"] for k in per_trained}
  metrics["balance"] = sums["balance"] / denominators["real"]
  metrics["mtp_loss"] = sums["mtp"] / denominators["drafted"]
  metrics["mtp_agreement"] = sums["mtp_agree"] / denominators["drafted"]
  metrics["grad_norm"] = norm
  metrics["skipped"] = state.skipped.astype(jnp.float32)
  return metrics
