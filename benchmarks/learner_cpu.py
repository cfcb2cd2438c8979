"""The RL train step on SmolLM2-135M on this machine's CPU, against limits.

  python -m benchmarks.learner_cpu

One microbatch of 8 × 256 tokens through the whole step: CISPO, entropy and
every metric, gradient clipping, AdamW, float32. It is held against XLA's own
float32 matrix product in the same process, counting 6 FLOPs a parameter and
token, and, where torch is installed, against a forward and backward pass of
the same shapes in PyTorch (fused attention, no recomputation), without and
with AdamW. Weights are fresh: speed doesn't depend on them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable

import jax
import numpy as np
from absl import app

from arl_jax import model, sharding
from arl_jax.learner import (
  Experience,
  Learner,
  LearnerConfig,
  OptimizerConfig,
)
from arl_jax.runtime.host_memory import keep_freed_memory
from arl_jax.types import NO_VERSION, Role, Segment
from benchmarks.timing import interleaved, product
from configs import smollm2_135m

_ROWS, _LENGTH = 8, 256


def _experiences(vocab_size: int) -> list[Experience]:
  """Rows of random tokens, all but the first of each sampled."""
  draw = np.random.default_rng(0)
  sampled = np.arange(_LENGTH) > 0
  return [
    Experience(
      segments=(
        Segment(
          ids=draw.integers(0, vocab_size, _LENGTH, np.int32),
          roles=np.where(sampled, Role.SAMPLED, Role.PROMPT).astype(np.uint8),
          sampled=sampled,
          behaviour_logp=np.where(sampled, -10.8, 0).astype(np.float32),
          policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
        ),
      ),
      advantage=float((-1) ** row),
    )
    for row in range(_ROWS)
  ]


def _learner(config) -> Callable[[], object]:
  learner = Learner(
    config,
    model.init(config, jax.random.key(0)),
    LearnerConfig(
      row_length=_LENGTH, microbatch_tokens=_ROWS * _LENGTH, microbatches=1
    ),
    OptimizerConfig(learning_rate=1e-6),
  )
  experiences = _experiences(config.vocab_size)
  return lambda: learner.step(experiences)


def _torch(config) -> dict[str, Callable[[], object]]:
  """PyTorch's passes, if it is there."""
  if importlib.util.find_spec("torch") is None:
    return {}
  import torch

  from benchmarks import torch_llama

  torch.set_num_threads(os.cpu_count() or 1)
  policy = torch_llama.Policy(config)
  ids = np.stack([e.segments[0].ids for e in _experiences(config.vocab_size)])
  tokens = torch.from_numpy(ids).long()
  advantage = torch.tensor([[(-1.0) ** row] for row in range(_ROWS)])
  optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)

  def passes():
    optimizer.zero_grad()
    torch_llama.cispo(policy, tokens, advantage).backward()

  def update():
    passes()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()

  return {"torch_passes": passes, "torch_update": update}


def main(argv: list[str]) -> None:
  del argv
  keep_freed_memory()
  config = smollm2_135m.model()
  multiply, flops = product()
  seconds = interleaved(
    {"product": multiply, "learner": _learner(config), **_torch(config)}
  )
  peak = flops / seconds["product"]
  count = sharding.parameter_count(model.specs(config))
  speed = _ROWS * _LENGTH / seconds["learner"]
  figures = {
    "tokens_per_second": round(speed, 1),
    "share_of_peak": round(6 * count * speed / peak, 3),
  }
  limits: dict[str, float] = {"float32_matmul_flops": round(peak)}
  aims = {"share_of_peak": 0.7}
  for name in ("torch_passes", "torch_update"):
    if name in seconds:
      limits[f"{name}_tokens_per_second"] = round(
        _ROWS * _LENGTH / seconds[name], 1
      )
      figures[f"over_{name}"] = round(seconds[name] / seconds["learner"], 3)
      aims[f"over_{name}"] = 1.2
  report = {
    "name": "learner_cpu",
    "figures": figures,
    "limits": limits,
    "aims": {name: [">=", aim] for name, aim in aims.items()},
    "met": all(figures[name] >= aim for name, aim in aims.items()),
  }
  print(json.dumps(report))


if __name__ == "__main__":
  app.run(main)
