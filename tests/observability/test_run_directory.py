import json
import subprocess
import sys

import pytest

from arl_jax.observability.run_directory import RunDirectory, write_atomically

CONFIG = {"seed": 0, "rl": {"steps": 60, "lr": 1e-3, "ratio_max": float("inf")}}


def changed(**rl):
  return {**CONFIG, "rl": {**CONFIG["rl"], **rl}}


def start(path, config=CONFIG, data=None, **kwargs):
  return RunDirectory.open(path, config=config, data=data, **kwargs)


def record(path):
  return json.loads((path / "config.json").read_text())


def names(path):
  return sorted(p.name for p in path.iterdir() if p.name != ".lock")


@pytest.fixture
def run(tmp_path):
  path = tmp_path / "runs" / "first"
  with start(path, data={"corpus": "abc"}) as directory:
    directory.write_json("summary.json", {"reward": 0.5})
    (path / "checkpoints" / "1").mkdir(parents=True)
    (path / "checkpoints" / "1" / "state").write_text("state")
  return path


def test_config_json_says_what_made_the_run(run):
  written = record(run)
  assert written["config"]["rl"] == {
    "steps": 60,
    "lr": 1e-3,
    "ratio_max": "inf",
  }
  assert written["data"] == {"corpus": "abc"}
  assert len(written["config_digest"]) == 64
  assert set(written["code"]) == {"version", "git_commit", "source_digest"}
  assert len(written["code"]["source_digest"]) == 64
  assert written["environment"]["python"].startswith("3.")
  assert written["environment"]["numpy"]
  assert written["environment"]["jax"]


def test_new_refuses_the_same_run(run):
  before = record(run)
  with pytest.raises(
    ValueError, match=r"already holds a run.*--resume to go on or --overwrite"
  ):
    start(run)
  assert record(run) == before


def test_new_refuses_another_configuration_and_names_the_fields(run):
  with pytest.raises(
    ValueError,
    match=r"rl\.steps is 60 there and 70 here.*--config\.run_dir",
  ):
    start(run, changed(steps=70))


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (changed(lr=1), r"rl\.lr is 0\.001 there and 1 here"),
    (changed(new=None), r"rl\.new is '\(absent\)' there and None here"),
    ({"seed": 0}, r"rl\.steps is 60 there and '\(absent\)' here.*"),
    ({**CONFIG, "seed": False}, "seed is 0 there and False here"),
    (
      {"seed": 1, "rl": {"steps": 1, "lr": 1.0, "ratio_max": 4.0}},
      r"seed is .*, rl\.steps is .*, rl\.lr is .* \(and 1 more\)",
    ),
  ],
)
def test_resume_refuses_another_configuration(run, config, message):
  with pytest.raises(ValueError, match=message):
    start(run, config, mode="resume")


def test_resume_may_change_mutable_fields_and_keeps_the_history(run):
  old = record(run)
  with start(
    run, changed(steps=90), mode="resume", mutable_on_resume=("rl.steps",)
  ) as directory:
    assert directory.resumed
  new = record(run)
  assert new["config"]["rl"]["steps"] == 90
  assert new["config_digest"] != old["config_digest"]
  assert new["data"] == {"corpus": "abc"}
  assert [r["replaced"] for r in new["resumed"]] == [{"rl.steps": 60}]
  with pytest.raises(ValueError, match=r"rl\.lr"):
    start(run, changed(steps=90, lr=1.0), mode="resume")
  with start(
    run, changed(steps=90, lr=1.0), mode="resume", mutable_on_resume=("rl",)
  ):
    pass


def test_resume_refuses_other_data(run):
  message = "other data: corpus is 'abc' there and 'xyz' here"
  with pytest.raises(ValueError, match=message):
    start(run, data={"corpus": "xyz"}, mode="resume")
  assert record(run)["data"] == {"corpus": "abc"}


def test_resume_without_a_run_makes_nothing(tmp_path):
  with pytest.raises(ValueError, match="holds no run to go on with"):
    start(tmp_path / "none", mode="resume")
  assert not list(tmp_path.iterdir())


def test_overwrite_empties_a_run_and_nothing_outside(run, tmp_path):
  precious = tmp_path / "precious"
  precious.mkdir()
  (precious / "file").write_text("x")
  (run / "link").symlink_to(precious)
  with start(run, changed(steps=1), mode="overwrite") as directory:
    assert not directory.resumed
  assert names(run) == ["config.json"]
  assert record(run)["config"]["rl"]["steps"] == 1
  assert (precious / "file").read_text() == "x"


@pytest.mark.parametrize("mode", ["new", "overwrite"])
@pytest.mark.parametrize(
  ("name", "text"),
  [("notes.txt", "mine"), ("config.json", '{"model_type": "llama"}')],
)
def test_folders_of_others_are_refused(tmp_path, mode, name, text):
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match="holds no run of this program"):
    start(tmp_path, mode=mode)
  assert (tmp_path / name).read_text() == text


def test_interrupted_overwrite_is_no_run_but_can_be_overwritten(run):
  (run / "config.json").rename(run / "config.json.overwritten")
  with pytest.raises(ValueError, match="no run to go on with"):
    start(run, mode="resume")
  with pytest.raises(ValueError, match="pass --overwrite"):
    start(run)
  with start(run, mode="overwrite"):
    pass
  assert names(run) == ["config.json"]


def test_an_empty_folder_will_do(tmp_path):
  with start(tmp_path, mode="overwrite"):
    assert names(tmp_path) == ["config.json"]


def test_one_process_owns_the_folder(run):
  code = """
import sys
from arl_jax.observability.run_directory import RunDirectory
try:
  RunDirectory.open(sys.argv[1], config={}, mode="overwrite")
except ValueError as error:
  sys.exit(str(error))
"""
  command = [sys.executable, "-c", code, str(run)]
  with start(run, mode="resume"):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is in use by another process" in done.stderr
    assert (run / "summary.json").exists()
  assert subprocess.run(command).returncode == 0


@pytest.mark.parametrize(
  ("path", "message"),
  [("gs://bucket/run", "not a local folder"), ("file", "is a file")],
)
def test_paths_that_are_no_folder(tmp_path, path, message, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match=message):
    start(path)


def test_unknown_mode(tmp_path):
  with pytest.raises(ValueError, match="mode 'again' is none of"):
    start(tmp_path, mode="again")


def test_written_files_are_strict_json_and_stay_inside(run):
  with start(run, mode="resume") as directory:
    directory.write_json("x.json", {"a": [float("nan"), 1.5]})
    assert json.loads((run / "x.json").read_text()) == {"a": [None, 1.5]}
    for name in ("../x", "a/b", "", ".."):
      with pytest.raises(ValueError, match="plain name"):
        directory.write_text(name, "")


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path):
  # The kernel's limit on the size of a file fails a write midway.
  code = """
import resource, signal, sys
from arl_jax.observability.run_directory import RunDirectory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunDirectory.open(sys.argv[1], config={})
run.write_text("big.txt", "old")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
  run.write_text("big.txt", "x" * 100_000)
except OSError as error:
  sys.exit(str(error))
"""
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert "big.txt: File too large" in done.stderr
  assert len(done.stderr.splitlines()) == 1
  assert names(tmp_path) == ["big.txt", "config.json"]
  assert (tmp_path / "big.txt").read_text() == "old"


@pytest.fixture
def full_disk(tmp_path):
  """A folder on a file system of 64 KiB, where mounting is allowed."""
  folder = tmp_path / "small"
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
  try:
    subprocess.run(mount, check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError):
    pytest.skip("mounting a small file system is not allowed here")
  yield folder
  subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_named(full_disk):
  with pytest.raises(OSError, match=r"can't write .*x: disk full; free some"):
    write_atomically(full_disk / "x", "x" * 100_000)
  assert not list(full_disk.iterdir())
  (full_disk / "filler").write_text("x" * 65536)
  with pytest.raises(OSError, match="disk full"):
    start(full_disk / "run")
  assert names(full_disk) == ["filler"]
