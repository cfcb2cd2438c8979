"""A run of agents that begins from a published model's files."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

from arl_jax import checkpoints, model
from arl_jax.observability import metrics
from tests.launch.programs import train
from tests.serving.programs import CONFIG, ROOT

TOKENIZER = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY = 49152

pytestmark = [
  pytest.mark.slow,
  pytest.mark.nightly,
  pytest.mark.skipif(not TOKENIZER.exists(), reason="make models fetches it"),
]

# The tools' descriptions alone are some 500 tokens.
_SIZES = """
  c.checkpoint, c.tokenizer = {checkpoint!r}, {tokenizer!r}
  c.corpus.path, c.corpus.chunk_tokens = {corpus!r}, 80
  a = c.agent
  a.token_budget, a.soft_threshold, a.hard_threshold = 1000, 800, 900
  a.max_turns, a.message_tokens, a.observation_tokens = 2, 60, 120
  c.learner.row_length = 1000
  c.tasks.train, c.tasks.heldout, c.tasks.hops = 4, 2, 1
  w.steps, w.opening_steps, w.episodes, w.batch_tokens = 2, 0, 4, 1000
  c.rl.steps, c.rl.tasks_per_step, c.rl.group_size = 1, 1, 2
  c.rl.substeps = 1
  return c
"""


def test_from_files_to_an_evaluation(tmp_path, rl_loop):
  shape = dataclasses.replace(CONFIG, vocab_size=VOCABULARY)
  params = model.init(shape, jax.random.key(0))
  checkpoints.save_hf(tmp_path / "checkpoint", shape, params)
  sizes = _SIZES.format(
    checkpoint=str(tmp_path / "checkpoint"),
    tokenizer=str(TOKENIZER),
    # Words that the tokenizer knows, unlike the recipe's.
    corpus=str(ROOT / "docs"),
  )
  config = tmp_path / "loop.py"
  config.write_text(rl_loop.rstrip().removesuffix("return c").rstrip() + sizes)
  run_dir = tmp_path / "run"
  process = train(config, run_dir, stderr=subprocess.PIPE)
  _, err = process.communicate(timeout=1500)
  assert process.returncode == 0, err[-3000:]
  lines = metrics.read(run_dir / "metrics.jsonl")
  assert [(x["phase"], x["step"]) for x in lines] == [
    ("warm_start", 1),
    ("warm_start", 2),
    ("rl", 1),
  ]
  resolved = json.loads((run_dir / "config.json").read_text())["config"]
  # The model is the checkpoint's, whatever the recipe says.
  assert resolved["model"]["vocab_size"] == VOCABULARY
  assert resolved["model"]["dense_width"] == 64
  done = subprocess.run(
    [
      *(sys.executable, "-m", "launch.evaluate", f"--run_dir={run_dir}"),
      *("--rollouts=2", "--tasks=1"),
    ],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert json.loads(done.stdout)["rollouts"] == 2
