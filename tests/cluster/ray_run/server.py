"""Lives until it is asked to stop."""

import time

from arl_jax.cluster.heartbeat import Heartbeat
from tests.cluster.ray_run import world


def run(config, index, should_stop) -> None:
  world.started(config, f"server-{index}", config.cluster.replica_urls[index])
  with Heartbeat(config.cluster, "server", index) as heart:
    while not should_stop():
      heart.progress()
      time.sleep(0.1)
