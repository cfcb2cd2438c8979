"""SmolLM2-135M-Instruct: the smallest published model, on one machine.

Command:   make models && python -m benchmarks.model_cpu
Hardware:  2 CPU cores, 8 GiB of memory
Duration:  3 minutes
Expect:    140 tokens a second, 0.78 of the peak of XLA's matrix product
"""

from arl_jax.learner import OptimizerConfig, StepConfig
from arl_jax.model.config import ModelConfig, RopeConfig
from arl_jax.runtime.pod_config import PodConfig
from arl_jax.sharding import MeshConfig


def model() -> ModelConfig:
  """SmolLM2-135M (arXiv 2502.02737)."""
  return ModelConfig(
    vocab_size=49_152,
    width=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    qk_norm=False,
    experts=0,
    dense_width=1536,
    mtp_heads=0,
    rope=RopeConfig(theta=100_000.0),
    norm_eps=1e-5,
    context_length=8192,
  )


def get_config() -> PodConfig:
  return PodConfig(
    model=model(),
    train_mesh=MeshConfig(fsdp=1),
    serve_mesh=MeshConfig(fsdp=1),
    sequence_length=256,
    rows_per_shard=8,
    microbatches=1,
    step=StepConfig(compute_dtype="float32"),
    optimizer=OptimizerConfig(learning_rate=1e-5),
    slots=16,
    prefill_chunk=64,
  )
