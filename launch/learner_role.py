"""The learner of a run: in a process of its own, or with all the rest in it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

from arl_jax.cluster.heartbeat import Heartbeat
from arl_jax.evaluation import suites
from arl_jax.evaluation.experiment import run_experiment
from arl_jax.observability import provenance
from arl_jax.observability.progress import Progress
from arl_jax.observability.run_directory import Mode, RunDirectory
from arl_jax.problems.problem import make_problem
from arl_jax.queueing.transport import learner_queue
from arl_jax.runtime import demonstrations
from arl_jax.runtime.config import Config
from arl_jax.runtime.distributed_job import refuse_other
from arl_jax.runtime.group_source import Replay
from arl_jax.runtime.learner_hosts import LearnerHosts, RunFolder
from arl_jax.runtime.queue_groups import QueueGroups

# Fields that may differ when a run goes on.
MUTABLE = (
  *("rl.steps", "rl.epochs", "steps", "checkpoint_every", "export"),
  *("keep_checkpoints", "keep_best_checkpoints", "checkpoint_quota"),
  *("weights.folder", "weights.base_every"),
  *("weights.quota_bytes", "weights.dtype", "cluster", "serve_mesh"),
)


def run(
  config: Config,
  index: int,
  should_stop: Callable[[], bool],
  *,
  resume: bool = False,
  overwrite: bool = False,
  fall_back: bool = False,
) -> None:
  """Takes a run from where it stands to its report, with groups from its queue.

  Args:
    config: resolved.
    index: of the process, of `cluster.learners`.
    should_stop: asked between updates and episodes.
    resume: goes on with the run in the folder; what this and the next two are
      for the first process counts.
    overwrite: empties the folder first.
    fall_back: an earlier commit will do if the newest is damaged.

  Raises:
    ValueError, OSError: says what can't be.
    Interrupted: stopped, after a commit.
    TimeoutError: no groups came in time.
  """
  with contextlib.ExitStack() as stack:
    shown = None
    if index:
      shown = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
    progress = stack.enter_context(Progress(shown))
    text = train(
      config,
      progress,
      should_stop,
      index=index,
      mode=open_mode(resume, overwrite),
      fall_back=fall_back,
    )
  if not index:
    print(text)


def train(
  config: Config,
  progress: Progress,
  should_stop: Callable[[], bool],
  *,
  index: int = 0,
  mode: Mode,
  fall_back: bool,
) -> str:
  """See `run`; returns what is to be shown in the end."""
  with contextlib.ExitStack() as stack:
    heartbeat = None
    if config.cluster.actors:
      heartbeat = Heartbeat(config.cluster, "learner", index)
      stack.enter_context(heartbeat)
    hosts = LearnerHosts(
      config.cluster,
      index,
      on_wait=heartbeat.progress if heartbeat is not None else lambda: None,
    )
    # Before anything else asks for the devices.
    stack.enter_context(hosts)
    progress.phase("corpus and tasks", 1)
    # Before the folder is touched: what can't be used costs nothing.
    hosts.check(config.learner.mesh.make())
    if config.replay and hosts.first:
      Replay(config.replay)
    problem = make_problem(config)
    shown = config.warm_start.steps and config.warm_start.demonstrations
    if shown and mode != "resume" and hosts.first:
      demonstrations.read(config, problem)
    progress.update(1, tasks=len(problem.train))
    should_stop, source = _watched(should_stop, heartbeat, hosts), None
    if heartbeat is not None and hosts.first:
      heartbeat.progress()
      queue = learner_queue(config.cluster)
      stack.enter_context(queue)
      source = QueueGroups(config, problem, queue, heartbeat, should_stop)
    digests = problem.digests()
    folder, fall_back = _opened(config, digests, mode, fall_back, hosts, stack)
    summary = run_experiment(
      config,
      problem,
      folder,
      progress,
      source=source,
      hosts=hosts,
      should_stop=should_stop,
      fall_back=fall_back,
    )
  table = suites.table(summary) if "after" in summary else ""
  return f"{table}\nreport: {config.run_dir}/report.html"


def _watched(
  should_stop: Callable[[], bool],
  heartbeat: Heartbeat | None,
  hosts: LearnerHosts,
) -> Callable[[], bool]:
  """The same; whoever asks gets on with the work."""

  def asked() -> bool:
    if heartbeat is not None:
      heartbeat.progress()
    hosts.progress()
    return should_stop()

  return asked


def _opened(
  config: Config,
  digests: dict[str, str],
  mode: Mode,
  fall_back: bool,
  hosts: LearnerHosts,
  stack: contextlib.ExitStack,
) -> tuple[RunDirectory | RunFolder, bool]:
  """The run's folder, and whether an earlier commit will do.

  Raises:
    ValueError: the first process has another configuration, or other data.
  """
  opened: list[RunDirectory] = []
  given = provenance.plain(dataclasses.asdict(config))
  # Not what each host has in its own way.
  del given["cluster"]

  def open_first() -> dict[str, Any]:
    run = stack.enter_context(open_run(config, digests, mode))
    opened.append(run)
    how = {"resumed": run.resumed, "fall_back": fall_back}
    return {**how, "made": {"config": given, "data": digests}}

  said = hosts.told(open_first)
  if hosts.first:
    return opened[0], fall_back
  here = {"config": given, "data": digests}
  refuse_other(said["made"], here, f"learner {hosts.index}")
  run_dir = pathlib.Path(config.run_dir)
  return RunFolder(run_dir, said["resumed"]), said["fall_back"]


def open_mode(resume: bool, overwrite: bool) -> Mode:
  """Raises ValueError if both are asked for."""
  if resume and overwrite:
    raise ValueError("--resume and --overwrite exclude each other")
  if resume:
    return "resume"
  return "overwrite" if overwrite else "new"


def open_run(config: Any, data: dict[str, str], mode: Mode) -> RunDirectory:
  """The folder of a run. Raises as `RunDirectory.open`."""
  resolved = dataclasses.asdict(config)
  # A run may be moved: where it lies is not part of what it is.
  del resolved["run_dir"]
  return RunDirectory.open(
    config.run_dir,
    config=resolved,
    data=data,
    mode=mode,
    mutable_on_resume=MUTABLE,
  )
