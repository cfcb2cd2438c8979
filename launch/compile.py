"""Compiles a step for a pod that isn't here, and says whether it fits.

python -m launch.compile --config=configs/gpt_oss_20b.py --topology=v5e:8x8 \
  --step=train

The last line is one JSON object. Exit status 1: it doesn't fit.
"""

from __future__ import annotations

import json
import sys
import time

import jax
from absl import flags
from ml_collections import config_flags

from arl_jax.runtime import pod_report
from arl_jax.runtime.pod_config import PodConfig
from launch import command

_CONFIG = config_flags.DEFINE_config_file("config")
_TOPOLOGY = flags.DEFINE_string(
  "topology", "v5p:4x4x4", "Chips and their grid."
)
_STEP = flags.DEFINE_enum(
  "step", "train", ["train", "prefill", "decode"], "What is compiled."
)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unexpected arguments {argv[1:]}; flags begin with --")
  config = _CONFIG.value
  config.validate()
  jax.config.update("jax_platforms", "cpu")
  began = time.monotonic()
  report = pod_report.compile_step(config, _STEP.value, _TOPOLOGY.value)
  report["seconds"] = round(time.monotonic() - began, 1)
  print(pod_report.table(report))
  print(json.dumps(report))
  sys.exit(0 if report["fits"] else 1)


if __name__ == "__main__":
  command.run(main, PodConfig(), "configs/gpt_oss_20b.py")
