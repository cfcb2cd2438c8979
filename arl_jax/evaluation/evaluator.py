"""A process that scores published versions on held-out tasks."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any, Protocol

from absl import logging

from arl_jax.actors.jobs import Interrupted
from arl_jax.checkpoints.failure import DamagedError
from arl_jax.cluster.heartbeat import Heartbeat
from arl_jax.evaluation import suites
from arl_jax.evaluation.best import policy_shapes
from arl_jax.evaluation.schedule import Published, Schedule
from arl_jax.evaluation.score_folder import ScoreFolder
from arl_jax.evaluation.scores import FOLDER
from arl_jax.observability.queue_probe import ask
from arl_jax.problems.problem import Problem, make_problem
from arl_jax.runtime.config import Config
from arl_jax.runtime.local_rollouts import LocalRollouts, heldout_jobs
from arl_jax.serving.config import read_token
from arl_jax.types import Episode, Group
from arl_jax.weights import MissingError, Subscriber, Version

# Of a version, before it is skipped.
_TRIES = 3
_POLL_SECONDS = 1.0
# Between tries.
_WAIT_SECONDS = 5.0


class Beats(Protocol):
  """What is told to the run's queue; see `Heartbeat`."""

  def progress(self) -> None: ...

  def count(self, name: str, amount: float = 1.0) -> None: ...


def run(config: Config, index: int, should_stop: Callable[[], bool]) -> None:
  """Scores each `cluster.evaluate_every`-th version until asked to stop.

  Args:
    config: of the run, resolved.
    index: of this evaluator; there is only 0.
    should_stop: asked a few times a second, and before each episode.

  Raises:
    ValueError: a field or file that can't be.
    OSError: the run's folder can't be used.
    TimeoutError: another evaluator has it.
  """
  if index != 0:
    raise ValueError(f"evaluator index is {index}, not 0: a run has one")
  with Heartbeat(config.cluster, "evaluator", index) as heartbeat:
    problem = make_problem(config)
    evaluator = Evaluator(config, problem, heartbeat, should_stop)
    try:
      evaluator.follow()
    finally:
      evaluator.close()


class Evaluator:
  """Follows the versions of a run, and holds one at a time.

  All that it leaves lies in `evaluation/` of the run's folder, which the
  learner owns: nothing is written before the learner has made the folder and
  published. A version counts as scored once its line is there; killed before
  that, it is scored again, from the same seeds.
  """

  def __init__(
    self,
    config: Config,
    problem: Problem,
    beats: Beats,
    should_stop: Callable[[], bool],
  ):
    """Reads and writes nothing yet.

    Args:
      config: of the run, resolved.
      problem: of the configuration.
      beats: told of what gets done.
      should_stop: asked between episodes.

    Raises:
      ValueError: no versions are published.
    """
    if not config.weights.folder:
      raise ValueError(
        "weights.folder is empty; name where the run publishes versions"
      )
    self._config, self._problem = config, problem
    self._beats, self._should_stop = beats, should_stop
    self._model = config.policy(problem.renderer.tokenizer.vocab_size)
    self._rollouts = LocalRollouts(config, problem, self._model)
    self._jobs = heldout_jobs(config, problem.heldout)
    self._subscriber = Subscriber(
      config.weights.folder, policy_shapes(self._model)
    )
    self._schedule = Schedule(
      config.weights.folder, config.cluster.evaluate_every
    )
    self._folder = pathlib.Path(config.run_dir) / FOLDER
    self._scored: ScoreFolder | None = None
    self._token = read_token(config.cluster.token_file)
    # That the queue named last.
    self._lineage: str | None = None
    self._given_up: set[Version] = set()

  def close(self) -> None:
    """Gives back threads and the folder."""
    self._subscriber.close()
    if self._scored is not None:
      self._scored.close()

  def follow(self) -> None:
    """Scores what is due until `should_stop` says so.

    Raises:
      OSError, ValueError: the run's folder can't be used.
      TimeoutError: another evaluator has it.
    """
    try:
      while not self._should_stop():
        self._beats.progress()
        published = self._look()
        due = None if published is None else self._due(published)
        if due is None:
          self._wait(_POLL_SECONDS)
        else:
          self._score(due)
    except Interrupted:
      return

  def _due(self, published: Published) -> Version | None:
    """What is to be scored now, if anything."""
    if self._scored is None:
      self._scored = ScoreFolder(
        self._folder,
        quota_bytes=self._config.checkpoint_quota or None,
        identity=self._identity,
        patience=self._config.cluster.patience,
        should_stop=self._should_stop,
      )
    try:
      self._scored.go_on(published)
      return self._schedule.due(published, self._scored.log, self._given_up)
    except (DamagedError, OSError) as error:
      logging.log_every_n_seconds(
        logging.WARNING, "can't tell what is to be scored: %s", 60, error
      )
      return None

  def _look(self) -> Published | None:
    """What the run that is going on has published."""
    try:
      published = self._schedule.look()
    except (DamagedError, OSError) as error:
      logging.log_every_n_seconds(
        logging.WARNING, "can't read what is published: %s", 60, error
      )
      return None
    if published is None or not self._is_current(published.lineage):
      return None
    return published

  def _is_current(self, lineage: str) -> bool:
    """Whether the learner has this lineage, as the queue says.

    In the folder there may still be what an earlier run published, which a new
    one is just about to take away.
    """
    cluster = self._config.cluster
    if not cluster.queue:
      return True
    try:
      status = ask(cluster.queue, "/status", token=self._token)
    except OSError as error:
      logging.log_every_n_seconds(
        logging.WARNING, "the queue says nothing: %s", 60, error
      )
      status = None
    named = status.get("lineage") if isinstance(status, dict) else None
    if isinstance(named, str):
      self._lineage = named
    return lineage == self._lineage

  @property
  def _identity(self) -> dict[str, Any]:
    model = dataclasses.asdict(self._model)
    return {"model": model, **self._problem.digests()}

  def _score(self, version: Version) -> None:
    """Rolls out the held-out tasks, and records what came of it."""
    assert self._scored is not None
    began = time.monotonic()
    episodes: dict[int, Episode] = {}
    why = ""
    for tried in range(1, _TRIES + 1):
      try:
        params = self._fetch(version)
        self._roll_out(params, version, episodes)
      # Also memory that runs out, and whatever a runtime raises.
      except (DamagedError, MissingError, OSError, RuntimeError) as error:
        why = f"{type(error).__name__}: {error}"
      else:
        missing = len(self._jobs) - len(episodes)
        if not missing:
          break
        why = (
          f"{missing} of {len(self._jobs)} held-out episodes could not be"
          " rolled out; see the log"
        )
      logging.warning(
        "version %s, try %d of %d: %s", version, tried, _TRIES, why
      )
      if tried < _TRIES:
        self._wait(_WAIT_SECONDS)
    else:
      self._skip(version, why)
      return
    whole = [episodes[i] for i in range(len(self._jobs))]
    scores = suites.score(
      self._problem.heldout, whole, seed=self._config.evaluation_seed
    )
    plain = {name: interval.to_json() for name, interval in scores.items()}
    seconds = time.monotonic() - began
    try:
      self._scored.add(
        version, params, self._groups(version, whole), plain, seconds
      )
    except OSError as error:
      self._given_up.add(version)
      logging.warning("scores of version %s are lost: %s", version, error)
      return
    self._beats.count("evaluations")
    logging.info("version %s: reward %s", version, plain["reward"])

  def _fetch(self, version: Version) -> Any:
    """Parameters, on the device; bit for bit what was published."""
    fetched = self._subscriber.fetch(version.number)
    if fetched.version != version:
      raise MissingError(f"{fetched.version} took the place of {version}")
    self._subscriber.verify(fetched.params)
    self._beats.progress()
    return fetched.params

  def _roll_out(
    self, params: Any, version: Version, episodes: dict[int, Episode]
  ) -> None:
    """Adds to `episodes`, by number of the task, those that it lacks."""
    lacking = [i for i in range(len(self._jobs)) if i not in episodes]
    before = dict(self._rollouts.tokens)

    def done(_: int) -> None:
      self._beats.progress()
      self._beats.count("episodes")

    found = self._rollouts.run(
      [self._jobs[i] for i in lacking],
      params,
      version.number,
      training=False,
      on_done=done,
      should_stop=self._should_stop,
    )
    for kind in ("sampled", "prefilled"):
      name = f"rollout_{kind}"
      grown = self._rollouts.tokens[name] - before[name]
      self._beats.count(f"{kind}_tokens", grown)
    episodes.update(
      {i: e for i, e in zip(lacking, found, strict=True) if e is not None}
    )

  def _groups(self, version: Version, episodes: list[Episode]) -> list[Group]:
    return [
      Group(
        group_id=f"{version.lineage}/{version.number}/{task.task_id}",
        task=task,
        episodes=(episode,),
      )
      for task, episode in zip(self._problem.heldout, episodes, strict=True)
    ]

  def _skip(self, version: Version, why: str) -> None:
    assert self._scored is not None
    logging.warning("version %s is skipped: %s", version, why)
    self._given_up.add(version)
    try:
      self._scored.log.skip(*version, why[:500])
    except OSError as error:
      logging.warning("that can't be recorded: %s", error)

  def _wait(self, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not self._should_stop():
      time.sleep(min(left, 0.2))
    self._beats.count("idle_seconds", seconds - max(left, 0.0))
    self._beats.progress()
