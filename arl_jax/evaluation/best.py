"""Parameters of the version that scored best, as a commit."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from arl_jax import sharding
from arl_jax.checkpoints.commit_folder import CommitFolder
from arl_jax.checkpoints.store import CheckpointStore, Commit
from arl_jax.evaluation.scores import FOLDER
from arl_jax.model import transformer
from arl_jax.model.config import ModelConfig
from arl_jax.weights import Version

# The best one, and the best before it: a run that goes back behind the former
# still has the latter.
_KEEP = 2


class Best:
  """Keeps commits whose scores rise, so that the newest is the best one."""

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    quota_bytes: int | None,
    identity: Mapping[str, Any],
  ):
    """Opens the folder, which is created if needed.

    Args:
      folder: local.
      quota_bytes: that all commits may take, None for no limit.
      identity: see `CheckpointStore`.

    Raises:
      OSError: it can't be created.
    """
    self._store = CheckpointStore(
      folder, keep=_KEEP, quota_bytes=quota_bytes, identity=identity
    )
    self._folder = CommitFolder(folder)

  def offer(
    self, version: Version, params: Any, scores: Mapping[str, Any]
  ) -> None:
    """Commits a version unless a better one is there.

    Args:
      version: at least the newest one here (see `abandon`).
      params: its parameters.
      scores: JSON values for the record; "reward" is [mean, low, high].

    Raises:
      OSError: it can't be written.
    """
    (reward, *_) = scores["reward"]
    there = self._folder.scores()
    own = there.pop(version.number, None)
    # Of equal ones the later is better, as for other commits.
    if reward is None or reward < max(there.values(), default=-math.inf):
      return
    if own is not None:
      # Scored again: by a run that goes on from it, or after a crash.
      self._folder.remove(version.number)
    record = {
      "version": version.number,
      "lineage": version.lineage,
      "checksum": version.checksum,
      "scores": dict(scores),
    }
    self._store.save(version.number, params, record, score=reward, wait=True)

  def abandon(self, since: int) -> None:
    """Removes versions beyond one that the run has gone back to."""
    for number in self._folder.own_numbers:
      if number > since:
        logging.info("version %d was given up; its commit goes", number)
        self._folder.remove(number)

  def close(self) -> None:
    """Gives back threads."""
    self._store.close()


def load_best(run_dir: str | os.PathLike[str], model: ModelConfig) -> Commit:
  """The best version of a run that has ended.

  Args:
    run_dir: of the run.
    model: of its policy, with the size of the vocabulary.

  Returns:
    A commit; `state` has the parameters, in float32, and `record` says which
    version they are, and its scores.

  Raises:
    ValueError: none was kept, or it doesn't fit.
  """
  folder = pathlib.Path(run_dir) / FOLDER / "best"
  if not folder.is_dir():
    raise ValueError(f"{folder} isn't there: no version of the run was scored")
  store = CheckpointStore(folder, keep=_KEEP)
  try:
    return store.restore(policy_shapes(model))
  finally:
    store.close()


def policy_shapes(model: ModelConfig) -> Any:
  """Parameters of a policy, on the first device."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    sharding.shapes(transformer.specs(model)),
  )
