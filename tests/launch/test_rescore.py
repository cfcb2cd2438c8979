"""Recorded groups get the rewards of another function."""

import json
import subprocess
import sys

import numpy as np
import pytest

from arl_jax.records import from_json, to_json
from arl_jax.types import Episode, Group, Reward, Segment, StopReason, Task

REWARD = """
from arl_jax.types import Reward

def by_turns(task, episode):
  return Reward(total=float(episode.turns), parts={"turns": episode.turns})

def broken(task, episode):
  return Reward(total=float("nan"))

constant = 3
"""


def group(number):
  task = Task(task_id=f"t{number}", prompt="?", truth={})
  segment = Segment(
    ids=np.arange(4, dtype=np.int32),
    roles=np.full(4, 1, np.uint8),
    sampled=np.array([False, True, True, True]),
    behaviour_logp=np.array([0, -0.1, -0.2, -0.3], np.float32),
    policy_version=np.array([-1, 0, 0, 0], np.int32),
  )
  episodes = tuple(
    Episode(
      task_id=task.task_id,
      rollout_index=i,
      segments=(segment,),
      events=(),
      stop_reason=StopReason.ANSWERED,
      outcome={},
      turns=i + number,
      reward=Reward(total=0.5),
    )
    for i in range(2)
  )
  return Group(
    group_id=f"{number}/{task.task_id}", task=task, episodes=episodes
  )


@pytest.fixture
def rescore(tmp_path):
  (tmp_path / "run" / "groups").mkdir(parents=True)
  for step in (1, 2):
    line = json.dumps(to_json(group(step))) + "\n"
    (tmp_path / "run" / "groups" / f"{step:06d}.jsonl").write_text(line)
  (tmp_path / "my_rewards.py").write_text(REWARD)

  def run(*flags):
    return subprocess.run(
      [sys.executable, "-m", "launch.rescore", *flags],
      capture_output=True,
      text=True,
      timeout=300,
      env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
    )

  return run


def test_every_group_is_scored_again(rescore, tmp_path):
  done = rescore(
    f"--run_dir={tmp_path}/run",
    f"--out={tmp_path}/new",
    "--reward=my_rewards:by_turns",
  )
  assert done.returncode == 0, done.stderr
  assert "4 episodes: mean reward 0.5000 before, 2.0000 after" in done.stdout
  for step in (1, 2):
    (line,) = (
      (tmp_path / "new" / "groups" / f"{step:06d}.jsonl")
      .read_text()
      .splitlines()
    )
    found = from_json(json.loads(line))
    assert [float(r) for r in found.rewards] == [step, step + 1]
    old = group(step)
    assert found.group_id == old.group_id
    for a, b in zip(found.episodes, old.episodes, strict=True):
      np.testing.assert_array_equal(a.segments[0].ids, b.segments[0].ids)


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (("--reward=my_rewards:nothing",), "can't be imported"),
    (("--reward=my_rewards:constant",), "is no function"),
    (("--reward=my_rewards:broken",), "must be finite"),
    (("--reward=math:hypot",), "fails for rollout 0 of group"),
    (("--reward=builtins:print",), "no Reward"),
    (("--reward=my_rewards:by_turns", "--run_dir=nowhere"), "no recorded"),
    (("--reward=my_rewards:by_turns", "--out=."), "doesn't exist yet"),
  ],
)
def test_what_cannot_be_is_one_line(rescore, tmp_path, flags, message):
  done = rescore(f"--run_dir={tmp_path}/run", f"--out={tmp_path}/new", *flags)
  assert done.returncode == 1
  assert message in done.stderr
  assert "Traceback" not in done.stderr
  assert not (tmp_path / "new").exists()
