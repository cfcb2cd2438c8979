"""Roles as processes of their own, and the program that starts them."""

import dataclasses
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from arl_jax.actors.config import ActorConfig
from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.local_processes import assign_addresses
from arl_jax.runtime.config import Config
from launch import role, supervise

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def cluster():
  found = ClusterConfig(actors=1, beat_seconds=0.2, lost_seconds=5.0)
  assign_addresses(found)
  return found


def write(path, config):
  path.write_text(json.dumps(dataclasses.asdict(config)))
  return path


def program(module, *flags, **settings):
  return subprocess.Popen(
    [sys.executable, "-m", module, *flags],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **settings,
  )


def wait_for_queue(url, process):
  limit = time.monotonic() + 60
  while True:
    try:
      return httpx.get(f"{url}/status", timeout=5.0)
    except httpx.TransportError:
      assert process.poll() is None, process.communicate()
      assert time.monotonic() < limit, "waited 60 s for the queue"
      time.sleep(0.05)


def test_configurations_come_back_as_they_were(tmp_path):
  config = Config()
  config.rl.skip_below, config.cluster.actors = -math.inf, 3
  config.rl.mixture, config.tasks.hops = "a=1", 1
  path = write(tmp_path / "config.json", config)
  assert role.read_config(path, jax=True) == config
  read = role.read_config(path, jax=False)
  assert type(read) is ActorConfig
  assert (read.tasks, read.cluster) == (config.tasks, config.cluster)


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ("[]", "no JSON object"),
    ("{", "Expecting property name"),
    ("{}", "lacks ActorConfig.seed"),
    ('{"seed": "x"}', "lacks ActorConfig.problem"),
  ],
)
def test_what_is_no_configuration_is_said(text, reason, tmp_path):
  path = tmp_path / "config.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=reason) as error:
    role.read_config(path, jax=False)
  assert str(path) in str(error.value)


def test_errors_are_one_line_and_known_by_their_code(tmp_path):
  for flags, code, reason in (
    (["--role=cook", "--config_json=x"], 2, "invalid choice: 'cook'"),
    (["--role=actor"], 2, "--config_json"),
    (["--role=actor", "--config_json=x", "--index=-1"], 2, "integer >= 0"),
    (["--role=actor", f"--config_json={tmp_path}/x"], 1, "No such file"),
  ):
    process = program("launch.role", *flags)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert reason in err.splitlines()[-1]
    assert "Traceback" not in err


def test_every_role_has_its_module():
  for name, known in role.ROLES.items():
    path = ROOT / (known.module.replace(".", "/") + ".py")
    assert path.exists(), name
    assert "def run(" in path.read_text()


@pytest.mark.parametrize("supervised", [True, False])
def test_a_role_ends_with_its_supervisor(supervised, cluster, tmp_path):
  path = write(tmp_path / "config.json", ActorConfig(cluster=cluster))
  reader, writer = os.pipe()
  process = program(
    "launch.role",
    *("--role=queue", f"--config_json={path}"),
    *(["--supervised"] if supervised else []),
    stdin=reader,
  )
  os.close(reader)
  try:
    assert wait_for_queue(cluster.queue, process).status_code in (200, 409)
    os.close(writer)
    if supervised:
      _, err = process.communicate(timeout=30)
      assert "the supervisor is gone" in err
    else:
      # Nobody holds the input of one that is started by hand, or by a cluster.
      time.sleep(1.0)
      assert process.poll() is None
      assert wait_for_queue(cluster.queue, process).status_code in (200, 409)
      process.send_signal(signal.SIGTERM)
      process.communicate(timeout=30)
      assert process.returncode == 0
  finally:
    process.kill()
    process.wait()


@pytest.mark.slow
def test_train_becomes_one_role_with_its_configuration(cluster):
  process = program(
    "launch.train",
    f"--config={ROOT}/configs/quickstart.py",
    *("--role=queue", "--config.cluster.actors=1"),
    f"--config.cluster.queue={cluster.queue}",
  )
  try:
    answer = wait_for_queue(cluster.queue, process)
    assert answer.status_code in (200, 409)
    maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
    # The program that resolved the configuration had loaded it.
    assert "jaxlib" not in maps
    command = pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert b"launch.role\0--role=queue" in command
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
  finally:
    process.kill()
    process.wait()


@pytest.mark.parametrize(
  ("settings", "which", "reason"),
  [
    ({"queue": ""}, ("actor", 0), "cluster.queue is empty"),
    ({"replicas": ""}, ("actor", 0), "has 0 addresses for cluster.servers 1"),
    ({}, ("actor", 1), "--index=1 of --role=actor is none of the 1"),
    ({}, ("evaluator", 0), "--index=0 of --role=evaluator is none of the 0"),
    (
      {"server_hosts": 2},
      ("server", 1),
      "cluster.server_coordinators is empty",
    ),
    (
      {"server_hosts": 2, "server_coordinators": "a:1"},
      ("server", 2),
      "--index=2 of --role=server is none of the 2",
    ),
  ],
)
def test_a_role_that_the_run_does_not_have_is_refused(
  settings, which, reason, cluster
):
  config = Config(cluster=dataclasses.replace(cluster, **settings))
  with pytest.raises(ValueError, match=reason):
    supervise.become(config, *which, [])


@pytest.mark.parametrize("field", ["learners", "server_hosts"])
def test_ray_places_no_jobs_of_several_processes(field, cluster):
  config = Config(cluster=dataclasses.replace(cluster, **{field: 2}))
  with pytest.raises(ValueError, match=f"{field} is 2; with Ray it must be 1"):
    supervise.run_all(config, "ray", [], lambda: True)


def test_roles_are_only_for_runs_in_many_processes():
  process = program(
    "launch.train", f"--config={ROOT}/configs/quickstart.py", "--role=actor"
  )
  _, err = process.communicate(timeout=60)
  assert process.returncode == 1
  assert "set config.cluster.actors" in err


def test_a_folder_counts_as_opened_once_its_record_is_written(tmp_path):
  run_dir = tmp_path / "run"
  opened = supervise._opened(str(run_dir))
  assert not opened()
  run_dir.mkdir()
  assert not opened()
  (run_dir / "config.json").write_text("1")
  assert opened()
  # A run of before, which --overwrite is about to empty, isn't this one's.
  opened = supervise._opened(str(run_dir))
  assert not opened()
  (run_dir / "config.json").unlink()
  assert not opened()
  other = run_dir / "new"
  other.write_text("1")
  os.utime(other, ns=(1, 1))
  other.rename(run_dir / "config.json")
  assert opened()


@pytest.mark.slow
def test_a_learner_that_its_user_must_help_ends_the_run(tmp_path):
  run_dir = tmp_path / "run"
  run_dir.mkdir()
  (run_dir / "mine.txt").write_text("not a run's")
  process = program(
    "launch.train",
    f"--config={ROOT}/configs/quickstart.py",
    *("--config.cluster.actors=1", f"--config.run_dir={run_dir}"),
    *("--config.smoke", "--config.tasks.train=24", "--config.tasks.heldout=6"),
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
  )
  _, err = process.communicate(timeout=200)
  assert process.returncode == 1, err
  assert "holds no run of this program" in err
  assert "error: learner-0 ended with exit code 1" in err
  assert [p.name for p in run_dir.iterdir() if p.name != ".lock"] == [
    "mine.txt"
  ]
  # Nobody is left that holds the queue's port.
  (url,) = [x.split()[-1] for x in err.splitlines() if x[:9] == "queue at "]
  with socket.socket() as client:
    port = int(url.rpartition(":")[2])
    assert client.connect_ex(("127.0.0.1", port)) != 0
