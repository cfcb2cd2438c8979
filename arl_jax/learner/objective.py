"""What an update minimises: the policy loss and the terms beside it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from arl_jax import losses, sharding
from arl_jax.learner import statistics
from arl_jax.learner.packing import TokenBatch
from arl_jax.losses.reduction import REDUCTIONS
from arl_jax.model import logprobs, mtp, transformer
from arl_jax.model.config import ModelConfig
from arl_jax.model.fused import fuse
from arl_jax.model.rope import segment_positions
from arl_jax.types import LossFn

KL_FORMS = ("reward", "loss")


@dataclasses.dataclass(kw_only=True, slots=True)
class StepConfig:
  """How terms become an update, beside the policy loss itself.

  Attributes:
    reduction: of the policy loss: "token_mean", "constant_length" or
      "sequence_mean" (see `losses.reduce`).
    constant_length: tokens, for "constant_length".
    proximal: the ratio's denominator is the learner's own log-prob when the
      step started, computed by one more forward pass; terms are weighted by
      min(proximal/μ, 2). Otherwise the recorded behaviour log-prob μ.
    icepop: tokens with proximal/μ (without `proximal`: π/μ) outside [0.5, 5]
      teach nothing (`losses.icepop_weight`).
    log_gap_max: nats a token; sequences with a negative advantage whose mean
      log(μ/π) is above it teach nothing (`losses.sequence_weight`). 0: all do.
    kl_weight: of the KL to the reference policy; needs one.
    kl_form: "reward": k1 of each token is taken off its advantage; "loss": k2
      is added to the loss (see `losses.kl`).
    entropy_weight: of the entropy bonus.
    balance_weight: of the routers' load-balance loss, over sequences.
    z_weight: of the routers' z-loss.
    bias_rate: change of a sigmoid router's selection bias with each update,
      towards an even load (`losses.balanced_bias`); 0 leaves it.
    mtp_weight: of the MTP module's distillation; its gradient reaches the
      module only. 0 leaves the module as it is.
    mtp_share: of each microbatch's rows that the module learns from.
    clip_norm: largest global norm of the gradient.
    compute_dtype: of the forward and backward pass, "float32" or "bfloat16";
      parameters, sums of gradients and updates stay as they are.
  """

  reduction: str = "token_mean"
  constant_length: int = 0
  proximal: bool = False
  icepop: bool = False
  log_gap_max: float = 0.0
  kl_weight: float = 0.0
  kl_form: str = "reward"
  entropy_weight: float = 0.0
  balance_weight: float = 1e-4
  z_weight: float = 0.0
  bias_rate: float = 0.0
  mtp_weight: float = 1.0
  mtp_share: float = 0.25
  clip_norm: float = 1.0
  compute_dtype: str = "float32"

  def validate(self, where: str) -> None:
    """Raises ValueError naming the field below `where` that can't be."""
    for name, known in (
      ("reduction", REDUCTIONS),
      ("kl_form", KL_FORMS),
      ("compute_dtype", ("float32", "bfloat16")),
    ):
      value = getattr(self, name)
      if value not in known:
        raise ValueError(f"{where}.{name} is {value!r}, none of {list(known)}")
    if self.reduction == "constant_length" and self.constant_length < 1:
      raise ValueError(
        f"{where}.constant_length is {self.constant_length}; the reduction"
        " 'constant_length' needs the tokens it divides by"
      )
    for name in (
      *("log_gap_max", "kl_weight", "balance_weight", "z_weight"),
      *("bias_rate", "mtp_weight"),
    ):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f"{where}.{name} is {getattr(self, name)}, not >= 0")
    if not math.isfinite(self.entropy_weight):
      raise ValueError(f"{where}.entropy_weight is {self.entropy_weight}")
    if not 0 < self.mtp_share <= 1:
      raise ValueError(f"{where}.mtp_share is {self.mtp_share}, not in (0, 1]")
    if not self.clip_norm > 0:
      raise ValueError(f"{where}.clip_norm is {self.clip_norm}, not > 0")

  def supervised(self) -> "StepConfig":
    """The same without what compares with a sampler or another policy."""
    return dataclasses.replace(
      self,
      reduction="token_mean",
      proximal=False,
      icepop=False,
      log_gap_max=0.0,
      kl_weight=0.0,
      entropy_weight=0.0,
    )


def as_computed(params: Any, dtype: str) -> Any:
  """Parameters in the compute dtype, but for biases that decide by little.

  On a CPU, projections of one input are one matrix.
  """
  mesh = sharding.ambient_mesh()
  whole = mesh is None or mesh.size == 1
  if whole and sharding.platform() == "cpu":
    params = fuse(params)
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x if path[-1].key == "choice_bias" else x.astype(dtype),
    params,
  )


def _mtp_rows(rows: int, config: StepConfig) -> int:
  return max(1, round(rows * config.mtp_share))


def denominators(
  batch: TokenBatch, config: StepConfig
) -> Mapping[str, jax.Array]:
  """What each kind of term is divided by, over the whole batch; at least 1."""
  rows = _mtp_rows(batch.ids.shape[1], config)
  seg, mask = batch.segment_ids[:, :rows], batch.mask[:, :rows]
  drafted = (seg[..., :-2] == seg[..., 2:]) & mask[..., 2:]
  trained = batch.mask.sum()
  counts = {
    "trained": trained,
    "real": (batch.segment_ids > 0).sum(),
    "drafted": drafted.sum(),
    "policy": {
      "token_mean": trained,
      "constant_length": batch.episodes * config.constant_length,
      "sequence_mean": batch.trained_episodes,
    }[config.reduction],
  }
  return {k: jnp.maximum(v, 1).astype(jnp.float32) for k, v in counts.items()}


def score(
  params: Any,
  model: ModelConfig,
  part: TokenBatch,
  *,
  entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
  """Of a microbatch: logp and entropy [R, T], trunk output, routers' record."""
  hidden, record = transformer.hidden_states(
    params,
    model,
    part.ids,
    segment_positions(part.segment_ids),
    part.segment_ids,
    part.experts,
  )
  logp, entropy = logprobs.from_hidden(
    params,
    hidden,
    part.ids,
    part.segment_ids,
    temperature=part.temperature,
    wanted=part.mask,
    entropy_gradient=entropy_gradient,
  )
  return logp, entropy, hidden, record


def numerators(
  params: Any,
  model: ModelConfig,
  loss_fn: LossFn,
  config: StepConfig,
  part: TokenBatch,
  counts: Mapping[str, jax.Array],
) -> tuple[jax.Array, statistics.Sums]:
  """Share of a microbatch in the loss, and what its metrics are made from.

  Args:
    params: of the policy.
    model: its configuration.
    loss_fn: of the policy.
    config: of the other terms.
    part: one microbatch; arrays [R, T].
    counts: from `denominators`, of the whole batch.
  """
  params = as_computed(params, config.compute_dtype)
  logp, entropy, hidden, record = score(
    params, model, part, entropy_gradient=bool(config.entropy_weight)
  )
  per_token, stats = _policy_terms(logp, loss_fn, config, part)
  policy, _ = losses.reduce(
    per_token,
    part.mask,
    how=config.reduction,
    constant_length=config.constant_length,
    episode_weight=part.episode_weight,
    episodes=part.trained_episodes,
  )
  total = policy / counts["policy"]
  bonus = losses.entropy_bonus(entropy, part.mask).sum()
  if config.entropy_weight:
    total += config.entropy_weight * bonus / counts["trained"]
  sums = {"loss": policy, "entropy": -bonus}
  if part.reference_logp is not None and config.kl_form == "loss":
    kl = losses.kl_estimates(logp, part.reference_logp, part.mask)
    total += config.kl_weight * kl["k2"].sum() / counts["trained"]
  if model.moe_layers:
    routed = _router_terms(model, config, record, part)
    total += config.balance_weight * routed["balance"] / counts["real"]
    total += config.z_weight * routed["z"] / counts["real"]
    sums |= routed
  if model.mtp_heads and config.mtp_weight:
    sums |= _mtp_terms(params, model, config, part, hidden)
    total += config.mtp_weight * sums["mtp"] / counts["drafted"]
  found = statistics.of_tokens(logp, stats, part)
  found = statistics.Sums(added=found.added | sums, largest=found.largest)
  return total, jax.lax.stop_gradient(found)


def _policy_terms(logp, loss_fn, config, part):
  """Per-token loss [R, T] after every correction, and the loss's stats."""
  advantage = part.advantage
  if part.reference_logp is not None and config.kl_form == "reward":
    advantage = losses.penalised(
      advantage,
      logp,
      part.reference_logp,
      part.mask,
      weight=config.kl_weight,
    )
  arrays = {
    "segment_ids": part.segment_ids,
    "proximal_logp": part.proximal_logp,
  }
  wanted = {name: arrays[name] for name in losses.accepted(loss_fn)}
  per_token, stats = loss_fn(
    logp, part.behaviour_logp, advantage, part.mask, **wanted
  )
  if jnp.shape(per_token) != part.mask.shape:
    raise ValueError(
      f"the loss gives terms of shape {jnp.shape(per_token)}, not one a token,"
      f" {part.mask.shape} (python -m arl_jax.testing.check_loss)"
    )
  start = part.proximal_logp
  start = jax.lax.stop_gradient(logp) if start is None else start
  if config.icepop:
    per_token *= losses.icepop_weight(start, part.behaviour_logp, part.mask)
  if config.log_gap_max:
    # By the episode's own advantage: a KL in the reward is of single tokens.
    per_token *= losses.sequence_weight(
      start,
      part.behaviour_logp,
      part.advantage,
      part.mask,
      log_gap_max=config.log_gap_max,
      segment_ids=part.segment_ids,
    )
  return per_token, stats


def _router_terms(model, config, record, part):
  """Sums over tokens of the means over layers, and the experts' load."""
  real = part.segment_ids > 0
  terms = {
    "balance": record["balance"].mean(-1).sum(),
    "z": jnp.where(real, record["z"].mean(-1), 0.0).sum(),
  }
  if config.bias_rate:
    chosen = record["experts"]
    layer = jnp.arange(model.moe_layers)[:, None] * model.experts
    count = jnp.broadcast_to(real[..., None, None], chosen.shape)
    load = jax.ops.segment_sum(
      count.reshape(-1).astype(jnp.float32),
      (chosen + layer).reshape(-1),
      model.moe_layers * model.experts,
    )
    terms["load"] = load.reshape(model.moe_layers, model.experts)
  return terms


def _mtp_terms(params, model, config, part, hidden):
  rows = slice(0, _mtp_rows(part.ids.shape[0], config))
  loss, _, agree = mtp.distillation(
    params,
    model,
    hidden[rows],
    part.ids[rows],
    segment_positions(part.segment_ids[rows]),
    part.segment_ids[rows],
    part.mask[rows],
  )
  return {"mtp": loss, "mtp_agree": agree}
