from tests.cluster.tiny_run import world


def run(config, index, should_stop) -> None:
  world.started(f"server-{index}")
  world.work(config, "server", index, should_stop)
