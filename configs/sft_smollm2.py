"""Supervised training of SmolLM2-135M-Instruct, and of an MTP head beside it.

Command:   make models && python -m launch.train --config=configs/sft_smollm2.py
Hardware:  2 CPU cores, 6 GiB of memory
Duration:  30 minutes
Expect:    loss from 2 nats a token to below 1
"""

from arl_jax.data.sources import SourceConfig
from arl_jax.learner import LearnerConfig, OptimizerConfig
from arl_jax.runtime.offline_config import OfflineConfig


def get_config() -> OfflineConfig:
  """See the fields of `OfflineConfig`; every one is a flag."""
  return OfflineConfig(
    run_dir="runs/sft_smollm2",
    checkpoint="models/SmolLM2-135M-Instruct.Q4_1.gguf",
    add_mtp=True,
    sources=(SourceConfig(path="examples/data/chats.jsonl"),),
    steps=100,
    batch_tokens=2048,
    learner=LearnerConfig(
      loss="sft", row_length=512, microbatch_tokens=1024, microbatches=4
    ),
    optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=5),
    checkpoint_every=20,
    keep_checkpoints=1,
    export="runs/sft_smollm2/hf",
  )
