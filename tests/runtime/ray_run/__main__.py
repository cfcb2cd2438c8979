"""Supervises small processes: python -m tests.runtime.ray_run JSON."""

import json
import sys

from arl_jax.runtime.actor_config import ActorConfig
from arl_jax.runtime.ray_cluster import RayProcesses, RaySigns
from arl_jax.runtime.supervisor import Supervisor
from launch import command
from tests.runtime.ray_run import world

MODULES = {
  role: (f"tests.runtime.ray_run.{role}", False)
  for role in ("queue", "learner", "actor", "server")
}


def main() -> int:
  should_stop = command.stop_on_signals("stopping all")
  config = ActorConfig()
  for name, value in json.loads(sys.argv[1]).items():
    owner = config.cluster.ray if name in ("address", "server") else None
    setattr(owner or config.cluster, name, value)
  config.cluster.validate()
  with (
    RayProcesses(config, MODULES) as processes,
    RaySigns(config.cluster) as signs,
  ):
    supervisor = Supervisor(
      processes,
      config.cluster,
      signs,
      opened=(world.FOLDER / "steps").exists,
      should_stop=should_stop,
    )
    return supervisor.run()


if __name__ == "__main__":
  sys.exit(main())
