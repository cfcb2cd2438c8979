"""What XManager would start, and, where it is installed, that it does."""

import asyncio
import importlib.util
import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest

from arl_jax.runtime.config import Config
from launch import xm_jobs

ROOT = pathlib.Path(__file__).parents[2]
WITH_XMANAGER = importlib.util.find_spec("xmanager") is not None


def config(**cluster):
  made = Config()
  for name, value in cluster.items():
    setattr(made.cluster, name, value)
  return made


def launch(*flags, env=None):
  return subprocess.run(
    [sys.executable, "-m", "launch.xm_train", *flags],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


def test_a_sweep_is_a_product_each_in_its_folder():
  texts = ["config.rl.optimizer.learning_rate=1e-3,1e-4", "config.seed=4,5"]
  runs = xm_jobs.sweep(texts, Config(run_dir="runs/x"), ["--config=c.py"])
  assert [
    (r.config.rl.optimizer.learning_rate, r.config.seed, r.config.run_dir)
    for r in runs
  ] == [
    (1e-3, 4, "runs/x-1"),
    (1e-3, 5, "runs/x-2"),
    (1e-4, 4, "runs/x-3"),
    (1e-4, 5, "runs/x-4"),
  ]
  assert runs[1].flags == [
    "--config=c.py",
    "--config.rl.optimizer.learning_rate=1e-3",
    "--config.seed=5",
    "--config.run_dir=runs/x-2",
  ]


def test_without_a_sweep_there_is_one_run_in_the_folder_given():
  (run,) = xm_jobs.sweep([], Config(run_dir="runs/x"), [])
  assert (run.flags, run.config.run_dir) == ([], "runs/x")


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("config.seed", "isn't like"),
    ("config.seed=", "isn't like"),
    ("config.seed=1,", "isn't like"),
    ("seed=1", "isn't like"),
    ("config.seed=1,1", "a value twice"),
    ("config.sed=1", "has no field 'sed'; there is seed"),
    ("config.seed=one", "is no int"),
    ("config.seed=1.5", "is no int"),
    ("config.rl.record_groups=yes", "is no bool"),
    ("config.rl=1", "is no RLConfig"),
    ("config.rl.group_size=1", "rl.group_size is 1"),
  ],
)
def test_sweeps_that_cannot_be(text, said):
  with pytest.raises(ValueError, match=said):
    xm_jobs.sweep([text], Config(), [])


def test_each_process_is_a_job_and_all_have_the_same_addresses():
  (run,) = xm_jobs.sweep([], config(actors=2, servers=2), ["--config=c.py"])
  jobs = xm_jobs.jobs(run, resume=True)
  assert sorted(jobs) == [
    *("actor_0", "actor_1", "learner_0", "queue_0", "server_0", "server_1"),
  ]
  addresses = {
    tuple(a for a in args if "cluster." in a) for args in jobs.values()
  }
  ((queue, replicas),) = addresses
  assert queue.startswith("--config.cluster.queue=http://127.0.0.1:")
  assert replicas.count("http://127.0.0.1:") == 2
  assert jobs["actor_1"][-2:] == ["--role=actor", "--index=1"]
  assert [name for name, args in jobs.items() if "--resume" in args] == [
    "learner_0"
  ]


def test_pods_are_found_by_their_names():
  (run,) = xm_jobs.sweep(
    [], config(actors=1, host="0.0.0.0", token_file="/token"), []
  )
  jobs = xm_jobs.jobs(run, domain="7-1-{}.experiments")
  assert {
    "--config.cluster.queue=http://7-1-queue-0.experiments:7000",
    "--config.cluster.replicas=http://7-1-server-0.experiments:7000",
  } <= {*jobs["learner_0"]}


def test_replicas_of_several_hosts_are_found_by_their_first_ones():
  made = config(actors=1, servers=2, server_hosts=3)
  made.serve_mesh.fsdp = -1
  (run,) = xm_jobs.sweep([], made, [])
  (coordinators,) = (
    a for a in xm_jobs.jobs(run)["actor_0"] if "server_coordinators" in a
  )
  assert coordinators.count("127.0.0.1:") == 2
  made.cluster.host, made.cluster.token_file = "0.0.0.0", "/token"
  (run,) = xm_jobs.sweep([], made, [])
  jobs = xm_jobs.jobs(run, domain="7-1-{}.experiments")
  assert [name for name in jobs if name.startswith("server")] == [
    f"server_{i}" for i in range(6)
  ]
  assert {
    "--config.cluster.replicas=http://7-1-server-0.experiments:7000,"
    "http://7-1-server-3.experiments:7000",
    "--config.cluster.server_coordinators=7-1-server-0.experiments:7001,"
    "7-1-server-3.experiments:7001",
  } <= {*jobs["server_4"]}


def test_pods_that_nobody_could_reach_are_refused():
  (run,) = xm_jobs.sweep([], config(actors=1), [])
  with pytest.raises(ValueError, match=r"cluster\.host is '127\.0\.0\.1'"):
    xm_jobs.jobs(run, domain="7-1-{}.experiments")


def test_requirements():
  assert xm_jobs.requirements(["learner:H100=8,CPU=64", "actor:CPU=8"]) == {
    "learner": {"H100": "8", "CPU": "64"},
    "actor": {"CPU": "8"},
  }
  for wrong in ("learner", "learner:", "learner:H100", "coach:CPU=1", "CPU=1"):
    with pytest.raises(ValueError, match=f"--requirements={wrong}"):
      xm_jobs.requirements([wrong])


def test_a_dry_run_needs_no_xmanager():
  done = launch(
    *("--config=configs/quickstart.py", "--dry_run", "--config.seed=7"),
    *("--config.cluster.actors=1", "--sweep", "config.seed=1,2"),
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("work unit") == 2
  assert done.stdout.count("python -m launch.train") == 8
  # The swept value comes last, so it is the one that counts.
  both = "--config.seed=7 --config.cluster.actors=1 --config.seed=2"
  assert done.stdout.count(both) == 4


@pytest.mark.skipif(WITH_XMANAGER, reason="XManager is installed")
def test_a_launch_without_xmanager_says_what_to_install():
  done = launch()
  assert (done.returncode, done.stdout) == (1, "")
  assert "pip install 'arl-jax[xm]'" in done.stderr


_PROGRAM = """#!{python}
import json, os, signal, sys, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
role = sys.argv[-2].partition("=")[2]
folder = {folder!r}
name = f"{{role}}-{{os.getpid()}}"
open(f"{{folder}}/{{name}}.started", "w").write(json.dumps(sys.argv[1:]))
limit = time.time() + 60
def others():
  return [n for n in os.listdir(folder) if "started" in n]
if role == "learner":
  while len(others()) < 8 and time.time() < limit:
    time.sleep(0.05)
else:
  while not stopped and time.time() < limit:
    time.sleep(0.05)
  open(f"{{folder}}/{{name}}.stopped", "w")
sys.exit({code} if role == "learner" else 0)
"""


def _launch_small_programs(tmp_path, monkeypatch, code):
  from absl import flags

  from launch import xm_train

  if not flags.FLAGS.is_parsed():
    flags.FLAGS(["test", f"--config={ROOT}/configs/quickstart.py"])
  monkeypatch.setenv("HOME", str(tmp_path))
  folder = tmp_path / "said"
  folder.mkdir()
  program = tmp_path / "program"
  program.write_text(
    _PROGRAM.format(python=sys.executable, folder=str(folder), code=code)
  )
  program.chmod(program.stat().st_mode | stat.S_IXUSR)
  runs = xm_jobs.sweep(["config.seed=1,2"], config(actors=1), [])
  asyncio.run(xm_train.launch(runs, str(program)))
  return folder


@pytest.mark.slow
@pytest.mark.skipif(not WITH_XMANAGER, reason="XManager is not installed")
@pytest.mark.filterwarnings("default")
def test_jobs_of_two_runs_start_and_stop_after_their_learners(
  tmp_path, monkeypatch
):
  folder = _launch_small_programs(tmp_path, monkeypatch, 0)
  started = [json.loads(p.read_text()) for p in folder.glob("*.started")]
  assert sorted(
    (role, seed)
    for args in started
    for role in [args[-2].partition("=")[2]]
    for seed in [a for a in args if a.startswith("--config.seed")]
  ) == [
    (role, f"--config.seed={seed}")
    for role in ("actor", "learner", "queue", "server")
    for seed in (1, 2)
  ]
  assert len([*folder.glob("*.stopped")]) == 6


@pytest.mark.slow
@pytest.mark.skipif(not WITH_XMANAGER, reason="XManager is not installed")
@pytest.mark.filterwarnings("default")
def test_a_learner_that_fails_fails_the_launch(tmp_path, monkeypatch):
  with pytest.raises(RuntimeError, match="non-zero code: 3"):
    _launch_small_programs(tmp_path, monkeypatch, 3)
  assert os.listdir(tmp_path / "said")
