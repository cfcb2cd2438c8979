"""SmolLM2-135M-Instruct becomes a search agent, on a CPU.

A published model with its own tokenizer and chat format: it is shown how the
tools are used, then learns from rewards. Only its upper layers are trained.

Command:   make models &&
           python -m launch.train --config=configs/search_smollm2.py
Hardware:  2 CPU cores, 10 GiB of memory
Duration:  about an hour, by the parts that were measured
Expect:    after the warm start a held-out reward of 0.6 and no malformed answer
           (64 tasks); RL was not run to its end yet
"""

from arl_jax.runtime.config import Config

# Embeddings and the lower two thirds: what a layer learns from above it needs
# no gradient, which makes an update half again as fast.
_FROZEN = r"^embed|^layers/0(0\d|1\d)/"


def get_config() -> Config:
  """See the fields of `Config`; every one is a flag."""
  config = Config(
    run_dir="runs/search_smollm2",
    checkpoint="models/SmolLM2-135M-Instruct.Q4_1.gguf",
  )
  config.tasks.train, config.tasks.heldout = 1000, 64
  search = config.search
  search.tools = ("search_corpus", "prune_chunks")
  search.handles, search.results, search.snippet_tokens = 32, 3, 24
  agent = config.agent
  agent.token_budget, agent.soft_threshold = 1280, 640
  agent.hard_threshold, agent.max_turns = 960, 6
  agent.message_tokens, agent.observation_tokens = 64, 110
  config.script.diligence = 1.0
  engine = config.engine
  engine.max_concurrent_decodes, engine.prefill_rows = 16, 4
  engine.prefill_chunk = 128
  learner = config.learner
  # Two episodes a row, four a microbatch.
  learner.row_length, learner.microbatch_tokens = 1536, 3072
  warm = config.warm_start
  warm.opening_steps, warm.steps, warm.episodes = 0, 60, 240
  warm.batch_tokens = 2400
  rl = config.rl
  rl.steps, rl.tasks_per_step, rl.group_size = 5, 4, 8
  for phase, rate in ((warm, 2e-4), (rl, 3e-5)):
    optimizer = phase.optimizer
    optimizer.name, optimizer.learning_rate = "adamw", rate
    optimizer.frozen, optimizer.decay_steps = _FROZEN, phase.steps
  config.checkpoint_every, config.keep_checkpoints = 30, 1
  return config
