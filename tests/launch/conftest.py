"""What training from files needs: a tokenizer, conversations, a recipe."""

import json
import random

import pytest

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
  """A token a byte, and the marks of a chat."""
  marks = ["<|im_start|>", "<|im_end|>"]
  keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = [b for b in range(256) if b not in keep]
  letters = [chr(b) for b in keep] + [chr(256 + i) for i in range(len(rest))]
  level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
  level["trim_offsets"] = True
  flags = dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized"), False
  )
  spec = {
    "version": "1.0",
    "added_tokens": [
      {"id": i, "content": mark, "special": True, **dict.fromkeys(flags, False)}
      for i, mark in enumerate(marks)
    ],
    "pre_tokenizer": level,
    "decoder": level,
    "model": {
      "type": "BPE",
      "vocab": {t: i for i, t in enumerate([*marks, *letters])},
      "merges": [],
    },
  }
  template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
  )
  path = tmp_path_factory.mktemp("tokenizer")
  (path / "tokenizer.json").write_text(json.dumps(spec))
  (path / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": "<|im_end|>", "chat_template": template})
  )
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
