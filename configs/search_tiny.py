"""A search agent whose context is so small that it must edit it, on a CPU.

Two facts are asked for and one search fits: a second one needs room that only
pruning makes. Context-1 in small.

Command:   python -m launch.train --config=configs/search_tiny.py
Hardware:  2 CPU cores, 3 GiB of memory
Duration:  34 minutes beside another training run
Expect:    held-out reward from about 0.8 to 1.4, prune accuracy above 0.9;
           without prune_chunks the same policy has 1.0
"""

from arl_jax.runtime.config import Config


def get_config() -> Config:
  """See the fields of `Config`; every one is a flag."""
  config = Config(run_dir="runs/search_tiny")
  config.corpus.chunk_tokens = 80
  config.tasks.train = 10_000
  search = config.search
  search.handles, search.results, search.snippet_tokens = 32, 7, 20
  agent = config.agent
  agent.token_budget, agent.soft_threshold, agent.hard_threshold = 184, 92, 92
  # Evaluations show none, and a policy this small would miss it there.
  agent.nudge = ""
  agent.observation_tokens, agent.message_tokens = 150, 36
  agent.max_turns = 10
  script = config.script
  script.diligence, script.largest_prune = 0.97, 15
  script.run, script.whole_clue = 12, 0.2
  script.largest_answer = search.max_answer
  learner = config.learner
  learner.row_length, learner.microbatch_tokens = 640, 2560
  warm = config.warm_start
  # Each demonstration is met about once, so that none is learned by heart.
  warm.episodes = config.tasks.train
  warm.opening_steps, warm.steps, warm.batch_tokens = 450, 2000, 2400
  warm.optimizer.decay_steps = warm.steps
  config.rl.steps = 50
  return config
