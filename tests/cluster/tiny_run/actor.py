from tests.cluster.tiny_run import world


def run(config, index, should_stop) -> None:
  world.started(f"actor-{index}")
  world.work(config, "actor", index, should_stop)
