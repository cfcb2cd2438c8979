"""RL on groups that a run of quickstart recorded, without sampling anew.

Command:   make quickstart ARGS="--config.smoke --config.rl.record_groups
             --config.run_dir=runs/recorded"
           python -m launch.train --config=configs/replay_tiny.py
Hardware:  2 CPU cores, 2 GiB of memory
Duration:  1 minute
Expect:    twenty updates; ratios far from 1, since the policy is a fresh one
"""

from arl_jax.data.sources import SourceConfig
from arl_jax.learner import LearnerConfig, OptimizerConfig
from arl_jax.model.config import ModelConfig
from arl_jax.runtime.offline_config import OfflineConfig


def get_config() -> OfflineConfig:
  """See the fields of `OfflineConfig`; every one is a flag."""
  return OfflineConfig(
    run_dir="runs/replay_tiny",
    model=ModelConfig(
      vocab_size=3072, width=32, head_dim=16, scaled_embedding=True
    ),
    sources=(SourceConfig(kind="groups", path="runs/recorded/groups/*.jsonl"),),
    steps=20,
    batch_tokens=2048,
    learner=LearnerConfig(loss="cispo", row_length=512, microbatch_tokens=2048),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    checkpoint_every=5,
  )
