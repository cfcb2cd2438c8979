"""Recipes compiled for the pods they are meant for: memory and rooflines.

  python -m benchmarks.pods [--only=kimi_k2]

Needs libtpu (`pip install -e '.[tpu]'`) and no TPU; takes minutes a program.
Each program is compiled by `launch.compile` in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys

from absl import app, flags

_ONLY = flags.DEFINE_string("only", "", "A recipe; by default all.")

_PODS = (
  ("gpt_oss_20b", "v6e:4x4"),
  ("gpt_oss_20b", "v5e:8x8"),
  ("gpt_oss_120b", "v5p:4x4x4"),
  ("qwen3_30b_a3b", "v5e:8x8"),
  ("kimi_k2", "v5p:8x8x16"),
)
_STEPS = ("train", "prefill", "decode")


def _compile(recipe: str, topology: str, step: str) -> dict:
  done = subprocess.run(
    [
      *(sys.executable, "-m", "launch.compile"),
      f"--config=configs/{recipe}.py",
      f"--topology={topology}",
      f"--step={step}",
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  if not done.stdout:
    raise RuntimeError(f"{recipe} on {topology}: {done.stderr[-500:]}")
  *table, last = done.stdout.splitlines()
  print("\n".join(table), file=sys.stderr)
  return json.loads(last)


def main(argv: list[str]) -> None:
  del argv
  figures, limits, met = {}, {}, True
  for recipe, topology in _PODS:
    if _ONLY.value not in ("", recipe):
      continue
    for step in _STEPS:
      report = _compile(recipe, topology, step)
      name = f"{recipe} {topology} {step}"
      limits[name] = report["hbm_bytes_per_chip"]
      figures[name] = report.get("peak_bytes")
      met &= report["fits"]
  print(
    json.dumps(
      {
        "name": "pods",
        "figures": figures,
        "limits": limits,
        "aims": {name: ["<=", limit] for name, limit in limits.items()},
        "met": met,
      }
    )
  )


if __name__ == "__main__":
  app.run(main)
