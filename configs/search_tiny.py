"""A search agent whose context is so small that it must edit it, on a CPU.

Four facts are asked for and three searches fit: what else is found needs room
that only pruning makes. Context-1 in small.

Command:   python -m launch.train --config=configs/search_tiny.py
Hardware:  2 CPU cores
Duration:  not measured to its end
Expect:    no figures yet; CI runs it with `--config.smoke`
"""

from arl_jax.runtime.config import Config


def get_config() -> Config:
  """See the fields of `Config`; every one is a flag."""
  config = Config(run_dir="runs/search_tiny")
  config.corpus.chunk_tokens = 80
  config.tasks.hops, config.tasks.train = 4, 4000
  search = config.search
  search.handles, search.results, search.snippet_tokens = 32, 4, 20
  agent = config.agent
  agent.token_budget, agent.soft_threshold, agent.hard_threshold = 320, 160, 190
  agent.observation_tokens, agent.message_tokens = 90, 36
  agent.max_turns = 12
  script = config.script
  script.diligence, script.largest_prune = 0.95, 15
  script.run, script.whole_clue = 12, 0.2
  warm = config.warm_start
  warm.episodes = 4000
  warm.opening_steps, warm.steps = 450, 1600
  warm.optimizer.decay_steps = warm.steps
  config.rl.steps = 50
  return config
