"""gpt-oss-20b: its RL update and its server on small TPU slices.

Command:   python -m launch.compile --config=configs/gpt_oss_20b.py \
             --topology=v5e:8x8 --step=train
Hardware:  compiled for v6e:4x4 and v5e:8x8, on any machine
Expect:    "fits" for train, prefill and decode, at 32k tokens a sequence
"""

import math

from arl_jax.model.config import ModelConfig, RopeConfig
from arl_jax.runtime.pod_config import PodConfig
from arl_jax.sharding import MeshConfig


def model(layers: int, experts: int) -> ModelConfig:
  """gpt-oss (model card, arXiv 2508.10925)."""
  return ModelConfig(
    vocab_size=201_088,
    width=2880,
    layers=layers,
    heads=64,
    kv_heads=8,
    head_dim=64,
    qk_norm=False,
    attention_bias=True,
    sinks=True,
    windows=(128, 0),
    experts=experts,
    experts_per_token=4,
    expert_width=2880,
    expert_bias=True,
    router_bias=True,
    swiglu_limit=7.0,
    mtp_heads=0,
    rope=RopeConfig(
      theta=150_000.0,
      kind="yarn",
      factor=32.0,
      original_length=4096,
      low=1.0,
      high=32.0,
      truncate=False,
      amplitude=0.1 * math.log(32.0) + 1,
    ),
    norm_eps=1e-5,
    tied=False,
    context_length=131_072,
    scan_layers=True,
    remat="block",
  )


def get_config() -> PodConfig:
  return PodConfig(
    model=model(layers=24, experts=32),
    train_mesh=MeshConfig(fsdp=-1, expert=4, tensor=4),
    serve_mesh=MeshConfig(fsdp=1, data=-1, expert=4, tensor=4),
    slots=64,
  )
