"""Servers as programs of their own, with a checkpoint of nothing learned."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import httpx
import jax

from arl_jax import checkpoints, model
from arl_jax.model import ModelConfig
from tests.serving.http_serving import tokenizer

ROOT = pathlib.Path(__file__).parents[2]
# Seconds until a program must have done what it is waited for.
PATIENCE = 180
CONFIG = ModelConfig(
  vocab_size=260,
  width=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  experts=0,
  mtp_heads=0,
  context_length=4096,
  dense_width=64,
)


def write_checkpoint(folder):
  """A folder in Hugging Face layout; gives its parameters."""
  params = model.init(CONFIG, jax.random.key(0))
  checkpoints.save_hf(folder, CONFIG, params)
  spec = tokenizer()._all.to_str()
  (folder / "tokenizer.json").write_text(spec)
  config = {"eos_token": "<|im_end|>"}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return params


class Program:
  """One run of `launch.serve`."""

  def __init__(self, checkpoint, log, *flags, port=0, grpc_port=-1):
    self.log = log
    with log.open("w") as file:
      self.process = subprocess.Popen(
        [
          *(sys.executable, "-m", "launch.serve", f"--checkpoint={checkpoint}"),
          *(f"--port={port}", f"--config.serving.grpc_port={grpc_port}"),
          *("--config.max_length=128", "--config.engine.prefill_chunk=32"),
          "--config.engine.max_concurrent_decodes=4",
          *flags,
        ],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        stderr=file,
        stdout=file,
      )

  def text(self):
    return self.log.read_text()

  def wait_until(self, true, what):
    limit = time.monotonic() + PATIENCE
    while not (found := true()):
      assert self.process.poll() is None, self.text()
      assert time.monotonic() < limit, f"no {what}: {self.text()}"
      time.sleep(0.05)
    return found

  @property
  def port(self):
    pattern = r"HTTP: http://[^:]+:(\d+)"
    found = self.wait_until(lambda: re.search(pattern, self.text()), "port")
    return int(found[1])

  @property
  def grpc_port(self):
    pattern = r"gRPC: [^:]+:(\d+)"
    return int(
      self.wait_until(lambda: re.search(pattern, self.text()), "port")[1]
    )

  @property
  def url(self):
    return f"http://127.0.0.1:{self.port}"

  def load(self):
    return httpx.get(self.url + "/admin/load", timeout=PATIENCE).json()

  def wait_until_ready(self):
    self.wait_until(
      lambda: httpx.get(self.url + "/ready", timeout=PATIENCE).is_success,
      "readiness",
    )
    return self

  def end(self, number=signal.SIGTERM):
    self.process.send_signal(number)
    return self.process.wait(PATIENCE)


@contextlib.contextmanager
def program(*args, **changes):
  found = Program(*args, **changes)
  try:
    yield found
  finally:
    found.process.kill()
    found.process.wait(PATIENCE)
