"""The echo problem with rewards that differ within a group."""

from arl_jax.types import Reward
from tests.actors import echo_problem


class Problem(echo_problem.Problem):
  def reward(self, task, episode):
    return Reward(total=float(episode.seed % 7))
