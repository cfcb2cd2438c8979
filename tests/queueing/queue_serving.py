"""Group queues over HTTP: in a thread, and as programs to kill."""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import httpx

from arl_jax.actors.config import ActorConfig
from arl_jax.queueing import service as queue_service

ROOT = pathlib.Path(__file__).parents[2]
# Seconds that anything may take.
PATIENCE = 60


def free_port():
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def config_of(**cluster):
  config = ActorConfig()
  config.cluster.queue = f"http://127.0.0.1:{free_port()}"
  config.cluster.patience = PATIENCE
  for name, value in cluster.items():
    setattr(config.cluster, name, value)
  config.cluster.validate()
  return config


def wait_until_served(config):
  limit = time.monotonic() + PATIENCE
  with httpx.Client(trust_env=False) as client:
    while True:
      try:
        client.get(config.cluster.queue + "/health").raise_for_status()
        return
      except httpx.TransportError:
        assert time.monotonic() < limit, "the queue doesn't come up"
      time.sleep(0.02)


@contextlib.contextmanager
def serving(config=None, **cluster):
  """A queue in a thread; gives its configuration."""
  config = config or config_of(**cluster)
  stop, failures = threading.Event(), []

  def run():
    try:
      queue_service.run(config, 0, stop.is_set)
    except BaseException as error:
      failures.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  try:
    wait_until_served(config)
    yield config
  finally:
    stop.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
  assert not failures, failures


class Program:
  """A queue as a process of its own."""

  def __init__(self, config, folder):
    path = folder / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    self.config, self._log = config, folder / "queue.log"
    self._command = [
      *(sys.executable, "-m", "launch.role", "--role=queue"),
      f"--config_json={path}",
    ]
    self.start()

  def start(self):
    with self._log.open("a") as log:
      self.process = subprocess.Popen(
        self._command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=log,
        stderr=log,
      )
    wait_until_served(self.config)

  def kill(self):
    self.process.kill()
    self.process.wait(PATIENCE)


@contextlib.contextmanager
def program(config, folder):
  found = Program(config, folder)
  try:
    yield found
  finally:
    found.kill()
