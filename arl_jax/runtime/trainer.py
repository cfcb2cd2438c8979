"""The learner's side of a run: warm start, then RL, with checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from absl import logging

from arl_jax import losses
from arl_jax.actors.jobs import Interrupted, Job
from arl_jax.checkpoints.store import CheckpointStore
from arl_jax.learner import Experience, of_group
from arl_jax.model.config import ModelConfig
from arl_jax.observability.metrics import MetricsWriter
from arl_jax.observability.progress import Progress
from arl_jax.observability.run_directory import (
  RunDirectory,
)
from arl_jax.problems.problem import Problem, demonstrated
from arl_jax.queueing.group_queue import Batch
from arl_jax.runtime import (
  learner_hosts,
  recorded_groups,
  rollout_metrics,
  warm_start,
)
from arl_jax.runtime.config import Config
from arl_jax.runtime.group_source import (
  GroupSource,
  LocalGroups,
  Replay,
)
from arl_jax.runtime.learner_hosts import LearnerHosts, RunFolder
from arl_jax.runtime.local_rollouts import LocalRollouts, heldout_jobs
from arl_jax.runtime.policies import initial_params, make_learner
from arl_jax.runtime.position import Position
from arl_jax.sharding import MeshConfig
from arl_jax.types import Episode, Group
from arl_jax.weights.publisher import open_publisher

T = TypeVar("T")


class Trainer:
  """Holds the state of one run and takes it through its phases.

  Every random choice is derived from the configured seed and the position, so
  that a run resumed from a commit goes on as if it had not stopped. Where the
  learner has several processes, all train, and the first does everything else.
  """

  def __init__(
    self,
    config: Config,
    problem: Problem,
    run: RunDirectory | RunFolder,
    progress: Progress,
    *,
    source: GroupSource | None = None,
    hosts: LearnerHosts | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    fall_back: bool = False,
  ):
    """Goes on from the newest commit of a resumed run.

    Args:
      config: resolved.
      problem: what is learned.
      run: where everything is written.
      progress: where it is shown.
      source: of groups; by default they are rolled out in this process, or
        read where `config.replay` says.
      hosts: the learner's processes; by default there is this one.
      should_stop: asked between updates and episodes.
      fall_back: an earlier commit will do if the newest is damaged.

    Raises:
      ValueError: the commit can't be used, or the problem has nobody who plays
        the warm start; says why.
      OSError: there is no room for a commit, or the weights can't be published,
        such as where another run publishes.
    """
    if config.warm_start.steps:
      demonstrated(problem)
    self.config, self.problem = config, problem
    self._progress, self._should_stop = progress, should_stop
    self.hosts = hosts or LearnerHosts()
    self.model: ModelConfig = config.policy(
      problem.renderer.tokenizer.vocab_size
    )
    self.position = Position()
    self._store = CheckpointStore(
      run.path / "checkpoints",
      keep=config.keep_checkpoints,
      keep_best=config.keep_best_checkpoints,
      quota_bytes=config.checkpoint_quota or None,
      identity={"model": dataclasses.asdict(self.model), **problem.digests()},
    )
    # Of the position, and what waited there when the run was resumed.
    self._ledger: Mapping[str, Any] | None = None
    self._queued: tuple[Group, ...] = ()
    self._begun = False
    # Rewards of the rollouts since the last commit.
    self._rewards: list[float] = []
    self._run_path = run.path
    fresh = initial_params(config, self.model)
    if run.resumed and self._store.newest is not None:
      self._restore(fresh, fall_back=fall_back)
    else:
      self.learner = make_learner(self.config, self.model, fresh, rl=False)
      self._store.check_room(self.learner.contents)
    self._publisher = open_publisher(config.weights, self._store.lineage)
    # Before the first rollout; a resumed run begins with a base.
    self._offer(wait=True)
    # What rollouts in the first process sample with, of several.
    self._gathered: Any = None
    if self.hosts.first:
      self._metrics = MetricsWriter(run.path, keep=self._is_past)
      self._rollouts = LocalRollouts(config, problem, self.model)
      self._source: GroupSource = source or self._own_source()

  def _own_source(self) -> GroupSource:
    if self.config.mode == "train_only":
      return Replay(self.config.replay)
    return LocalGroups(
      self.config,
      self.problem,
      lambda jobs: self.rollout(jobs, training=True),
    )

  def close(self) -> None:
    """Waits for what is being written. Raises OSError if that fails."""
    if self.hosts.first:
      self._metrics.close()
    try:
      if self._publisher is not None:
        self._publisher.close()
    finally:
      self._store.close()

  def _restore(self, fresh: Any, *, fall_back: bool) -> None:
    def contents(record: dict[str, Any]) -> Any:
      self.learner = make_learner(
        self.config, self.model, fresh, rl=record["rl"] > 0
      )
      return self.learner.contents

    commit = self._store.restore(contents, fall_back=fall_back)
    for message in commit.skipped:
      logging.warning("passed over: %s", message)
    record = commit.record
    if record["rl"] > self.config.rl.steps:
      raise ValueError(
        f"rl.steps is {self.config.rl.steps}, but the run has done"
        f" {record['rl']} already"
      )
    self.learner.take(commit.state)
    self.position = Position.from_record(record)
    self._ledger, self._queued = record["ledger"], commit.queue

  def _is_past(self, line: dict[str, Any]) -> bool:
    done = {"warm_start": self.position.warm_start, "rl": self.position.rl}
    return line["step"] <= done.get(line["phase"], 0)

  def commit(self) -> None:
    """Writes state and position. Raises OSError if that fails."""
    at = self.position
    record = {
      **at.to_record(),
      "version": self.learner.version,
      "ledger": self._ledger,
    }
    queue: tuple[Group, ...] = ()
    ledger = self._ledger
    if self._begun and ledger is not None:
      queue = self.hosts.alone(lambda: self._source.waiting(ledger)) or ()
    score = float(np.mean(self._rewards)) if self._rewards else None
    self._store.save(
      at.number, self.learner.contents, record, queue=queue, score=score
    )
    self._rewards.clear()

  def _check_stop(self) -> None:
    """Commits and raises `Interrupted` if the run was asked to stop."""
    if self.hosts.told(self._should_stop):
      self.commit()
      raise Interrupted

  # Warm start.

  def warm_start(self) -> None:
    """Supervised training on demonstrations, up to the configured updates."""
    steps = self.config.warm_start.steps
    if self.position.warm_start >= steps or self.position.rl:
      return
    began = time.monotonic()
    demonstrations = self._demonstrate()
    self.position.seconds["demonstrations"] = time.monotonic() - began
    self._progress.phase("warm start", steps, start=self.position.warm_start)
    began = time.monotonic()
    plan = warm_start.batches(
      self.config, demonstrated(self.problem), demonstrations
    )
    for step, (segments, length) in enumerate(plan, 1):
      if step <= self.position.warm_start:
        continue
      self._check_stop()
      # Weighed alike, and token by token: whose segments they are is no matter.
      values = self._update(
        [Experience(segments=(s,), advantage=1.0) for s in segments],
        row_length=length,
      )
      now = time.monotonic()
      self.position.seconds["warm_start"] += now - began
      began = now
      self.position.warm_start = step
      self._write(step, "warm_start", values)
      self._progress.update(step, loss=values["loss"])
      if step % self.config.checkpoint_every == 0 and step < steps:
        self.commit()
    self._publish()
    self.commit()

  def _demonstrate(self) -> list[Episode]:
    """The scripted player's episodes, as the harness records them."""
    count = self.config.warm_start.episodes
    self._progress.phase("demonstrations", count)
    play = functools.partial(
      warm_start.play,
      self.config,
      demonstrated(self.problem),
      on_done=self._progress.update,
      should_stop=self._should_stop,
    )
    return self.told(play, learner_hosts.EPISODES)

  # Reinforcement learning.

  def reinforce(self) -> None:
    """RL steps: groups, updates, publication; until the steps or tasks end."""
    config = self.config.rl
    if self.position.rl >= config.steps:
      return
    if self.position.rl == 0:
      self.learner = make_learner(
        self.config,
        self.model,
        self.learner.state.params,
        rl=True,
        version=self.learner.version,
      )
    at = self._store.lineage[-1], self.learner.version
    self.hosts.alone(
      lambda: self._source.begin(*at, self._ledger, self._queued)
    )
    self._queued, self._begun = (), True
    self._progress.phase("rl", config.steps, start=self.position.rl)
    for step in range(self.position.rl + 1, config.steps + 1):
      self._check_stop()
      began = time.monotonic()
      take = functools.partial(self._take, step, self.learner.version)
      batch = self.told(take, learner_hosts.BATCH)
      waited = time.monotonic() - began
      if not batch.groups and batch.ended:
        break
      values = self._rl_step(step, batch)
      seconds = time.monotonic() - began
      values["idle_learner"] = waited / seconds
      self._ledger = batch.ledger
      self.position.seconds["rl"] += seconds
      self.position.rl = step
      self._write(step, "rl", values)
      self._progress.update(
        step, reward=values.get("reward", 0.0), turns=values.get("turns", 0.0)
      )
      if batch.ended:
        break
      if step % self.config.checkpoint_every == 0 and step < config.steps:
        self.commit()
    self.commit()

  def _take(self, step: int, version: int) -> Batch:
    batch = self._source.take(step, version)
    recorded = self.config.rl.record_groups
    recorded |= self.config.mode == "rollout_only"
    if recorded and (batch.groups or not batch.ended):
      recorded_groups.write(self._run_path, step, batch.groups)
    return batch

  def _rl_step(self, step: int, batch: Batch) -> dict[str, float]:
    groups = batch.groups
    values = rollout_metrics.of_groups(groups, self.learner.version)
    values["queue_ready"] = batch.waiting
    values |= {f"drop_{name}": n for name, n in batch.drops.items()}
    self._rewards += [float(r) for g in groups for r in g.rewards]
    if self.config.mode == "rollout_only":
      return values
    if self.config.mode == "simulated_learner":
      time.sleep(self.config.simulated_seconds)
      self._publish()
      return values
    experiences: list[Experience] = []
    for group in groups:
      if losses.has_signal(group.rewards):
        experiences += of_group(
          group,
          baseline=self.config.rl.baseline,
          normalise_std=self.config.rl.normalise_std,
        )
    updated = self._update(experiences, substeps=self.config.rl.substeps)
    if updated:
      self._publish()
    return values | updated

  # Shared by the phases.

  def _write(self, step: int, phase: str, values: dict[str, float]) -> None:
    if self.hosts.first:
      more = self._source.metrics() if phase == "rl" else {}
      self._metrics.write(step, phase, values | more)

  def _publish(self) -> None:
    """Makes the parameters the next policy version."""
    self.learner.publish()
    self._offer()

  def _offer(self, *, wait: bool = False) -> None:
    """Has servers elsewhere find the weights, if a folder is configured."""
    if self._publisher is not None:
      self._publisher.publish(self.learner.state.params, self.learner.version)
      if wait:
        self._publisher.wait()

  def rollout(
    self,
    jobs: Sequence[Job],
    *,
    training: bool,
    on_done: Callable[[int], None] = lambda done: None,
  ) -> list[Episode | None]:
    """Rolls out jobs with the published weights."""
    params = self._gathered
    if params is None:
      params = self.learner.state.params
    if self.config.learner.mesh != MeshConfig(fsdp=1):
      params = jax.device_put(params, jax.local_devices()[0])
    before = dict(self._rollouts.tokens)
    episodes = self._rollouts.run(
      jobs,
      params,
      self.learner.version,
      training=training,
      on_done=on_done,
      should_stop=self._should_stop,
    )
    for name, value in self._rollouts.tokens.items():
      self.position.tokens[name] += value - before[name]
    return episodes

  @contextlib.contextmanager
  def sampling(self) -> Iterator[None]:
    """Inside, the first process may roll out by itself."""
    self._gathered = self.hosts.gathered(self.learner.state.params)
    try:
      yield
    finally:
      self._gathered = None

  def told(self, work: Callable[[], T], form: learner_hosts.Form[T]) -> T:
    """See `LearnerHosts.told`; an interruption commits what was reached."""
    try:
      return self.hosts.told(work, form)
    except Interrupted:
      self.commit()
      raise

  def evaluate(self, name: str) -> list[Episode]:
    """One rollout of every held-out task; always the same seeds.

    Of several processes only the first may call this, within `sampling`.

    Raises:
      Interrupted: stopped, without a commit.
      RuntimeError: an episode's infrastructure failed for good, so that the
        comparison would not be of the same tasks.
    """
    jobs = heldout_jobs(self.config, self.problem.heldout)
    self._progress.phase(f"evaluation {name}", len(jobs))
    began = time.monotonic()
    episodes = self.rollout(jobs, training=False, on_done=self._progress.update)
    self.position.seconds[f"evaluation_{name}"] = time.monotonic() - began
    whole = [e for e in episodes if e is not None]
    if len(whole) < len(jobs):
      raise RuntimeError(
        f"{len(jobs) - len(whole)} held-out episodes could not be rolled out;"
        " see the log"
      )
    return whole

  def _update(
    self,
    experiences: Sequence[Experience],
    *,
    substeps: int = 1,
    row_length: int | None = None,
  ) -> dict[str, float]:
    """Trains on them, and keeps count."""
    values = self.learner.step(
      experiences, substeps=substeps, row_length=row_length
    )
    if values:
      self.position.tokens["learner"] += values["tokens"]
      self.position.tokens["learner_seconds"] += values["seconds"]
    return values
