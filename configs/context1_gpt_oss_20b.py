"""Context-1's published run: gpt-oss-20b, 128 x 8 rollouts, contexts of 32k.

Command:   python -m launch.prepare index --source=documents --out=runs/index
           python -m launch.prepare_tasks --index=runs/index --out=tasks.jsonl
           python -m launch.train --config=configs/context1_gpt_oss_20b.py \
             --role=learner   # and the other roles: docs/cluster.md
Hardware:  a learner on v5e:8x8, servers on v6e:4x4; compiled for both by
           launch.compile --config=configs/gpt_oss_20b.py, never run
Expect:    (published) output recall .36 to .64, answers found .54 to .80
"""

from arl_jax.runtime.config import Config
from arl_jax.sharding import MeshConfig


def get_config() -> Config:
  """See the fields of `Config`; every one is a flag."""
  config = Config(
    run_dir="runs/context1_gpt_oss_20b", checkpoint="models/gpt-oss-20b"
  )
  config.corpus.index, config.tasks.path = "runs/index", "tasks.jsonl"
  config.tasks.train, config.tasks.heldout = 1_000_000, 512
  _agent(config)
  _learning(config)
  config.serve_mesh = MeshConfig(fsdp=1, data=-1, expert=4, tensor=4)
  config.engine.prefill_rows, config.engine.prefill_chunk = 1, 512
  cluster = config.cluster
  cluster.actors, cluster.environment_workers, cluster.episodes = 4, 4, 256
  cluster.servers, cluster.server_hosts, cluster.evaluators = 4, 4, 1
  cluster.learners = 16
  return config


def _agent(config: Config) -> None:
  """Budgets, tools and reward."""
  agent = config.agent
  agent.token_budget, agent.soft_threshold = 32_768, 16_384
  agent.hard_threshold, agent.max_turns = 24_326, 128
  agent.message_tokens, agent.observation_tokens = 4096, 4096
  agent.nudge_mode = "vanish"
  search = config.search
  search.handles, search.results, search.snippet_tokens = 8192, 50, 612
  search.rerank, search.grep_limit, search.max_answer = True, 5, 30
  search.beta, search.final_beta, search.beta_epochs = 4.0, 2.0, 4


def _learning(config: Config) -> None:
  """A warm start on filtered trajectories, then CISPO, strictly on-policy."""
  learner = config.learner
  learner.loss, learner.mesh = "cispo", MeshConfig(fsdp=-1, expert=4, tensor=4)
  # A row of its own for each part of v5e:8x8 that holds rows.
  learner.row_length, learner.microbatch_tokens = 32_768, 16 * 32_768
  learner.step.compute_dtype = "bfloat16"
  warm = config.warm_start
  warm.opening_steps, warm.filter = 0, True
  warm.batch_tokens = 64 * 32_768
  rl = config.rl
  rl.tasks_per_step, rl.group_size, rl.substeps = 128, 8, 4
  rl.epochs, rl.steps, rl.order = 5, 100_000, "hops"
  for phase, rate in ((warm, 1e-5), (rl, 1e-6)):
    optimizer = phase.optimizer
    optimizer.name, optimizer.learning_rate = "adamw", rate
    optimizer.decay_steps, optimizer.moment_dtype = 0, "bfloat16"
