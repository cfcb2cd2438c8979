"""An MTP module for a published model, distilled on text that is at hand.

Half of the text is what the Python installation says about itself, half is an
agent's tool calls; of each, the model itself continues a part, as drafts are of
its own text. Nothing is downloaded.
"""

from __future__ import annotations

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
from arl_jax.rollout.engine import Engine, EngineConfig
from arl_jax.rollout.request import Sampling
from arl_jax.types import NO_VERSION, Role, Segment

ROW = 256
_ROWS_A_STEP = 4
# Of a row that the model continues, its prompt.
_GIVEN = 64
_TOOLS = (
  ("search", {"query": "", "limit": 5}),
  ("read_document", {"document": "", "page": 1}),
  ("search_in", {"document": "", "query": ""}),
  ("prune", {"keep": ["", ""]}),
)


class Encoder(Protocol):
  def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...


def text_rows(
  encoder: Encoder, length: int, *, part: int, seed: int
) -> Iterator[list[int]]:
  """Rows of consecutive tokens of half of all documents, shuffled, for ever."""
  documents = python_documents()[part::2]
  draw = np.random.default_rng(seed)
  while True:
    for i in draw.permutation(len(documents)):
      ids = encoder.encode(documents[i].text[:20_000])
      for first in range(0, len(ids) - length + 1, 4 * length):
        yield ids[first : first + length]


def agent_rows(encoder: Encoder, length: int, seed: int) -> Iterator[list[int]]:
  """Rows that begin a chat in which an assistant makes many tool calls."""
  titles = [d.title for d in python_documents()]
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
      return topics[draw.integers(len(topics))]
    return int(draw.integers(1, 9))

  filled = {k: some(v) for k, v in arguments.items()}
  return json.dumps({"name": name, "arguments": filled})


def frequent_ids(encoder: Encoder, count: int, vocab_size: int) -> np.ndarray:
  """The most frequent ids of all text, and all that tool calls are made of."""
  seen = np.zeros(vocab_size, np.int64)
  for document in python_documents():
    np.add.at(seen, encoder.encode(document.text), 1)
  rows = agent_rows(encoder, ROW, seed=1)
  for _ in range(64):
    np.add.at(seen, next(rows), 1)
  return np.sort(np.argsort(-seen, kind="stable")[:count])


def continued(
  config: ModelConfig, params: Any, prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
  """Rows of `ROW` tokens: prompts and what the model samples after them."""
  engine = Engine(
    config,
    EngineConfig(
      max_concurrent_decodes=len(prompts), prefill_chunk=_GIVEN, prefill_rows=8
    ),
    max_length=ROW,
  )
  placed = engine.place(params)
  state = engine.init_decode_state()
  for first in range(0, len(prompts), engine.prefill_rows):
    part = prompts[first : first + engine.prefill_rows]
    rows = {first + i: (0, ids) for i, ids in enumerate(part)}
    state = engine.extend(placed, state, rows)
  for slot in range(len(prompts)):
    how = Sampling(max_tokens=ROW - _GIVEN, seed=1000 + slot)
    state = engine.start(state, slot, how)
  found = [list(ids) for ids in prompts]
  active = True
  while active:
    state, result = engine.generate(placed, state)
    for ids, row, n in zip(found, result.tokens, result.lengths, strict=True):
      ids += row[:n].tolist()
    active = result.active.any()
  return found


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


def _rows(
  config: ModelConfig, params: Any, encoder: Encoder, own: int
) -> Iterator[list[int]]:
  """By turns: the model's own text, agents' calls, documents."""
  sources = [
    text_rows(encoder, _GIVEN, part=0, seed=1),
    agent_rows(encoder, _GIVEN, seed=2),
  ]
  prompts = [next(sources[i % 2]) for i in range(own)]
  # The later rows of a prompt of 64 tokens need one that goes on with calls.
  sampled = continued(config, params, prompts) if own else []
  agent = agent_rows(encoder, ROW, seed=3)
  text = text_rows(encoder, ROW, part=0, seed=3)
  while True:
    for ids in sampled:
      yield ids
      yield next(agent)
      yield ids
      yield next(text)


def distil(
  config: ModelConfig, params: Any, encoder: Encoder, *, steps: int, own: int
) -> Any:
  """Trains a fresh module (in `params`), and nothing else, for `steps`.

  Args:
    config: with an MTP module.
    params: of the policy.
    encoder: of texts.
    steps: updates, of 4 rows of 256 tokens each.
    own: rows that the model samples itself.
  """
  learner = Learner(
    config,
    params,
    LearnerConfig(
      loss="sft",
      row_length=ROW,
      microbatch_tokens=_ROWS_A_STEP * ROW,
      microbatches=1,
      step=StepConfig(mtp_weight=1.0, mtp_share=1.0),
    ),
    OptimizerConfig(
      name="muon",
      learning_rate=2e-3,
      warmup_steps=3,
      decay_steps=steps,
      frozen=r"^(?!mtp/)",
    ),
  )
  rows = _rows(config, params, encoder, own)
  for step in range(steps):
    values = learner.step(
      [_experience(next(rows)) for _ in range(_ROWS_A_STEP)]
    )
    logging.info("distillation %d of %d: %s", step + 1, steps, values)
  return jax.tree.map(jnp.copy, learner.state.params["mtp"])


def module(
  config: ModelConfig,
  params: Any,
  encoder: Encoder,
  *,
  steps: int,
  own: int,
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
  mtp = distil(config, params, encoder, steps=steps, own=own)
  if path:
    np.savez(file, *map(np.asarray, jax.tree.leaves(mtp)))
  return config, {**params, "mtp": mtp}
