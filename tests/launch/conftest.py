"""What runs need: a tokenizer, conversations, a corpus, and recipes."""

import json
import random

import pytest

from tests import made_up_corpus
from tests.data import toy_chat

_OFFLINE = """
from arl_jax.data.sources import SourceConfig
from arl_jax.learner import LearnerConfig, OptimizerConfig
from arl_jax.model.config import ModelConfig
from arl_jax.runtime.offline_config import OfflineConfig

def get_config():
  return OfflineConfig(
    tokenizer={tokenizer!r},
    model=ModelConfig(
      vocab_size=1024, layers=1, width=32, head_dim=8, expert_width=32
    ),
    sources=({sources}),
    steps=24,
    batch_tokens=600,
    learner=LearnerConfig(
      loss={loss!r}, row_length=400, microbatch_tokens=800, microbatches=2
    ),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    checkpoint_every=3,
  )
"""

# The seeds of rollouts come from (seed, task, rollout index, version).
_LOOP = """
from arl_jax.runtime.config import Config

def get_config():
  c = Config(checkpoint_every=2, keep_best_checkpoints=1)
  c.corpus.path = {corpus!r}
  c.corpus.vocab_size, c.corpus.chunk_tokens = 800, 24
  c.tasks.train, c.tasks.heldout, c.tasks.clue_words = 24, 6, 2
  c.search.handles = 16
  m = c.model
  m.layers, m.width, m.head_dim, m.expert_width = 1, 32, 8, 32
  m.mtp_heads = 0
  w = c.warm_start
  w.steps, w.opening_steps, w.episodes = 60, 0, 64
  c.rl.steps, c.rl.tasks_per_step, c.rl.group_size = 12, 3, 4
  c.rl.substeps, c.rl.record_groups = 2, True
  c.engine.max_concurrent_decodes, c.engine.prefill_rows = 16, 8
  return c
"""


@pytest.fixture(scope="session")
def offline():
  """Text of a configuration, to be formatted."""
  return _OFFLINE


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
  """Folder of a tokenizer of bytes with a chat template."""
  path = tmp_path_factory.mktemp("tokenizer")
  toy_chat.tokenizer(path)
  return path


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
  folder, draw = tmp_path_factory.mktemp("chats"), random.Random(1)
  for name, count in (("a", 30), ("b", 11)):
    with open(folder / f"{name}.jsonl", "w") as file:
      for i in range(count):
        x, y = draw.randrange(100), draw.randrange(100)
        messages = [
          {"role": "user", "content": f"{name}{i}: {x} + {y}?"},
          {"role": "assistant", "content": f"{x + y}"},
        ]
        file.write(json.dumps({"messages": messages}) + "\n")
  return [folder / "a.jsonl", folder / "b.jsonl"]


@pytest.fixture(scope="session")
def rl_loop(tmp_path_factory):
  """Text of a configuration, on made-up words."""
  path = tmp_path_factory.mktemp("corpus")
  made_up_corpus.write(path)
  return _LOOP.format(corpus=str(path))
