"""Training from files as its users run it: errors before work is lost."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("offline")


@pytest.fixture(scope="module")
def config(folder, tokenizer, chats, offline):
  path = folder / "sft.py"
  sources = f"SourceConfig(path={str(chats[0])!r}),"
  path.write_text(
    offline.format(tokenizer=str(tokenizer), sources=sources, loss="sft")
  )
  return path


def launch(folder, config, *flags):
  """(exit code, standard output, standard error)."""
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  done = subprocess.run(
    [sys.executable, "-m", "launch.train", f"--config={config}", *flags],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=900,
  )
  return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def run_dir(folder, config):
  """A finished run of six updates, exported."""
  path = folder / "run"
  flags = (f"--config.run_dir={path}", f"--config.export={folder / 'hf'}")
  code, out, err = launch(folder, config, "--config.steps=6", *flags)
  assert code == 0, err
  assert "loss" in out
  return path


def assert_one_line(done, *names):
  code, _, err = done
  assert code in (1, 2)
  lines = err.strip().splitlines()
  assert len(lines) == 1, err
  for name in names:
    assert name in lines[0], lines[0]


def test_leaves_commits_metrics_a_summary_and_the_model(folder, run_dir):
  assert (run_dir / "checkpoints" / "6" / "commit.json").is_file()
  assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 6
  summary = json.loads((run_dir / "summary.json").read_text())
  assert summary["loss"] > 0
  names = {p.name for p in (folder / "hf").iterdir()}
  assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_a_finished_run_resumes_to_the_same_summary(folder, config, run_dir):
  before = (run_dir / "summary.json").read_text()
  flags = (f"--config.run_dir={run_dir}", f"--config.export={folder / 'hf'}")
  code, _, err = launch(folder, config, "--config.steps=6", *flags, "--resume")
  assert code == 0, err
  assert (run_dir / "summary.json").read_text() == before


@pytest.mark.parametrize(
  ("flags", "names"),
  [
    (("--config.checkpoint=/nonexistent",), ("/nonexistent",)),
    (("--config.learner.mesh.fsdp=64",), ("mesh", "64")),
    (("--config.optimizer.weight_decay=nan",), ("weight_decay", "nan")),
    (("--config.learner.loss=cispo",), ("learner.loss", "sft")),
    (("--config.tokenizer=/nonexistent",), ("/nonexistent",)),
    (("--config.sources[0].path=/nonexistent.jsonl",), ("/nonexistent",)),
    (("--config.rl.steps=3",), ("no field 'rl'",)),
    (("--config.export=/tmp",), ("export /tmp exists",)),
  ],
)
def test_overwrite_of_what_cannot_start_leaves_the_old_run(
  flags, names, folder, config, run_dir
):
  done = launch(
    folder, config, f"--config.run_dir={run_dir}", "--overwrite", *flags
  )
  assert_one_line(done, *names)
  assert (run_dir / "checkpoints" / "6" / "commit.json").is_file()
  assert (run_dir / "summary.json").is_file()


def test_a_quota_that_holds_no_commit_is_refused_at_once(folder, config):
  done = launch(
    folder,
    config,
    f"--config.run_dir={folder / 'small'}",
    "--config.checkpoint_quota=1000",
  )
  assert_one_line(done, "quota is 1000 bytes")


def test_a_damaged_commit_is_named_and_passed_over_when_asked(folder, config):
  path = folder / "damaged"
  flags = (f"--config.run_dir={path}", "--config.steps=6")
  code, _, err = launch(folder, config, *flags)
  assert code == 0, err
  wanted = json.loads((path / "summary.json").read_text())["loss"]
  (manifest,) = (path / "checkpoints" / "6").glob("commit.json")
  manifest.write_bytes(manifest.read_bytes()[:-20])
  (path / "checkpoints" / "70").mkdir()
  done = launch(folder, config, *flags, "--resume")
  assert_one_line(done, "checkpoint 70", "--fall_back")
  code, _, err = launch(folder, config, *flags, "--resume", "--fall_back")
  assert code == 0, err
  assert "checkpoint 6" in err
  # From the commit before, in the same numbers.
  assert json.loads((path / "summary.json").read_text())["loss"] == wanted
