"""An MTP module for a published model, distilled on text that is at hand.

Half of the text is what the Python installation says about itself, half is an
agent's tool calls: both are what `speculative` lets the model continue, but no
row occurs in both. Nothing is downloaded.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from arl_jax import model
from arl_jax.envs.search.corpus import python_documents
from arl_jax.learner import (
  Experience,
  Learner,
  LearnerConfig,
  OptimizerConfig,
  StepConfig,
)
from arl_jax.model import ModelConfig
from arl_jax.types import NO_VERSION, Role, Segment

_ROW = 256
_ROWS_A_STEP = 4
_TOOLS = (
  ("search", {"query": "", "limit": 5}),
  ("read_document", {"document": "", "page": 1}),
  ("search_in", {"document": "", "query": ""}),
  ("prune", {"keep": ["", ""]}),
)


_documents = functools.cache(python_documents)


class Encoder(Protocol):
  """What tokenizers have in common."""

  def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...


def text_rows(
  encoder: Encoder, length: int, *, part: int, seed: int
) -> Iterator[list[int]]:
  """Rows of consecutive tokens of half of all documents, shuffled, for ever."""
  documents = _documents()[part::2]
  draw = np.random.default_rng(seed)
  while True:
    for i in draw.permutation(len(documents)):
      ids = encoder.encode(documents[i].text[:20_000])
      for first in range(0, len(ids) - length + 1, 4 * length):
        yield ids[first : first + length]


def agent_rows(encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
  """Rows that begin a chat in which an assistant makes many tool calls."""
  titles = [d.title for d in _documents()]
  draw = np.random.default_rng(seed)
  while True:
    topics = [titles[i] for i in draw.integers(len(titles), size=3)]
    lines = [_call(draw, topics) for _ in range(length // 8)]
    text = (
      "<|im_start|>user\nFind what the documentation says about"
      f" {', '.join(topics)}. Make one tool call a line.<|im_end|>\n"
      "<|im_start|>assistant\n" + "\n".join(lines)
    )
    yield encoder.encode(text, allow_special=True)[:length]


def _call(draw: np.random.Generator, topics: Sequence[str]) -> str:
  name, arguments = _TOOLS[draw.integers(len(_TOOLS))]

  def some(value: Any) -> Any:
    if isinstance(value, list):
      return [some(v) for v in value]
    if isinstance(value, str):
      return topics[int(draw.integers(len(topics)))]
    return int(draw.integers(1, 9))

  filled = {k: some(v) for k, v in arguments.items()}
  return json.dumps({"name": name, "arguments": filled})


def frequent_ids(encoder: Encoder, count: int, vocab_size: int) -> np.ndarray:
  """The most frequent ids of all text, and all that tool calls are made of."""
  seen = np.zeros(vocab_size, np.int64)
  for document in _documents():
    np.add.at(seen, encoder.encode(document.text), 1)
  rows = agent_rows(encoder, _ROW, seed=1)
  for _ in range(64):
    np.add.at(seen, next(rows), 1)
  return np.sort(np.argsort(-seen, kind="stable")[:count])


def _experience(ids: Sequence[int]) -> Experience:
  sampled = np.arange(len(ids)) > 0
  segment = Segment(
    ids=np.asarray(ids, np.int32),
    roles=np.where(sampled, Role.SAMPLED, Role.PROMPT).astype(np.uint8),
    sampled=sampled,
    behaviour_logp=np.zeros(len(ids), np.float32),
    policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
  )
  return Experience(segments=(segment,), advantage=1.0)


def distil(
  config: ModelConfig, params: Any, encoder: Encoder, steps: int
) -> Any:
  """Trains a fresh module (in `params`), and nothing else, for `steps`."""
  learner = Learner(
    config,
    params,
    LearnerConfig(
      loss="sft",
      row_length=_ROW,
      microbatch_tokens=_ROWS_A_STEP * _ROW,
      microbatches=1,
      step=StepConfig(mtp_weight=1.0, mtp_share=1.0),
    ),
    OptimizerConfig(
      name="muon",
      # There are few updates, so they are large.
      learning_rate=2e-2,
      muon_learning_rate=4e-2,
      warmup_steps=2,
      decay_steps=steps,
      frozen=r"^(?!mtp/)",
    ),
  )
  agent = agent_rows(encoder, _ROW, seed=1)
  text = text_rows(encoder, _ROW, part=0, seed=1)
  for step in range(steps):
    rows = [next(source) for source in (agent, text) * (_ROWS_A_STEP // 2)]
    values = learner.step(list(map(_experience, rows)))
    logging.info("distillation %d of %d: %s", step + 1, steps, values)
  return jax.tree.map(jnp.copy, learner.state.params["mtp"])


def module(
  config: ModelConfig,
  params: Any,
  encoder: Encoder,
  *,
  steps: int,
  path: str,
) -> tuple[ModelConfig, Any]:
  """The model with a distilled module, which `path` (if any) keeps."""
  config, params = model.add_mtp(config, params, jax.random.key(0))
  file = pathlib.Path(path)
  if path and file.exists():
    flat, tree = jax.tree.flatten(params["mtp"])
    with np.load(file) as kept:
      new = [jnp.asarray(kept[f"arr_{i}"]) for i in range(len(flat))]
    return config, {**params, "mtp": jax.tree.unflatten(tree, new)}
  mtp = distil(config, params, encoder, steps)
  if path:
    np.savez(file, *map(np.asarray, jax.tree.leaves(mtp)))
  return config, {**params, "mtp": mtp}
