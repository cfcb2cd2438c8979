"""A search agent whose context is so small that it must edit it, on a CPU.

Four facts are asked for and two searches fit: what else is found needs room
that only pruning makes. Context-1 in small.

Command:   python -m launch.train --config=configs/search_tiny.py
"""

from arl_jax.runtime.config import Config


def get_config() -> Config:
  """See the fields of `Config`; every one is a flag."""
  config = Config(run_dir="runs/search_tiny")
  config.corpus.chunk_tokens = 80
  config.tasks.hops, config.tasks.train = 4, 1000
  config.search.handles, config.search.results = 64, 8
  agent = config.agent
  agent.token_budget, agent.soft_threshold, agent.hard_threshold = 280, 140, 160
  agent.observation_tokens, agent.message_tokens = 80, 36
  agent.max_turns = 14
  script = config.script
  script.diligence, script.largest_prune = 0.85, 15
  warm = config.warm_start
  warm.steps, warm.optimizer.decay_steps = 1200, 1200
  config.rl.steps = 100
  return config
