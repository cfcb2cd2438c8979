"""Decoding SmolLM2-135M on this machine's CPU, against limits.

  python -m benchmarks.decode_cpu

The whole engine step (cache, sampling, log-probs) in float32, after prompts of
64 to 512 tokens, at 1, 16 and 64 slots. It is held against the matrix products
of the same step alone, each as XLA computes it (weights only: attention comes
on top in the engine, not in the limit); against the roofline, the larger of
weight bytes over measured bandwidth and FLOPs over the measured peak; and,
where torch and transformers are installed, against `generate` of the same model
and prompts. Weights are fresh: speed doesn't depend on them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from arl_jax import model, sharding
from arl_jax.model import ModelConfig
from arl_jax.rollout.engine import Engine, EngineConfig
from arl_jax.rollout.request import Sampling
from arl_jax.runtime.host_memory import keep_freed_memory
from benchmarks.timing import interleaved, product
from configs import smollm2_135m

_SLOTS = (1, 16, 64)
_STEPS = 16
_LONGEST = 512
_AIMS = {
  "over_dots": {1: 0.85, 16: 0.85, 64: 0.85},
  "share_of_roofline": {1: 0.5, 16: 0.4, 64: 0.4},
  "over_transformers": {1: 2.0, 16: 4.0, 64: 2.0},
}


def _prompts(slots: int, vocab_size: int) -> list[list[int]]:
  """Lengths spread evenly on a logarithmic scale from 64 to 512."""
  draw = np.random.default_rng(0)
  lengths = np.geomspace(64, _LONGEST, slots + 2)[1:-1].astype(int)
  return [draw.integers(0, vocab_size, n).tolist() for n in lengths]


def _engine(config: ModelConfig, params: Any, slots: int) -> Callable[[], Any]:
  """Decodes `_STEPS` tokens in every slot, always after the same prompts."""
  engine = Engine(
    config,
    EngineConfig(
      max_concurrent_decodes=slots,
      prefill_rows=1,
      prefill_chunk=256,
      decode_steps=_STEPS,
    ),
    max_length=_LONGEST + 128,
  )
  placed = engine.place(params)
  prompts = _prompts(slots, config.vocab_size)
  state = engine.init_decode_state()
  for slot, ids in enumerate(prompts):
    for first in range(0, len(ids), 256):
      part = ids[first : first + 256]
      state = engine.extend(placed, state, {slot: (first, part)})
    how = Sampling(max_tokens=engine.max_length, seed=slot)
    state = engine.start(state, slot, how)
  lengths = jnp.asarray([len(ids) for ids in prompts], jnp.int32)
  held = [state]

  def run() -> Any:
    # A copy: the state is donated.
    held[0] = held[0].replace(length=jnp.copy(lengths))
    held[0], result = engine.generate(placed, held[0])
    assert result.lengths.min() == _STEPS
    return held[0].length

  return run


def _dots(config: ModelConfig, params: Any, slots: int) -> Callable[[], Any]:
  """Every weight of a step times [slots, inputs], `_STEPS` times."""
  matrices = [x for x in jax.tree.leaves(params["layers"]) if x.ndim == 2] + [
    params["embed"].T.copy()
  ]
  inputs = {
    d: jax.random.normal(jax.random.key(d), (slots, d))
    for d in {x.shape[0] for x in matrices}
  }

  @jax.jit
  def step(matrices, inputs):
    # Each waits for the one before, as layers do.
    tiny = jnp.zeros(())
    for matrix in matrices:
      y = (inputs[matrix.shape[0]] + tiny) @ matrix
      tiny = y[0, 0] * 1e-20
    return tiny

  def run() -> Any:
    for _ in range(_STEPS):
      out = step(matrices, inputs).block_until_ready()
    return out

  return run


def _bandwidth() -> tuple[Callable[[], object], float]:
  """A sum over as many bytes as the model has, and their number."""
  x = jnp.ones(1 << 27)
  total = jax.jit(jnp.sum)
  return lambda: total(x), x.nbytes


def _transformers(config: ModelConfig, slots: int) -> float | None:
  """Seconds of `_STEPS` tokens by PyTorch's `generate`; None without it.

  What the same prompts take with a single token is taken off. Once only: at 64
  slots it is minutes.
  """
  if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
    return None
  import torch
  import transformers

  torch.set_num_threads(os.cpu_count() or 1)
  theirs = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=config.vocab_size,
      hidden_size=config.width,
      intermediate_size=config.dense_width,
      num_hidden_layers=config.layers,
      num_attention_heads=config.heads,
      num_key_value_heads=config.kv_heads,
      tie_word_embeddings=True,
      max_position_embeddings=2048,
    )
  ).eval()
  prompts = _prompts(slots, config.vocab_size)
  longest = max(map(len, prompts))
  ids = torch.zeros((slots, longest), dtype=torch.long)
  mask = torch.zeros_like(ids)
  for row, prompt in enumerate(prompts):
    ids[row, longest - len(prompt) :] = torch.tensor(prompt)
    mask[row, longest - len(prompt) :] = 1

  def generate(new: int) -> object:
    with torch.inference_mode():
      return theirs.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
      )

  began = time.perf_counter()
  generate(1)
  prefill = time.perf_counter() - began
  began = time.perf_counter()
  generate(1 + _STEPS)
  return time.perf_counter() - began - prefill


def main(argv: list[str]) -> None:
  del argv
  keep_freed_memory()
  config = smollm2_135m.model()
  config = dataclasses.replace(config, mtp_heads=0)
  params = model.init(config, jax.random.key(0))
  multiply, flops = product()
  read, read_bytes = _bandwidth()
  runs: dict[str, Callable[[], object]] = {"product": multiply, "read": read}
  for slots in _SLOTS:
    runs[f"engine_{slots}"] = _engine(config, params, slots)
    runs[f"dots_{slots}"] = _dots(config, params, slots)
  seconds = interleaved(runs)
  peak, bandwidth = flops / seconds["product"], read_bytes / seconds["read"]
  count = sharding.parameter_count(model.specs(config))
  figures: dict[str, float] = {}
  aims: dict[str, list[Any]] = {}
  for slots in _SLOTS:
    step = seconds[f"engine_{slots}"] / _STEPS
    roofline = max(4 * count / bandwidth, 2 * count * slots / peak)
    figures[f"tokens_per_second_{slots}"] = round(slots / step, 1)
    shares = {
      "over_dots": seconds[f"dots_{slots}"] / _STEPS / step,
      "share_of_roofline": roofline / step,
    }
    if theirs := _transformers(config, slots):
      shares["over_transformers"] = theirs / (step * _STEPS)
    for name, share in shares.items():
      figures[f"{name}_{slots}"] = round(share, 3)
      aims[f"{name}_{slots}"] = [">=", _AIMS[name][slots]]
  report = {
    "name": "decode_cpu",
    "figures": figures,
    "limits": {
      "float32_matmul_flops": round(peak),
      "read_bytes_per_second": round(bandwidth),
    },
    "aims": aims,
    "met": all(figures[name] >= aim for name, (_, aim) in aims.items()),
  }
  print(json.dumps(report))


if __name__ == "__main__":
  app.run(main)
