"""Programs for pods that aren't here; needs libtpu, extra [tpu]."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_SMALL = (
  "--config=configs/qwen3_30b_a3b.py",
  "--config.model.layers=2",
  "--config.model.vocab_size=1024",
  "--config.model.experts=16",
  "--config.sequence_length=1024",
  "--config.train_mesh.expert=2",
  "--config.train_mesh.tensor=2",
  "--config.serve_mesh.expert=2",
  "--config.serve_mesh.tensor=2",
  "--config.slots=8",
)


def _compile(*flags):
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return subprocess.run(
    [sys.executable, "-m", "launch.compile", *flags],
    cwd=_ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )


needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: pip install -e '.[tpu]'",
)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2"])
def test_train_step_compiles_and_is_accounted_for(topology):
  done = _compile(*_SMALL, f"--topology={topology}", "--step=train")
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout.splitlines()[-1])
  assert report["fits"]
  assert report["chips"] == 8
  # Float32 weights and bfloat16 moments: 8 bytes a parameter, over 4 parts at
  # the least, as the experts' axis doesn't split the attention.
  weights = 8 * report["parameters"]
  assert weights / 8 < report["argument_bytes"] < weights / 3
  assert report["peak_bytes"] > report["argument_bytes"]
  # A row of 1024 tokens for each of fsdp 2 x expert 2 parts.
  assert report["tokens"] == 4 * 1024
  # At least six FLOPs for each dense parameter and token.
  assert report["flops_per_chip"] * 8 > 6 * 1024 * 2048 * report["tokens"]
  # Tokens travel to experts and back.
  assert report["collective_bytes_per_chip"]["all-to-all"] > 0
  assert report["roofline"]["bound"] in ("compute", "memory", "network")
  splash = [n for n in report["opaque_calls"] if n.startswith("splash")]
  assert splash, "attention is not the TPU kernel"


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_serving_steps_compile(step):
  done = _compile(*_SMALL, "--topology=v5e:2x4", f"--step={step}")
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout.splitlines()[-1])
  assert report["fits"]
  assert report["tokens"] == {"prefill": 512, "decode": 8}[step]


@needs_libtpu
@pytest.mark.slow
def test_what_does_not_fit_ends_with_1():
  # Two layers of keys and values of 8192 slots: 8192 x 32768 x 2 KiB x 2.
  flags = ("--config.slots=8192", "--config.sequence_length=32768")
  done = _compile(*_SMALL, *flags, "--topology=v5e:2x4", "--step=decode")
  assert done.returncode == 1, done.stderr
  report = json.loads(done.stdout.splitlines()[-1])
  assert not report["fits"]
  assert "exceeds" in report["reason"]


@pytest.mark.parametrize(
  ("flags", "match"),
  [
    (("--topology=v9:2x2",), "topology 'v9:2x2' has no known chip"),
    (("--config.slotz=3",), "no field 'slotz'"),
    (("--config.model.heads=7",), "kv_heads 8 does not divide heads 7"),
    (("--config.step.compute_dtype=int8",), "compute_dtype is 'int8'"),
    (("--config.loss=nonsense",), "nonsense"),
    (("--step=sleep",), "sleep"),
  ],
  ids=lambda v: v[0] if isinstance(v, tuple) else "",
)
def test_wrong_flags_are_one_line(flags, match):
  done = _compile(*flags)
  assert done.returncode in (1, 2)
  assert match in done.stderr
  assert "Traceback" not in done.stderr
