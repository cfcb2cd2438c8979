"""Supervised training of a small fresh policy on a file of conversations.

Command:   make models && python -m launch.train --config=configs/sft_tiny.py
Hardware:  2 CPU cores, 2 GiB of memory
Duration:  4 minutes
Expect:    loss from 10.8 to about 2 nats a token
"""

from arl_jax.data.sources import SourceConfig
from arl_jax.learner import LearnerConfig, OptimizerConfig
from arl_jax.model.config import ModelConfig
from arl_jax.runtime.offline_config import OfflineConfig


def get_config() -> OfflineConfig:
  """See the fields of `OfflineConfig`; every one is a flag."""
  return OfflineConfig(
    run_dir="runs/sft_tiny",
    # Its tokenizer and chat template; the policy is a fresh one.
    tokenizer="models/SmolLM2-135M-Instruct.Q4_1.gguf",
    model=ModelConfig(width=64, heads=2, head_dim=32, scaled_embedding=True),
    sources=(SourceConfig(path="examples/data/chats.jsonl"),),
    steps=60,
    batch_tokens=2048,
    learner=LearnerConfig(
      loss="sft", row_length=512, microbatch_tokens=1024, microbatches=4
    ),
    optimizer=OptimizerConfig(learning_rate=3e-3),
    checkpoint_every=20,
  )
