"""Kimi K2, one trillion parameters: its RL update and its server on a v5p pod.

Command:   python -m launch.compile --config=configs/kimi_k2.py \
             --topology=v5p:8x8x16 --step=train
Hardware:  compiled for v5p:8x8x16 (1,024 chips), on any machine
Expect:    "fits" for train, prefill and decode, at 32k tokens a sequence
"""

import math

from arl_jax.model.config import ModelConfig, RopeConfig
from arl_jax.runtime.pod_config import PodConfig
from arl_jax.sharding import MeshConfig


def model() -> ModelConfig:
  """Kimi K2 (arXiv 2507.20534); the text model of K2.5 has the same shape."""
  return ModelConfig(
    vocab_size=163_840,
    width=7168,
    layers=61,
    heads=64,
    kv_heads=64,
    head_dim=192,
    rope_dim=64,
    value_dim=128,
    latent_rank=512,
    query_rank=1536,
    qk_norm=False,
    # YaRN's correction of the softmax for this factor, squared.
    score_scale=(0.1 * math.log(32.0) + 1) ** 2,
    dense_layers=1,
    dense_width=18_432,
    experts=384,
    experts_per_token=8,
    expert_width=2048,
    shared_experts=1,
    router="sigmoid",
    gate_scale=2.827,
    mtp_heads=0,
    rope=RopeConfig(
      theta=50_000.0,
      kind="yarn",
      factor=32.0,
      original_length=4096,
      low=1.0,
      high=1.0,
      interleaved=True,
    ),
    norm_eps=1e-6,
    tied=False,
    context_length=131_072,
    scan_layers=True,
    remat="block",
  )


def get_config() -> PodConfig:
  return PodConfig(
    model=model(),
    train_mesh=MeshConfig(fsdp=-1, expert=16, tensor=8),
    serve_mesh=MeshConfig(fsdp=1, data=-1, expert=16, tensor=8),
    microbatches=2,
    slots=512,
    prefill_rows=128,
  )
