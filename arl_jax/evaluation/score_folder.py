"""What an evaluator leaves in a run's folder."""

from __future__ import annotations

import fcntl
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from absl import logging

from arl_jax.actors.jobs import Interrupted
from arl_jax.evaluation.best import Best
from arl_jax.evaluation.schedule import Published
from arl_jax.evaluation.scores import NAME, ScoreLog, Scores
from arl_jax.observability.run_directory import write_atomically
from arl_jax.records import to_json
from arl_jax.types import Group
from arl_jax.weights import Version


class ScoreFolder:
  """Scores, trajectories and the best version's parameters.

    evaluation/evaluations.jsonl   see `scores`
    evaluation/<version>.jsonl     a group of one episode a line
    evaluation/best/               see `Best`

  One process at a time has it. Killed at any moment, it leaves whole files.

  Attributes:
    log: of scores.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    quota_bytes: int | None,
    identity: Mapping[str, Any],
    patience: float,
    should_stop: Callable[[], bool] = lambda: False,
  ):
    """Makes the folder, if need be, and waits until no other process has it.

    Args:
      folder: in a run's folder, which must be there.
      quota_bytes: that the parameters may take, None for no limit.
      identity: of configuration and data; kept with the parameters.
      patience: seconds to wait.
      should_stop: asked while it waits.

    Raises:
      FileNotFoundError: the run's folder isn't there.
      TimeoutError: another process has the folder.
      Interrupted: `should_stop` said so.
      ValueError, OSError: what is there can't be used.
    """
    if not folder.parent.is_dir():
      raise FileNotFoundError(
        f"run_dir {folder.parent} isn't there; an evaluator needs the folder"
        " that its run's learner writes to"
      )
    folder.mkdir(exist_ok=True)
    self._folder = folder
    self._lock = _locked(folder / ".lock", patience, should_stop)
    try:
      self.log = ScoreLog(folder / NAME)
      self._best = Best(
        folder / "best", quota_bytes=quota_bytes, identity=identity
      )
    except BaseException:
      self._lock.close()
      raise

  def go_on(self, published: Published) -> None:
    """Gives up what another lineage than before takes back.

    Raises:
      OSError: that can't be written.
    """
    if self.log.lineage == published.lineage:
      return
    if self.log.lineage is not None:
      logging.info("lineage %s goes on from %d", *published[:2])
      # First: who is killed before the line is written does this again.
      self._best.abandon(published.since)
    self.log.switch(published.lineage, published.since)

  def add(
    self,
    version: Version,
    params: Any,
    groups: Sequence[Group],
    scores: Scores,
    seconds: float,
  ) -> None:
    """Records a version.

    Args:
      version: that was scored.
      params: its parameters.
      groups: one of each task.
      scores: [mean, low, high] of each metric.
      seconds: that it took.

    Raises:
      OSError: scores or trajectories can't be written.
    """
    lines = (json.dumps(to_json(group)) + "\n" for group in groups)
    write_atomically(self._folder / f"{version.number}.jsonl", "".join(lines))
    try:
      self._best.offer(version, params, scores)
    except OSError as error:
      # Scores are worth more than a commit that finds no room.
      logging.warning("version %s isn't kept: %s", version, error)
    # Last: what has a line is whole.
    self.log.add(*version, scores, seconds)

  def close(self) -> None:
    """Lets others have the folder."""
    self._best.close()
    self._lock.close()


def _locked(
  path: pathlib.Path, patience: float, should_stop: Callable[[], bool]
) -> IO[bytes]:
  """A file that this process alone has until it is closed."""
  limit = time.monotonic() + patience
  file = open(path, "ab")  # noqa: SIM115 - held until close()
  try:
    while True:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
      except BlockingIOError:
        pass
      if should_stop():
        raise Interrupted
      if time.monotonic() > limit:
        raise TimeoutError(
          f"waited {patience:g} s for another evaluator to leave {path.parent}"
        )
      time.sleep(0.2)
  except BaseException:
    file.close()
    raise
