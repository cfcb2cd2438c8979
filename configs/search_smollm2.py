"""SmolLM2-135M learns to search, in its own chat format.

Command:   python -m launch.train --config=configs/search_smollm2.py
Hardware:  2 CPU cores, 8 GiB of memory; `make models` first
Duration:  not measured
Expect:    see the run's report
"""

from arl_jax.runtime.config import Config


def get_config() -> Config:
  """The search problem in a context of 2,048 tokens."""
  config = Config(
    run_dir="runs/search_smollm2",
    checkpoint="models/SmolLM2-135M-Instruct.Q4_1.gguf",
  )
  config.agent.token_budget = 2048
  config.agent.soft_threshold, config.agent.hard_threshold = 1400, 1800
  config.agent.message_tokens, config.agent.observation_tokens = 96, 320
  config.agent.max_turns = 6
  config.search.snippet_tokens, config.search.results = 48, 4
  config.learner.row_length = 2048
  config.tasks.train, config.tasks.heldout = 400, 48
  warm = config.warm_start
  warm.opening_steps, warm.steps, warm.episodes = 0, 60, 120
  warm.batch_tokens = 4096
  warm.optimizer.name, warm.optimizer.learning_rate = "adamw", 2e-4
  warm.optimizer.decay_steps = 60
  config.rl.steps, config.rl.tasks_per_step, config.rl.group_size = 20, 4, 4
  config.rl.optimizer.learning_rate = 1e-5
  config.engine.max_concurrent_decodes, config.engine.prefill_rows = 16, 4
  config.learner.step.balance_weight = 0.0
  return config
