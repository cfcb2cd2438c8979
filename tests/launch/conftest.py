"""What training from files needs: a tokenizer, conversations, a recipe."""

import json
import random

import pytest

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
