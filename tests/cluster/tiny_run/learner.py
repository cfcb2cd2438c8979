from arl_jax.actors.jobs import Interrupted
from tests.cluster.tiny_run import world


def run(config, index, should_stop, **options) -> None:
  given = sorted(name for name, value in options.items() if value)
  world.started(f"learner-{index}", *given)
  (world.FOLDER / "opened").touch()
  world.work(config, "learner", index, should_stop)
  with open(world.FOLDER / "stopped", "a") as file:
    file.write("learner-0\n")
  raise Interrupted
