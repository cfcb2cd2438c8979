"""Scores recorded groups again, by another reward.

  python -m launch.rescore --run_dir=runs/one --out=runs/rescored \
    --reward=my_package.my_rewards:my_reward

What comes out is trained on with

  python -m launch.train --mode=train_only --config.replay=runs/rescored
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pathlib

from absl import app, flags

from arl_jax.actors.environments import scored
from arl_jax.runtime import recorded_groups
from arl_jax.runtime.recorded_groups import RecordedGroups
from arl_jax.types import Group, RewardFn
from launch import command

_RUN_DIR = flags.DEFINE_string("run_dir", "", "Of a run that recorded groups.")
_OUT = flags.DEFINE_string("out", "", "Folder to write, which may not exist.")
_REWARD = flags.DEFINE_string(
  "reward", "", 'Function (task, episode) -> Reward, as "package.module:name".'
)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
  reward = _reward(_REWARD.value)
  recorded = RecordedGroups(_RUN_DIR.value, "--run_dir")
  out = _out(_OUT.value)
  before: list[float] = []
  after: list[float] = []
  # All are scored before anything is written.
  steps = {}
  for step in recorded.steps:
    groups = recorded.read(step)
    steps[step] = tuple(_rescored(group, reward) for group in groups)
    before += [float(r) for group in groups for r in group.rewards]
    after += [float(r) for group in steps[step] for r in group.rewards]
  if not after:
    raise ValueError(f"--run_dir={_RUN_DIR.value} recorded no episode")
  for step, groups in steps.items():
    recorded_groups.write(out, step, groups)
  print(
    f"{len(after)} episodes: mean reward {math.fsum(before) / len(before):.4f}"
    f" before, {math.fsum(after) / len(after):.4f} after"
  )


def _rescored(group: Group, reward: RewardFn) -> Group:
  episodes = []
  for episode in group.episodes:
    try:
      found = scored(reward, group.task, episode)
    except Exception as error:  # It is anybody's code and may raise any.
      raise ValueError(
        f"--reward fails for rollout {episode.rollout_index} of group"
        f" {group.group_id}: {error!r}"
      ) from error
    episodes.append(dataclasses.replace(episode, reward=found))
  return dataclasses.replace(group, episodes=tuple(episodes))


def _out(name: str) -> pathlib.Path:
  path = pathlib.Path(name)
  if not name or path.exists():
    raise ValueError(f"--out is {name!r}; name a folder that doesn't exist yet")
  return path


def _reward(name: str) -> RewardFn:
  module, _, function = name.partition(":")
  try:
    found = getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      f"--reward is {name!r}, which can't be imported ({error}); it is like"
      " my_package.my_rewards:my_reward"
    ) from error
  if not callable(found):
    raise ValueError(f"--reward is {name!r}, which is no function")
  return found


def run() -> None:
  app.run(lambda argv: command.guarded(main, argv))


if __name__ == "__main__":
  run()
