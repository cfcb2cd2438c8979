"""Groups as actors make them of leases, and starts of a queue."""

import math

import numpy as np

from arl_jax.queueing.group_queue import Lease, Start
from arl_jax.queueing.task_source import Source
from arl_jax.types import (
  Episode,
  Event,
  Group,
  Reward,
  Role,
  Segment,
  StopReason,
  Task,
)


def start(tasks=6, **changes):
  """Of a run whose tasks are "t0", "t1" and so on."""
  values = {
    "lineage": "first",
    "version": 0,
    "seed": 7,
    "epochs": 0,
    "group_size": 2,
    "groups_per_step": 2,
    "max_staleness": 1,
    "tries": 3,
    "skip_below": -math.inf,
    "skip_above": math.inf,
    "sources": (
      Source(
        name="", weight=1.0, task_ids=tuple(f"t{i}" for i in range(tasks))
      ),
    ),
    **changes,
  }
  return Start(**values)


def a_lease(**changes):
  """Of task "t0", the first of a run."""
  values = {
    "lineage": "first",
    "number": 0,
    "attempt": 1,
    "task_id": "t0",
    "epoch": 0,
    "group_size": 2,
    "version": 0,
    **changes,
  }
  return Lease(**values)


def group(lease, versions=None, rewards=(0.0, 1.0), tokens=3, **changes):
  """A group of a lease.

  Args:
    lease: of it.
    versions: that sampled the tokens of each rollout; the lease's by default.
    rewards: of the rollouts.
    tokens: that each rollout sampled.
    **changes: of the group.
  """
  version = lease.version if versions is None else versions
  values = {
    "group_id": lease.group_id,
    "task": Task(task_id=lease.task_id, prompt="où?", truth={"ids": [1, 2]}),
    "episodes": tuple(
      episode(lease.task_id, i, version, reward, tokens)
      for i, reward in enumerate(rewards)
    ),
    **changes,
  }
  return Group(**values)


def episode(task_id, index, version, reward, tokens=3):
  """A prompt's token, then sampled ones."""
  sampled = np.arange(tokens + 1) > 0
  roles = np.where(sampled, Role.SAMPLED, Role.PROMPT).astype(np.uint8)
  logp = np.linspace(-1 / 3, -0.1, tokens + 1, dtype=np.float32)
  return Episode(
    task_id=task_id,
    rollout_index=index,
    segments=(
      Segment(
        ids=np.arange(tokens + 1, dtype=np.int32),
        roles=roles,
        sampled=sampled,
        behaviour_logp=np.where(sampled, logp, np.float32(0)),
        policy_version=np.where(sampled, version, -1).astype(np.int32),
      ),
    ),
    events=(Event(turn=0, kind="final", data={"text": "t\n"}),),
    stop_reason=StopReason.ANSWERED,
    outcome={"answer": [0.1, None]},
    turns=1,
    seed=11 + index,
    reward=None
    if reward is None
    else Reward(total=reward, parts={"recall": reward / 3}),
  )
