"""Parameters of a run's policy: to begin with, and as committed."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import jax

from arl_jax import checkpoints, losses, sharding
from arl_jax.agents.harness import derive_seed
from arl_jax.checkpoints.store import CheckpointStore
from arl_jax.learner import Learner
from arl_jax.model import transformer
from arl_jax.model.config import ModelConfig
from arl_jax.runtime.config import Config


def initial_params(config: Config, model: ModelConfig) -> Any:
  """What training begins from: a checkpoint's, or drawn from the seed.

  Raises:
    ValueError, OSError: the checkpoint can't be read.
  """
  if config.checkpoint:
    return checkpoints.load(config.checkpoint, dtype="float32")[1]
  return transformer.init(model, jax.random.key(config.seed))


def make_learner(
  config: Config,
  model: ModelConfig,
  params: Any,
  *,
  rl: bool,
  version: int = 0,
) -> Learner:
  """Of a phase, which has an optimizer of its own that starts afresh.

  Args:
    config: of the run.
    model: the policy.
    params: to begin with.
    rl: reinforcement learning, else the warm start.
    version: of the parameters.
  """
  learner = config.learner
  if not rl:
    learner = dataclasses.replace(learner, step=learner.step.supervised())
  return Learner(
    model,
    params,
    learner,
    (config.rl if rl else config.warm_start).optimizer,
    loss=None if rl else losses.sft,
    reference=params if rl and learner.step.kl_weight else None,
    seed=derive_seed(config.seed, "learner", rl),
    version=version,
  )


def load_policy(
  run_dir: str | os.PathLike[str],
  config: Config,
  model: ModelConfig,
  number: int | None = None,
) -> tuple[Any, dict[str, Any]]:
  """Parameters of a commit, and its record; the run may go on meanwhile.

  Args:
    run_dir: of the run.
    config: of the run.
    model: of its policy.
    number: of the commit; None takes the newest.

  Raises:
    ValueError: there is none, or it is damaged or doesn't fit.
    OSError: it can't be read.
  """
  folder = pathlib.Path(run_dir) / "checkpoints"
  if not folder.is_dir():
    raise ValueError(f"{folder} isn't there: the run has committed nothing")

  def contents(record: dict[str, Any]) -> Any:
    empty = jax.tree.map(
      lambda x: jax.numpy.zeros(x.shape, x.dtype),
      sharding.shapes(transformer.specs(model)),
    )
    learner = make_learner(config, model, empty, rl=record["rl"] > 0)
    return learner.contents

  store = CheckpointStore(folder, keep=1, writes=False)
  try:
    commit = store.restore(contents, number=number)
  finally:
    store.close()
  return commit.state["train"].params, commit.record
