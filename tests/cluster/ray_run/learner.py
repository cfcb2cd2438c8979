"""Takes steps of real groups, and writes down what they held."""

import json
import time

from arl_jax.actors.jobs import Interrupted
from arl_jax.cluster.heartbeat import Heartbeat
from arl_jax.queueing.group_queue import NotBegun, Start
from arl_jax.queueing.task_source import Source
from arl_jax.queueing.transport import learner_queue
from tests.cluster.ray_run import world

STEPS, PER_STEP = 8, 2


def run(config, index, should_stop, *, resume, overwrite, fall_back) -> None:
  world.started(config, "learner-0", *(["resume"] if resume else []))
  path, steps = world.folder(config) / "steps", []
  if path.exists():
    steps = [json.loads(line) for line in path.read_text().splitlines()]
  ledger = steps[-1]["ledger"] if steps else None
  source = Source(name="", weight=1.0, task_ids=("a", "b", "c"))
  start = {
    "lineage": f"run-{len(steps)}-{time.time_ns()}",
    "seed": config.seed,
    "epochs": 0,
    "group_size": 2,
    "groups_per_step": PER_STEP,
    "max_staleness": 1000,
    "tries": 3,
    "skip_below": -1e9,
    "skip_above": 1e9,
    "sources": (source,),
  }
  with (
    Heartbeat(config.cluster, "learner", 0) as heart,
    learner_queue(config.cluster) as queue,
  ):
    queue.begin(Start(**start, version=len(steps), ledger=ledger))
    (pid,) = (r["pid"] for r in queue.roles() if r["role"] == "queue")
    world.started(config, "queue-0", str(pid))
    while len(steps) < STEPS:
      if should_stop():
        raise Interrupted
      held = world.folder(config) / f"hold-{len(steps)}"
      while held.exists() and not should_stop():
        heart.progress()
        time.sleep(0.05)
      try:
        batch = queue.take(len(steps), len(steps), timeout=1.0)
      except NotBegun:
        queue.begin(Start(**start, version=len(steps), ledger=ledger))
        continue
      heart.progress()
      if batch is None:
        continue
      ledger = batch.ledger
      groups = [
        [g.group_id, len(g.episodes), int(g.episodes[0].segments[0].ids.sum())]
        for g in batch.groups
      ]
      steps.append({"groups": groups, "ledger": ledger})
      with open(path, "a") as file:
        file.write(json.dumps(steps[-1]) + "\n")
    kind = type(queue).__name__
    (world.folder(config) / "learned").write_text(
      f"{kind} {queue.status()['state']}"
    )
