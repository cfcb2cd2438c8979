"""SmolLM2-135M and a mixture of experts on this machine's CPU, against limits.

  python -m benchmarks.model_cpu

Training is held against XLA's own float32 matrix product in the same process,
counting 6 FLOPs a parameter and token; the memory of log-probs against the
naive form that holds all logits; a layer of experts against the dense layer
that computes as much. Weights are fresh: speed doesn't depend on them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app

from arl_jax import model, sharding
from arl_jax.model import moe
from arl_jax.runtime.host_memory import keep_freed_memory
from benchmarks.timing import interleaved, product
from configs import smollm2_135m

_ROWS, _LENGTH = 8, 256


def _train(config) -> Callable[[], object]:
  """Forward, backward and AdamW on `_ROWS` rows of random tokens."""
  params = model.init(config, jax.random.key(0))
  tx = optax.adamw(1e-5)
  ids = jax.random.randint(
    jax.random.key(1), (_ROWS, _LENGTH), 0, config.vocab_size
  )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state):
    def loss(p):
      return -model.token_logprobs(p, config, ids)[0].sum()

    gradient = jax.grad(loss)(params)
    updates, opt_state = tx.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  held = [params, tx.init(params)]

  def run():
    held[:] = step(*held)
    return held

  return run


def _peak_bytes(config, rows: int, length: int, *, naive: bool) -> int:
  """Temporary memory of the gradient of summed log-probs, beyond weights."""
  shapes = sharding.shapes(model.specs(config))
  ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)

  def total(params, ids):
    if not naive:
      return model.token_logprobs(params, config, ids)[0].sum()
    logits = model.forward(params, config, ids)[:, :-1]
    logp = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logp, ids[:, 1:, None], -1).sum()

  compiled = jax.jit(jax.grad(total)).lower(shapes, ids).compile()
  memory = compiled.memory_analysis()
  assert memory is not None
  # The gradient is a result in both.
  return memory.temp_size_in_bytes


def _layers(experts: int) -> dict[str, Callable[[], object]]:
  """A layer of experts, evenly and fully skewed, and a dense one as large."""
  width, hidden, tokens, k = 512, 1024, 4096, 2
  config = model.ModelConfig(
    vocab_size=1,
    width=width,
    experts=experts,
    experts_per_token=k,
    expert_width=hidden,
  )
  weights = sharding.initialise(moe.expert_specs(config), jax.random.key(0))
  dense = sharding.initialise(
    moe.dense_specs(config, hidden), jax.random.key(1)
  )
  x = jax.random.normal(jax.random.key(2), (tokens, width))
  gates = jnp.full((tokens, k), 1 / k)
  index = jnp.arange(tokens)[:, None] * k + jnp.arange(k)

  @jax.jit
  def mixed(weights, x, chosen):
    # Sorting even where evaluating every expert would be chosen.
    def total(weights, x):
      return (moe.grouped(weights, x, gates, chosen, config=config) ** 2).sum()

    return jax.grad(total, (0, 1))(weights, x)

  @jax.jit
  def plain(weights, x):
    def total(weights, x):
      return (moe.feed_forward(weights, config, x) ** 2).sum()

    return jax.grad(total, (0, 1))(weights, x)

  repeated = jnp.repeat(x, k, 0)
  even, skewed = index % experts, jnp.broadcast_to(jnp.arange(k), (tokens, k))
  return {
    f"even_{experts}": lambda: mixed(weights, x, even),
    f"skewed_{experts}": lambda: mixed(weights, x, skewed),
    f"dense_{experts}": lambda: plain(dense, repeated),
  }


def main(argv: list[str]) -> None:
  del argv
  keep_freed_memory()
  config = smollm2_135m.model()
  multiply, flops = product()
  seconds = interleaved({"product": multiply, "train": _train(config)})
  peak = flops / seconds["product"]
  count = sharding.parameter_count(model.specs(config))
  speed = _ROWS * _LENGTH / seconds["train"]
  layers = interleaved({**_layers(8), **_layers(32)})
  # Both forms recompute layers, so that the logits are what differs. Scanned,
  # since on a CPU XLA undoes the recomputation of layers that are written out.
  lean = dataclasses.replace(config, remat="block", scan_layers=True)
  chunked = _peak_bytes(lean, 8, 512, naive=False)
  whole = _peak_bytes(lean, 8, 512, naive=True)
  figures = {
    "train_tokens_per_second": round(speed, 1),
    "train_share_of_peak": round(6 * count * speed / peak, 3),
    "logprob_bytes": chunked,
    "logprob_memory_ratio": round(chunked / whole, 3),
  }
  for e in (8, 32):
    for routing in ("even", "skewed"):
      ratio = layers[f"{routing}_{e}"] / layers[f"dense_{e}"]
      figures[f"moe_{routing}_{e}_over_dense"] = round(ratio, 2)
  aims: dict[str, list[Any]] = {
    "train_share_of_peak": [">=", 0.75],
    "logprob_memory_ratio": ["<=", 0.4],
    "moe_even_8_over_dense": ["<=", 2.5],
    "moe_skewed_8_over_dense": ["<=", 2.5],
  }
  met = all(
    figures[name] >= aim if sign == ">=" else figures[name] <= aim
    for name, (sign, aim) in aims.items()
  )
  report = {
    "name": "model_cpu",
    "figures": figures,
    "limits": {
      "float32_matmul_flops": round(peak),
      "naive_logprob_bytes": whole,
    },
    "aims": aims,
    "met": met,
  }
  print(json.dumps(report))


if __name__ == "__main__":
  app.run(main)
