"""Held-out reward before and after RL, over seeds of the quickstart.

  python -m benchmarks.quickstart_seeds --seeds=0,1,2 --run_dir=runs/seeds

Runs whole quickstarts one after another (minutes each); a finished run in
`run_dir` is read, not repeated.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from absl import app, flags

_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds to run.")
_RUN_DIR = flags.DEFINE_string("run_dir", "runs/seeds", "Where runs go.")
_CONFIG = flags.DEFINE_string("config", "configs/quickstart.py", "Recipe.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  figures: dict[str, object] = {}
  apart, lowest_difference = True, float("inf")
  for seed in _SEEDS.value:
    summary = _run(seed)
    before, after = summary["before"], summary["after"]
    figures[f"seed_{seed}"] = {
      "before": before,
      "after": after,
      "paired_reward_difference": summary["paired_reward_difference"],
      "seconds": summary["seconds"],
      "tokens_per_second": summary["tokens_per_second"],
    }
    apart &= after["reward"][1] > before["reward"][2]
    lowest = summary["paired_reward_difference"][1]
    lowest_difference = min(lowest_difference, lowest)
  figures["intervals_apart"] = apart
  figures["lowest_paired_difference"] = lowest_difference
  print(
    json.dumps(
      {
        "name": "quickstart_seeds",
        "figures": figures,
        "limits": {},
        "aims": {
          "intervals_apart": ["==", True],
          "lowest_paired_difference": [">", 0],
        },
        "met": bool(apart and lowest_difference > 0),
      }
    )
  )


def _run(seed: str) -> dict:
  folder = pathlib.Path(_RUN_DIR.value) / seed
  summary = folder / "summary.json"
  if not summary.is_file():
    command = [sys.executable, "-m", "launch.train"]
    command += [f"--config={_CONFIG.value}", f"--config.seed={seed}"]
    command += [f"--config.run_dir={folder}", "--overwrite"]
    subprocess.run(command, check=True, stdout=sys.stderr)
  return json.loads(summary.read_text())


if __name__ == "__main__":
  app.run(main)
