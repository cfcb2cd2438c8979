"""Learner and rollout throughput of the quickstart's policy, against limits.

  python -m benchmarks.quickstart_speed

The learner is held against the peak of XLA's own float32 matmul in the same
process, counting 6 FLOPs a parameter and token; decoding against the memory
bandwidth needed for weights and caches, measured by a copy.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from arl_jax import model, sharding
from arl_jax.learner import Experience, Learner
from arl_jax.rollout.engine import Engine
from arl_jax.rollout.request import Sampling
from arl_jax.runtime.config import Config
from arl_jax.types import NO_VERSION, Segment

_REPEATS = 7


def _seconds(run: Callable[[], object]) -> float:
  """Median over repeats, the first one left out."""
  times = []
  for _ in range(_REPEATS + 1):
    began = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - began)
  return statistics.median(times[1:])


def _peak_flops() -> float:
  n = 2048
  x = jnp.ones((n, n))
  multiply = jax.jit(jnp.matmul)
  return 2 * n**3 / _seconds(lambda: multiply(x, x))


def _bandwidth() -> float:
  """Bytes a second, read and written."""
  x = jnp.ones(1 << 26)
  # In place: fresh memory would measure the page faults instead.
  add = jax.jit(lambda x: x + 1, donate_argnums=0)

  def run():
    nonlocal x
    x = add(x)
    return x

  return 2 * x.nbytes / _seconds(run)


def _segments(config: Config, vocab: int, count: int) -> list[Segment]:
  random = np.random.default_rng(0)
  segments = []
  for _ in range(count):
    n = int(random.integers(120, config.learner.row_length))
    sampled = random.random(n) < 0.12
    segments.append(
      Segment(
        ids=random.integers(0, vocab, n).astype(np.int32),
        roles=np.zeros(n, np.uint8),
        sampled=sampled,
        behaviour_logp=np.where(sampled, -8.0, 0.0).astype(np.float32),
        policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
      )
    )
  return segments


def _learner(config: Config, policy: model.ModelConfig) -> float:
  """Tokens a second of the RL train step."""
  learner = Learner(
    policy,
    model.init(policy, jax.random.key(0)),
    config.learner,
    config.rl.optimizer,
  )
  experiences = [
    Experience(segments=(segment,), advantage=1.0)
    for segment in _segments(config, policy.vocab_size, 64)
  ]
  tokens = sum(len(e.segments[0]) for e in experiences)
  return tokens / _seconds(lambda: learner.step(experiences))


def _decode(config: Config, policy: model.ModelConfig) -> tuple[float, float]:
  """Tokens a second with every slot busy, and bytes a step must move."""
  params = model.init(policy, jax.random.key(0))
  engine = Engine(
    policy, config.engine, max_length=config.agent.token_budget + 1
  )
  slots, chunk = engine.slots, engine.prefill_chunk
  placed, state = engine.place(params), engine.init_decode_state()
  rows = engine.prefill_rows
  for first in range(0, slots, rows):
    row = (0, list(range(chunk)))
    state = engine.extend(
      placed, state, dict.fromkeys(range(first, first + rows), row)
    )
  for slot in range(slots):
    state = engine.start(state, slot, Sampling(max_tokens=1 << 30, seed=slot))
  held = [state]

  def run():
    # The cache is never left: every repeat starts after the same prompt.
    length = jnp.full(slots, chunk, jnp.int32)
    held[0], result = engine.generate(placed, held[0].replace(length=length))
    return result.tokens

  tokens = slots * config.engine.decode_steps
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  return tokens / _seconds(run), float(weights + slots * engine.bytes_per_slot)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  config = Config()
  policy = config.model
  policy.vocab_size = config.corpus.vocab_size
  parameters = sharding.parameter_count(model.specs(policy))
  peak, bandwidth = _peak_flops(), _bandwidth()
  learner = _learner(config, policy)
  decode, step_bytes = _decode(config, policy)
  slots = config.engine.max_concurrent_decodes
  print(
    json.dumps(
      {
        "name": "quickstart_speed",
        "figures": {
          "parameters": parameters,
          "learner_tokens_per_second": learner,
          "learner_share_of_peak_matmul": 6 * parameters * learner / peak,
          "decode_tokens_per_second": decode,
          "decode_share_of_bandwidth": decode / slots * step_bytes / bandwidth,
        },
        "limits": {
          "peak_matmul_flops_per_second": peak,
          "bytes_per_second": bandwidth,
          "decode_bytes_per_step": step_bytes,
        },
        "aims": {},
        "met": True,
      }
    )
  )


if __name__ == "__main__":
  app.run(main)
