"""Scores of a run's policy, as a program."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.launch.programs import train

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, rl_loop):
  """A run of little training."""
  folder = tmp_path_factory.mktemp("evaluate")
  config = folder / "loop.py"
  config.write_text(rl_loop)
  flags = ("--config.warm_start.steps=40", "--config.rl.steps=1")
  process = train(config, folder / "run", *flags, stderr=subprocess.PIPE)
  _, err = process.communicate(timeout=900)
  assert process.returncode == 0, err[-3000:]
  return folder / "run"


def evaluate(*flags):
  done = subprocess.run(
    [sys.executable, "-m", "launch.evaluate", *flags],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    capture_output=True,
    text=True,
    timeout=600,
  )
  return done.returncode, done.stdout, done.stderr


def test_it_repeats_the_run_s_own_evaluation(run_dir):
  code, out, err = evaluate(f"--run_dir={run_dir}")
  assert code == 0, err[-3000:]
  after = json.loads((run_dir / "summary.json").read_text())["after"]
  assert json.loads(out)["single"] == after


def test_what_training_began_from_is_another_policy(run_dir):
  code, out, err = evaluate(f"--run_dir={run_dir}", "--base", "--tasks=2")
  assert code == 0, err[-3000:]
  assert json.loads(out)["tasks"] == 2
  # Random parameters find no answer in so few turns.
  assert json.loads(out)["single"]["final_answer_found"][0] == 0


def test_rollouts_are_fused_and_tools_taken_away(run_dir):
  code, out, err = evaluate(
    f"--run_dir={run_dir}",
    *("--rollouts=3", "--without=prune_chunks", "--token_budget=160"),
  )
  assert code == 0, err[-3000:]
  found = json.loads(out)
  assert found["rollouts"] == 3
  # Nothing can be pruned, so there is no share of it that was right.
  assert found["single"]["prune_accuracy"][0] is None
  # What any rollout saw, the three together have seen.
  assert (
    found["fused"]["trajectory_recall"][0]
    >= found["single"]["trajectory_recall"][0]
  )


@pytest.mark.parametrize(
  ("flags", "names"),
  [
    ((), ("--run_dir is empty",)),
    (("--run_dir=/nowhere",), ("/nowhere holds no run",)),
  ],
)
def test_what_can_not_be_is_one_line(flags, names):
  code, _, err = evaluate(*flags)
  assert code not in (0, 130)
  assert len(err.strip().splitlines()) == 1, err
  for name in names:
    assert name in err


def test_a_tool_that_is_none_is_named(run_dir):
  code, _, err = evaluate(f"--run_dir={run_dir}", "--without=rm")
  assert code not in (0, 130)
  assert "--without has ['rm']" in err
