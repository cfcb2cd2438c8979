"""The program as its users run it: flags, errors, files, interruption."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from arl_jax.learner.throughput import OF_THE_MACHINE
from arl_jax.observability import metrics

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "quickstart.py"

# Sizes that a run finishes in seconds with, and whose groups have a signal.
SMALL = (
  "--config.corpus.vocab_size=800",
  "--config.corpus.chunk_tokens=24",
  "--config.tasks.train=24",
  "--config.tasks.heldout=6",
  "--config.tasks.clue_words=2",
  "--config.search.handles=16",
  "--config.model.layers=1",
  "--config.model.width=32",
  "--config.model.head_dim=8",
  "--config.model.expert_width=32",
  "--config.warm_start.steps=60",
  "--config.warm_start.opening_steps=10",
  "--config.warm_start.episodes=64",
  "--config.rl.steps=12",
  "--config.rl.tasks_per_step=2",
  "--config.rl.group_size=4",
  "--config.engine.max_concurrent_decodes=16",
  "--config.engine.prefill_rows=8",
  "--config.checkpoint_every=25",
)
# The same ones, as far as the wiring goes.
TINY = (
  *SMALL,
  "--config.warm_start.steps=3",
  "--config.warm_start.opening_steps=1",
  "--config.rl.steps=2",
)


def environment() -> dict[str, str]:
  return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}


def start(*flags, cwd=ROOT):
  return subprocess.Popen(
    [sys.executable, "-m", "launch.train", f"--config={CONFIG}", *flags],
    cwd=cwd,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process, timeout=900):
  try:
    out, err = process.communicate(timeout=timeout)
  except BaseException:
    process.kill()
    process.wait()
    raise
  return process.returncode, out, err


def run(*flags, **options):
  return finish(start(*flags, **options))


def assert_one_line_error(done, *names):
  code, _, err = done
  assert code not in (0, 130)
  assert "Traceback" not in err, err[-2000:]
  assert len(err.strip().splitlines()) == 1, err
  for name in names:
    assert name in err
  return err


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
  """A folder of made-up words, each of which occurs four times."""
  draw = random.Random(0)
  syllables = [c + v for c in "bdklmnrst" for v in "aeiou"]
  lexicon: set[str] = set()
  while len(lexicon) < 320:
    lexicon.add("".join(draw.sample(syllables, 2)) + draw.choice("nrs"))
  stream = sorted(lexicon) * 4
  draw.shuffle(stream)
  folder = tmp_path_factory.mktemp("corpus")
  for d in range(20):
    lines = []
    for s in range(8):
      words = [stream.pop() for _ in range(8)]
      lines.append(f"{' '.join(words)} Item_{d}_{s}.")
    (folder / f"d{d}.txt").write_text("\n\n".join(lines))
  return folder


class TestDryRun:
  def test_prints_the_resolved_configuration_and_stops(self, tmp_path):
    run_dir = tmp_path / "run"
    code, out, err = run(
      "--dry_run",
      f"--config.run_dir={run_dir}",
      "--config.smoke",
      "--config.seed=7",
      "--config.rl.optimizer.learning_rate=0.25",
    )
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert shown["seed"] == 7
    assert shown["rl"]["optimizer"]["learning_rate"] == 0.25
    assert shown["rl"]["steps"] == 3  # Reduced by smoke.
    assert not run_dir.exists()

  def test_from_another_folder(self, tmp_path):
    done = subprocess.run(
      [sys.executable, "-m", "launch.train", "--dry_run"],
      cwd=tmp_path,
      env=environment(),
      capture_output=True,
      text=True,
    )
    if done.returncode:
      assert "Traceback" not in done.stderr
      assert "configs/quickstart.py" in done.stderr
    else:
      json.loads(done.stdout)


class TestFlags:
  @pytest.mark.parametrize(
    ("flag", "names"),
    [
      ("--config.nonsense=3", ["nonsense"]),
      ("--config.rl.stepz=3", ["stepz", "steps"]),
      ("--config.rl.steps.x=3", ["steps", "x"]),
      ("--config.rl.steps=abc", ["rl.steps", "abc"]),
      ("--config.rl.steps=1.5", ["rl.steps", "1.5"]),
      ("--config.smoke=maybe", ["smoke", "maybe"]),
      ("--config.rl=3", ["rl"]),
      ("--config.rl.group_size=1", ["rl.group_size", "1"]),
      ("--config.rl.baseline=median", ["baseline", "median"]),
      ("--nonsense", ["nonsense"]),
      ("surplus", ["surplus"]),
      ("--config=/nowhere/config.py", ["/nowhere/config.py"]),
      ("--resume --overwrite", ["resume", "overwrite"]),
    ],
  )
  def test_a_bad_flag_is_one_line(self, flag, names, tmp_path):
    # No --dry_run, so that what isn't refused here would begin to train; the
    # corpus that doesn't exist stops it.
    run_dir = tmp_path / "run"
    done = run(
      f"--config.run_dir={run_dir}",
      "--config.corpus.path=/no/corpus",
      *flag.split(),
    )
    assert_one_line_error(done, *names)
    assert not run_dir.exists()

  def test_a_config_file_with_an_error_is_named(self, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def get_config():\n  return nothing\n")
    done = run(f"--config={broken}", "--dry_run")
    assert_one_line_error(done, "nothing")


class TestBadCorpus:
  def refused(self, tmp_path, *names, flags=()):
    run_dir = tmp_path / "runs" / "one"
    done = run(
      f"--config.run_dir={run_dir}",
      f"--config.corpus.path={tmp_path / 'corpus'}",
      *flags,
    )
    assert_one_line_error(done, *names)
    assert not run_dir.parent.exists(), list(run_dir.parent.rglob("*"))

  def test_missing(self, tmp_path):
    self.refused(tmp_path, str(tmp_path / "corpus"))

  def test_empty(self, tmp_path):
    (tmp_path / "corpus").mkdir()
    self.refused(tmp_path, str(tmp_path / "corpus"), ".txt")

  @pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"text\0", b"  \n"])
  def test_binary_or_blank(self, tmp_path, data):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_bytes(data)
    self.refused(tmp_path, str(tmp_path / "corpus"))

  def test_too_small_for_the_vocabulary(self, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("hello world")
    self.refused(tmp_path, "vocab_size", "3072")

  def test_too_small_for_the_tasks(self, tmp_path, corpus):
    run_dir = tmp_path / "run"
    done = run(
      f"--config.run_dir={run_dir}",
      f"--config.corpus.path={corpus}",
      *TINY,
      # No sentence has that many.
      "--config.tasks.clue_words=9",
    )
    assert_one_line_error(done, "train", "24 tasks")
    assert not run_dir.exists()


def make_run_dir(folder, flags):
  """What a run of these flags begins with, without running it."""
  from arl_jax.observability.run_directory import RunDirectory

  code, out, _ = run("--dry_run", f"--config.run_dir={folder}", *flags)
  assert code == 0
  RunDirectory.open(folder, config=json.loads(out)).close()


class TestRunDirectory:
  def test_of_another_config_is_refused_and_untouched(self, tmp_path, corpus):
    run_dir = tmp_path / "run"
    flags = (*TINY, f"--config.corpus.path={corpus}")
    make_run_dir(run_dir, flags)
    before = (run_dir / "config.json").read_bytes()
    done = run(f"--config.run_dir={run_dir}", *flags, "--config.seed=5")
    assert_one_line_error(done, str(run_dir), "seed", "--overwrite")
    done = run(
      f"--config.run_dir={run_dir}", *flags, "--config.seed=5", "--resume"
    )
    assert_one_line_error(done, str(run_dir), "seed")
    assert (run_dir / "config.json").read_bytes() == before

  def test_resume_without_a_run(self, tmp_path, corpus):
    run_dir = tmp_path / "none"
    done = run(
      f"--config.run_dir={run_dir}",
      f"--config.corpus.path={corpus}",
      *TINY,
      "--resume",
    )
    assert_one_line_error(done, str(run_dir))
    assert not run_dir.exists()

  def test_a_bad_corpus_leaves_a_run_that_is_overwritten(
    self, tmp_path, corpus
  ):
    run_dir = tmp_path / "run"
    make_run_dir(run_dir, (*TINY, f"--config.corpus.path={corpus}"))
    (run_dir / "summary.json").write_text("{}")
    done = run(
      f"--config.run_dir={run_dir}",
      *TINY,
      "--config.corpus.path=/no/corpus",
      "--overwrite",
    )
    assert_one_line_error(done, "/no/corpus")
    assert (run_dir / "summary.json").exists()


METRICS = {
  "reward",
  "final_answer_found",
  "output_recall",
  "output_precision",
  "turns",
  "prune_accuracy",
  "malformed_call_rate",
}


def assert_whole(run_dir, *, warm_steps: int, rl_steps: int):
  """Every promised file is there and can be read."""
  record = json.loads((run_dir / "config.json").read_text())
  assert record["data"]["corpus"]
  assert record["code"]["source_digest"]
  summary = json.loads((run_dir / "summary.json").read_text())
  assert {"before", "after", "seconds", "tokens_per_second"} <= set(summary)
  for name in ("before", "after"):
    assert set(summary[name]) >= METRICS
    for mean, low, high in summary[name].values():
      assert mean is None or low <= mean <= high
  for name in ("demonstrations", "warm_start", "rl"):
    assert summary["seconds"][name] >= 0
  for name in ("evaluation_before", "evaluation_after"):
    assert name in summary["seconds"]
  assert {"learner", "rollout_sampled"} <= set(summary["tokens_per_second"])
  lines = metrics.read(run_dir / "metrics.jsonl")
  steps = [(x["phase"], x["step"]) for x in lines]
  assert steps == [("warm_start", i + 1) for i in range(warm_steps)] + [
    ("rl", i + 1) for i in range(rl_steps)
  ]
  assert list((run_dir / "tensorboard").iterdir())
  saved = [p.name for p in (run_dir / "checkpoints").iterdir()]
  assert str(warm_steps + rl_steps) in saved
  assert all(name.isdigit() for name in saved), saved
  heldout = record["config"]["tasks"]["heldout"]
  groups = [
    json.loads(line)
    for line in (run_dir / "trajectories.jsonl").read_text().splitlines()
  ]
  assert len(groups) == 2 * heldout
  assert all(g["episodes"][0]["reward"] is not None for g in groups)
  report = (run_dir / "report.html").read_text()
  assert "<html" in report
  for outside in ('src="http', 'href="http', "<script src"):
    assert outside not in report
  assert not [p for p in run_dir.rglob("*") if ".tmp" in p.name]


# `.ci/run` runs it, too, and looks at what it leaves.
@pytest.mark.slow
@pytest.mark.nightly
def test_smoke_leaves_every_promised_file(tmp_path):
  run_dir = tmp_path / "run"
  flags = (f"--config.run_dir={run_dir}", "--config.smoke")
  code, out, err = run(*flags)
  assert code == 0, err
  assert "Traceback" not in err
  assert_whole(run_dir, warm_steps=100, rl_steps=3)
  assert str(run_dir / "report.html") in out
  # What smoke is for: every part has run, the RL update too.
  rl = [
    x for x in metrics.read(run_dir / "metrics.jsonl") if x["phase"] == "rl"
  ]
  assert any("loss" in x for x in rl), "no group had a signal"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
  """An uninterrupted run on an own corpus."""
  run_dir = tmp_path_factory.mktemp("whole") / "run"
  code, _, err = run(*flags_of(run_dir, corpus))
  assert code == 0, err
  return run_dir


def flags_of(run_dir, corpus):
  return (
    f"--config.run_dir={run_dir}",
    f"--config.corpus.path={corpus}",
    *SMALL,
  )


@pytest.mark.slow
def test_an_own_corpus(whole):
  assert_whole(whole, warm_steps=60, rl_steps=12)
  lines = metrics.read(whole / "metrics.jsonl")
  trained = [x for x in lines if x["phase"] == "rl" and "loss" in x]
  assert trained, "this recipe gives no signal; the tests below need one"


@pytest.mark.slow
def test_a_finished_run_is_refused_anew_and_resumes_to_the_same(
  whole, tmp_path, corpus
):
  whole = shutil.copytree(whole, tmp_path / "copy")
  before = json.loads((whole / "summary.json").read_text())
  assert_one_line_error(
    run(*flags_of(whole, corpus)), "--resume", "--overwrite"
  )
  code, _, err = run(*flags_of(whole, corpus), "--resume")
  assert code == 0, err
  assert_whole(whole, warm_steps=60, rl_steps=12)
  after = json.loads((whole / "summary.json").read_text())
  assert after["before"] == before["before"]
  assert after["after"] == before["after"]
  assert set(after["seconds"]) == set(before["seconds"])


def wait_for(process, run_dir, phase: str, step: int):
  """Until the run has written this step."""
  path = run_dir / "metrics.jsonl"
  deadline = time.monotonic() + 200
  while time.monotonic() < deadline:
    if path.exists():
      # By hand: a line may be half there.
      for line in path.read_bytes().split(b"\n")[:-1]:
        record = json.loads(line)
        if record["phase"] == phase and record["step"] >= step:
          return
    if process.poll() is not None:
      raise AssertionError(f"ended early: {finish(process)}")
    time.sleep(0.01)
  process.kill()
  raise AssertionError(f"no step {step} of {phase} in time")


def assert_interrupted(done, run_dir):
  code, _, err = done
  assert code == 130, err
  assert "--resume" in err
  assert "Traceback" not in err
  saved = [p.name for p in (run_dir / "checkpoints").iterdir()]
  assert saved
  assert all(name.isdigit() for name in saved), saved
  assert not (run_dir / "summary.json").exists()


def measured(run_dir):
  """Metrics by phase and step, without what is of the machine."""
  lines = metrics.read(run_dir / "metrics.jsonl")
  return {
    (x["phase"], x["step"]): {
      k: v for k, v in x.items() if k not in ("time", *OF_THE_MACHINE)
    }
    for x in lines
  }


@pytest.mark.slow
@pytest.mark.nightly
def test_interrupted_and_killed_it_goes_on_as_if_it_had_not(
  tmp_path, whole, corpus
):
  run_dir = tmp_path / "run"
  flags = flags_of(run_dir, corpus)
  plan = (
    (signal.SIGINT, "warm_start", 7),
    (signal.SIGINT, "warm_start", 31),
    (signal.SIGINT, "rl", 2),
    (signal.SIGKILL, "rl", 6),
  )
  for number, (sent, phase, step) in enumerate(plan):
    resume = ("--resume",) if number else ()
    process = start(*flags, *resume)
    wait_for(process, run_dir, phase, step)
    process.send_signal(sent)
    done = finish(process)
    if sent == signal.SIGINT:
      assert_interrupted(done, run_dir)
    else:
      assert done[0] == -sent
  code, _, err = run(*flags, "--resume")
  assert code == 0, err
  assert_whole(run_dir, warm_steps=60, rl_steps=12)
  one, other = measured(whole), measured(run_dir)
  differing = {
    (at, name): (one[at].get(name), other[at].get(name))
    for at in one
    for name in {**one[at], **other[at]}
    if one[at].get(name) != other[at].get(name)
  }
  assert not differing, dict(list(differing.items())[:5])
  summaries = [
    json.loads((d / "summary.json").read_text()) for d in (whole, run_dir)
  ]
  for name in ("before", "after"):
    assert summaries[0][name] == summaries[1][name]
  assert set(summaries[0]["seconds"]) == set(summaries[1]["seconds"])


@pytest.mark.slow
def test_interrupted_before_anything_is_learned(tmp_path, corpus):
  run_dir = tmp_path / "run"
  flags = (
    *flags_of(run_dir, corpus),
    *TINY,
    # Long enough to be caught in.
    "--config.warm_start.episodes=20000",
  )
  process = start(*flags)
  for line in process.stdout:
    if line.startswith("demonstrations"):
      break
  process.send_signal(signal.SIGINT)
  done = finish(process)
  assert_interrupted(done, run_dir)


@pytest.mark.slow
def test_a_second_signal_ends_at_once_without_a_traceback(tmp_path, corpus):
  run_dir = tmp_path / "run"
  process = start(*flags_of(run_dir, corpus), "--config.warm_start.steps=5000")
  wait_for(process, run_dir, "warm_start", 2)
  process.send_signal(signal.SIGINT)
  process.send_signal(signal.SIGTERM)
  code, _, err = finish(process, timeout=120)
  assert code not in (0, 1)
  assert "Traceback" not in err


@pytest.fixture
def small_disk(tmp_path):
  """A file system of its own that mounts of so many KiB are made of."""
  mounted = []

  def mount(kib: int) -> pathlib.Path:
    folder = tmp_path / f"disk{len(mounted)}"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs"]
    done = subprocess.run(
      [*command, str(folder)], capture_output=True, text=True
    )
    if done.returncode:
      pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    mounted.append(folder)
    return folder

  yield mount
  for folder in mounted:
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kib", [4, 64, 400, 1200])
def test_a_full_disk_is_one_line_and_leaves_nothing_torn(
  kib, small_disk, corpus
):
  run_dir = small_disk(kib) / "run"
  flags = (*flags_of(run_dir, corpus), *TINY)
  code, _, err = run(*flags)
  assert code not in (0, 130), err
  assert "Traceback" not in err
  errors = [x for x in err.splitlines() if x.startswith("error: ")]
  assert len(errors) == 1, err
  assert "disk full" in errors[0]
  assert str(run_dir) in errors[0]
  if not run_dir.exists():
    return
  for path in run_dir.rglob("*"):
    assert "tmp" not in path.name, path
  for path in run_dir.glob("*.json"):
    json.loads(path.read_text())
  if (run_dir / "metrics.jsonl").exists():
    content = (run_dir / "metrics.jsonl").read_text()
    assert not content or content.endswith("\n")
  if (run_dir / "checkpoints").exists():
    assert all(p.name.isdigit() for p in (run_dir / "checkpoints").iterdir())
