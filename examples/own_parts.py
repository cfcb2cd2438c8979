"""A run with a loss, a reward and a problem of one's own.

  python -m examples.own_parts --run_dir=runs/own_parts

Nothing is registered: parts are functions and objects that are passed in.
"""

from __future__ import annotations

import dataclasses

from absl import app, flags

from arl_jax.evaluation.experiment import run_experiment
from arl_jax.observability.progress import Progress
from arl_jax.observability.run_directory import RunDirectory
from arl_jax.problems.search import SearchProblem
from arl_jax.runtime.config import Config
from arl_jax.types import Episode, Reward, Task

_RUN_DIR = flags.DEFINE_string("run_dir", "runs/own_parts", "Where it writes.")


class BriefSearch(SearchProblem):
  """The search problem with a reward that also charges for tokens."""

  def __init__(self, config: Config):
    super().__init__(config)
    base = self.reward

    def reward(task: Task, episode: Episode) -> Reward:
      whole = base(task, episode)
      charge = 0.001 * episode.trained_tokens
      parts = {**whole.parts, "token_charge": charge}
      return Reward(total=whole.total - charge, parts=parts)

    self.reward = reward


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  config = Config(smoke=True, run_dir=_RUN_DIR.value)
  config.learner.loss = "examples.own_loss:tight_cispo"
  config.resolve()
  problem = BriefSearch(config)
  with (
    RunDirectory.open(
      config.run_dir,
      config=dataclasses.asdict(config),
      data=problem.digests(),
    ) as run,
    Progress() as progress,
  ):
    summary = run_experiment(
      config, problem, run, progress, should_stop=lambda: False
    )
  print(summary["after"]["reward"])


if __name__ == "__main__":
  app.run(main)
