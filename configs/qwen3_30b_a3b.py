"""Qwen3-30B-A3B: its RL update and its server on 64 chips of v5e.

Command:   python -m launch.compile --config=configs/qwen3_30b_a3b.py \
             --topology=v5e:8x8 --step=train
Hardware:  compiled for v5e:8x8, on any machine
Expect:    "fits" for train, prefill and decode, at 32k tokens a sequence
"""

from arl_jax.model.config import ModelConfig, RopeConfig
from arl_jax.runtime.pod_config import PodConfig
from arl_jax.sharding import MeshConfig


def model() -> ModelConfig:
  """Qwen3-30B-A3B (Qwen3 report, arXiv 2505.09388)."""
  return ModelConfig(
    vocab_size=151_936,
    width=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    experts=128,
    experts_per_token=8,
    expert_width=768,
    mtp_heads=0,
    rope=RopeConfig(theta=1_000_000.0),
    norm_eps=1e-6,
    tied=False,
    context_length=40_960,
    scan_layers=True,
    remat="block",
  )


def get_config() -> PodConfig:
  return PodConfig(
    model=model(),
    train_mesh=MeshConfig(fsdp=-1, expert=4, tensor=4),
    serve_mesh=MeshConfig(fsdp=1, data=-1, expert=4, tensor=4),
    slots=64,
  )
