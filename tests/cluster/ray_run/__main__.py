"""Supervises small processes: python -m tests.cluster.ray_run FOLDER JSON."""

import json
import sys

from arl_jax.actors.config import ActorConfig
from arl_jax.cluster.supervisor import Supervisor
from arl_jax.runtime.ray_cluster import RayProcesses, RaySigns
from launch import command
from tests.cluster.ray_run import world

MODULES = {
  role: (f"tests.cluster.ray_run.{role}", False)
  for role in ("queue", "learner", "actor", "server")
}


def main() -> int:
  should_stop = command.stop_on_signals("stopping all")
  config = ActorConfig()
  config.corpus.path = sys.argv[1]
  for name, value in json.loads(sys.argv[2]).items():
    is_of_ray = hasattr(config.cluster.ray, name)
    owner = config.cluster.ray if is_of_ray else config.cluster
    setattr(owner, name, value)
  config.cluster.validate()
  with (
    RayProcesses(config, MODULES) as processes,
    RaySigns(config.cluster) as signs,
  ):
    supervisor = Supervisor(
      processes,
      config.cluster,
      signs,
      opened=(world.folder(config) / "steps").exists,
      should_stop=should_stop,
    )
    return supervisor.run()


if __name__ == "__main__":
  sys.exit(main())
