"""Two processes of four devices each train what one device trains."""

import dataclasses
import os
import pathlib
import pickle
import socket
import subprocess
import sys

import jax
import numpy as np
import optax

from arl_jax.learner import Learner, LearnerConfig, StepConfig

_PROGRAM = pathlib.Path(__file__).with_name("two_processes.py")
_ROOT = pathlib.Path(__file__).parents[2]
_SECONDS = 240
_RATE = 0.5


def _free_port():
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def _run_both(inputs, output):
  flags = (
    "--xla_force_host_platform_device_count=4"
    " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
  )
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": flags,
    "PYTHONPATH": str(_ROOT),
  }
  port = _free_port()
  running = [
    subprocess.Popen(
      [sys.executable, _PROGRAM, str(rank), str(port), inputs, output],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for rank in range(2)
  ]
  try:
    said = [process.communicate(timeout=_SECONDS)[0] for process in running]
  finally:
    for process in running:
      process.kill()
      process.wait()
  for process, text in zip(running, said, strict=True):
    assert process.returncode == 0, text[-4000:]


def test_two_processes_make_the_updates_of_one(
  tmp_path, models, params_of, experiences, assert_close
):
  model = dataclasses.replace(models["moe"], mtp_heads=0)
  given = {
    "model": model,
    "params": params_of(model),
    # Another policy, so that the KL counts.
    "reference": jax.tree.map(lambda x: 0.9 * x, params_of(model)),
    "config": LearnerConfig(
      loss="grpo",
      row_length=12,
      microbatch_tokens=96,
      microbatches=1,
      step=StepConfig(
        reduction="sequence_mean",
        proximal=True,
        kl_weight=0.1,
        balance_weight=0.1,
        clip_norm=1e9,
      ),
    ),
    "experiences": experiences,
    "rate": _RATE,
    # Parameters and experts lie across both processes.
    "mesh": {"fsdp": 4, "expert": 2},
  }
  inputs, output = tmp_path / "inputs", tmp_path / "output.npz"
  inputs.write_bytes(pickle.dumps(given))
  _run_both(inputs, output)

  learner = Learner(
    model,
    given["params"],
    given["config"],
    optax.sgd(_RATE),
    reference=given["reference"],
  )
  steps = [learner.step(experiences), learner.step(experiences, substeps=2)]
  with np.load(output) as found:
    leaves = [
      found[f"leaf{i}"] for i in range(len(jax.tree.leaves(given["params"])))
    ]
    assert_close(leaves, jax.tree.leaves(learner.state.params))
    for i, want in enumerate(steps):
      for name in ("loss", "grad_norm", "reference_kl_k2", "gap_max"):
        np.testing.assert_allclose(
          found[f"step{i}/{name}"], want[name], rtol=1e-5
        )
