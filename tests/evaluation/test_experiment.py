"""Which evaluations are read back, and what is refused."""

import json
import types as pytypes

import pytest

from arl_jax.evaluation import experiment
from arl_jax.types import Episode, Reward, StopReason, Task

TASKS = tuple(
  Task(task_id=f"t{i}", prompt="p", truth={"relevant": []}, split="heldout")
  for i in range(3)
)


def episode(task, total=0.0):
  return Episode(
    task_id=task.task_id,
    rollout_index=0,
    segments=(),
    events=(),
    stop_reason=StopReason.ANSWERED,
    outcome={},
    turns=1,
    reward=Reward(total=total),
  )


class Trainer:
  def __init__(self, rl=0):
    self.problem = pytypes.SimpleNamespace(heldout=TASKS)
    self.position = pytypes.SimpleNamespace(rl=rl)
    self.evaluated = []

  def evaluate(self, name):
    self.evaluated.append(name)
    return [episode(t, total=float(i)) for i, t in enumerate(TASKS)]


class Run:
  def __init__(self, path):
    self.path = path

  def write_text(self, name, text):
    (self.path / name).write_text(text)


def groups(path):
  lines = (path / "trajectories.jsonl").read_text().splitlines()
  return [json.loads(line)["group_id"] for line in lines]


def test_an_evaluation_is_rolled_out_once(tmp_path):
  trainer, run = Trainer(), Run(tmp_path)
  first = experiment._evaluate(trainer, run, "before/6")
  second = experiment._evaluate(trainer, run, "before/6")
  assert trainer.evaluated == ["before"]
  assert first == second
  assert groups(tmp_path) == [f"before/6/t{i}" for i in range(3)]


def test_both_are_kept_apart(tmp_path):
  trainer, run = Trainer(), Run(tmp_path)
  experiment._evaluate(trainer, run, "before/6")
  trainer.position.rl = 2
  experiment._evaluate(trainer, run, "after/8")
  experiment._evaluate(trainer, run, "before/6")
  assert trainer.evaluated == ["before", "after"]
  assert len(groups(tmp_path)) == 6


def test_a_number_that_begins_alike_is_another_evaluation(tmp_path):
  trainer, run = Trainer(), Run(tmp_path)
  experiment._evaluate(trainer, run, "after/8")
  experiment._evaluate(trainer, run, "after/80")
  assert trainer.evaluated == ["after", "after"]


def test_before_rl_cannot_be_made_up_afterwards(tmp_path):
  with pytest.raises(ValueError, match=r"before RL.*--overwrite"):
    experiment._evaluate(Trainer(rl=1), Run(tmp_path), "before/6")
