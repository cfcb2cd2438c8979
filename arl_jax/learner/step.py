"""One update: microbatches summed, divided once by global counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from arl_jax import losses
from arl_jax.learner import objective, statistics
from arl_jax.learner.objective import StepConfig
from arl_jax.learner.packing import TokenBatch
from arl_jax.learner.state import TrainState, is_frozen, merge, split
from arl_jax.learner.statistics import Metrics
from arl_jax.model.config import ModelConfig
from arl_jax.types import LossFn


def make_train_step(
  model: ModelConfig,
  tx: optax.GradientTransformation,
  loss_fn: LossFn,
  config: StepConfig,
  *,
  frozen: str = "",
  shardings: Any = None,
) -> Callable[[TrainState, TokenBatch], tuple[TrainState, Metrics]]:
  """Builds `train_step(state, batch) -> (state, metrics)`, jitted, donated.

  Gradients of every term are sums over tokens, added up over the microbatches
  and divided once by that term's count in the whole batch: the result doesn't
  depend on how the batch was cut, but for one term that is made of rows: the
  share of them that the MTP module sees. An update that isn't finite, or whose
  gradient isn't, is skipped and counted. Metrics are means, also over the whole
  batch.

  Args:
    model: the policy's configuration.
    tx: any optax transform, of the trained parameters.
    loss_fn: of the policy.
    config: of the other terms.
    frozen: as in `OptimizerConfig`.
    shardings: of the state, as a state; on a mesh, so that it comes out as it
      went in.
  """
  supervised = losses.is_supervised(loss_fn)

  def train_step(
    state: TrainState, batch: TokenBatch
  ) -> tuple[TrainState, Metrics]:
    counts = objective.denominators(batch, config)
    trained, kept = split(state.params, frozen)

    def loss_of(trained, part):
      return objective.numerators(
        merge(trained, kept), model, loss_fn, config, part, counts
      )

    gradient, sums = _summed(loss_of, trained, batch)
    norm = optax.tree.norm(gradient)
    scale = jnp.minimum(1.0, config.clip_norm / (norm + 1e-12))
    gradient = jax.tree.map(lambda g: g * scale, gradient)
    updates, opt_state = tx.update(gradient, state.opt_state, trained)
    finite = jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
    params = merge(optax.apply_updates(trained, updates), kept)
    if "load" in sums.added:
      params = _rebalanced(
        params, model, sums.added["load"], config.bias_rate, frozen
      )

    def keep_finite(new, old):
      return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    key = jax.random.split(jax.random.wrap_key_data(state.rng), 1)[0]
    new_state = TrainState(
      params=keep_finite(params, state.params),
      opt_state=keep_finite(opt_state, state.opt_state),
      step=state.step + 1,
      version=state.version,
      skipped=state.skipped + jnp.where(finite, 0, 1),
      rng=jax.random.key_data(key),
    )
    metrics = statistics.metrics(sums, counts, supervised=supervised)
    metrics["grad_norm"] = norm
    metrics["skipped"] = new_state.skipped.astype(jnp.float32)
    return new_state, metrics

  if shardings is None:
    return jax.jit(train_step, donate_argnums=0)
  whole = shardings.step
  return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, whole))


def _part(batch: TokenBatch, i: jax.Array) -> TokenBatch:
  """Microbatch `i`; what belongs to the whole batch stays."""
  return jax.tree.map(lambda x: x[i] if x.ndim else x, batch)


def _summed(loss_of, trained, batch):
  """Gradient and metric sums over the microbatches that hold anything."""

  def of_part(i):
    return jax.grad(loss_of, has_aux=True)(trained, _part(batch, i))

  def more(i, carry):
    gradient, sums = of_part(i)
    return (
      jax.tree.map(jnp.add, carry[0], gradient),
      statistics.combine(carry[1], sums),
    )

  shapes = jax.eval_shape(of_part, 0)
  # Gradients and sums begin at zero, maxima of what is never negative too.
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  zero_gradient = jax.tree.map(jnp.zeros_like, trained)
  return jax.lax.fori_loop(
    0, batch.microbatches, more, (zero_gradient, zeros[1])
  )


def _rebalanced(params, model, load, rate, frozen):
  """Selection biases moved by a load [MoE layers, E], but for frozen ones."""
  layers = dict(params["layers"])
  first = 0
  for stack in model.stacks():
    if not stack.layers[0].moe:
      continue
    period, repeats = len(stack.layers), max(stack.repeats, 1)
    part = load[first : first + period * repeats]
    part = part.reshape(repeats, period, -1)
    for i, name in enumerate(stack.names()):
      layer = layers[name]
      if is_frozen(f"layers/{name}/moe/choice_bias", frozen):
        continue
      bias = layer["moe"]["choice_bias"]
      moved = losses.balanced_bias(
        bias, part[:, i].reshape(bias.shape), rate=rate
      )
      layers[name] = {**layer, "moe": {**layer["moe"], "choice_bias": moved}}
    first += period * repeats
  return {**params, "layers": layers}


def make_score(
  model: ModelConfig, config: StepConfig
) -> Callable[[Any, TokenBatch], jax.Array]:
  """Builds `score(params, batch) -> logp [M, R, T]`, nats, jitted.

  As the train step computes them; 0 where nothing is trained. For proximal
  and reference log-probs.
  """

  def score(params: Any, batch: TokenBatch) -> jax.Array:
    params = objective.as_computed(params, config.compute_dtype)

    def more(i, found):
      logp, *_ = objective.score(params, model, _part(batch, i))
      return found.at[i].set(logp)

    return jax.lax.fori_loop(
      0, batch.microbatches, more, jnp.zeros(batch.mask.shape)
    )

  return jax.jit(score)
