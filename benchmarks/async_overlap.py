"""How much of two cores an asynchronous run uses while tools make it wait.

  python -m benchmarks.async_overlap

The same run, with tools that sleep 0.2 to 2 s a turn, in many processes:
strictly on-policy, and with groups that are up to `--max_staleness` versions
old. Its parts alone: rollouts under a learner that does nothing
(`simulated_learner`), and the learner on recorded groups (`train_only`). A step
can't take less than rollouts alone take, nor than the processor time of both
over the cores. Figures are over the second half of the steps.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from arl_jax.observability import metrics

_STEPS = flags.DEFINE_integer("steps", 16, "Of each run.", lower_bound=4)
_STALENESS = flags.DEFINE_integer(
  "max_staleness", 2, "Of the asynchronous run.", lower_bound=1
)
_SMOKE = flags.DEFINE_bool("smoke", False, "Small runs, to see that it works.")

# Not `--config.smoke`, which takes too few steps to tell.
_SMALL = (
  *("--config.model.width=32", "--config.model.head_dim=16"),
  *("--config.model.expert_width=32", "--config.rl.tasks_per_step=2"),
  *("--config.warm_start.opening_steps=10", "--config.warm_start.steps=20"),
)
_ROOT = pathlib.Path(__file__).parents[1]
_SECONDS = 3000.0
# Between two looks at processor times.
_LOOK_SECONDS = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


class _Run:
  """A run as a program, and the processor seconds of its processes."""

  def __init__(self, folder: pathlib.Path, name: str, *extra: str):
    self.path = folder / name
    self._process = subprocess.Popen(
      [
        *(sys.executable, "-m", "launch.train"),
        "--config=benchmarks/slow_tools.py",
        *(f"--config.run_dir={self.path}", *extra),
        *(_SMALL if _SMOKE.value else ()),
        f"--config.rl.steps={_STEPS.value}",
      ],
      cwd=_ROOT,
      env=_environment(folder),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
    )
    # Processor seconds so far, at the end of each step.
    self._cpu: dict[int, float] = {}

  def finish(self) -> None:
    limit = time.monotonic() + _SECONDS
    while self._process.poll() is None:
      if time.monotonic() > limit:
        self._process.kill()
        raise TimeoutError(f"{self.path.name} took more than {_SECONDS} s")
      steps = len(self._lines())
      if steps and steps not in self._cpu:
        self._cpu[steps] = _processor_seconds(self._process.pid)
      time.sleep(_LOOK_SECONDS)
    if self._process.returncode:
      assert self._process.stderr is not None
      raise RuntimeError(self._process.stderr.read().decode()[-2000:])

  def _lines(self) -> list[dict[str, float]]:
    path = self.path / "metrics.jsonl"
    lines = metrics.read(path) if path.exists() else []
    return [line for line in lines if line["phase"] == "rl"]

  def seconds(self) -> float:
    """A step of the second half takes so long, on average."""
    times = [line["time"] for line in self._lines()][_STEPS.value // 2 - 1 :]
    return (times[-1] - times[0]) / (len(times) - 1)

  def processor_seconds(self) -> float:
    """Of a step in the second half, on average."""
    steps = sorted(s for s in self._cpu if s >= _STEPS.value // 2)
    first, last = steps[0], steps[-1]
    return (self._cpu[last] - self._cpu[first]) / (last - first)

  def mean(self, name: str) -> float:
    lines = self._lines()[_STEPS.value // 2 :]
    return statistics.fmean(line[name] for line in lines if name in line)


def _environment(folder: pathlib.Path) -> dict[str, str]:
  return os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }


def _processor_seconds(pid: int) -> float:
  """Of a process and all below it that run."""
  parents, spent = {}, {}
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      fields = (path / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
      continue
    parents[int(path.name)] = int(fields[1])
    spent[int(path.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
  family, frontier = set(), {pid}
  while frontier:
    family |= frontier
    frontier = {p for p, parent in parents.items() if parent in frontier}
  return sum(spent.get(p, 0.0) for p in family)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  many = ("--config.cluster.actors=1", "--config.cluster.servers=1")
  stale = f"--config.rl.max_staleness={_STALENESS.value}"
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)

    def run(name: str, *extra: str) -> _Run:
      found = _Run(folder, name, *extra)
      found.finish()
      return found

    sync = run("sync", *many, "--config.rl.record_groups")
    asynchronous = run("async", *many, stale)
    rollouts = run(
      "rollouts",
      *(*many, stale, "--config.mode=simulated_learner"),
      "--config.simulated_seconds=0",
    )
    learner = run(
      "learner", "--config.mode=train_only", f"--config.replay={sync.path}"
    )
    cores = len(os.sched_getaffinity(0))
    busy = rollouts.processor_seconds() + learner.processor_seconds()
    limit = max(rollouts.seconds(), busy / cores)
    figures = {
      "episode_turns": asynchronous.mean("turns"),
      "sync_seconds_a_step": sync.seconds(),
      "async_seconds_a_step": asynchronous.seconds(),
      "async_over_sync": sync.seconds() / asynchronous.seconds(),
      "async_over_limit": limit / asynchronous.seconds(),
      "idle_learner": asynchronous.mean("idle_learner"),
      "staleness_mean": asynchronous.mean("staleness_mean"),
    }
    limits = {
      "rollouts_seconds_a_step": rollouts.seconds(),
      "rollouts_processor_seconds": rollouts.processor_seconds(),
      "learner_seconds_a_step": learner.seconds(),
      "learner_processor_seconds": learner.processor_seconds(),
      "cores": float(cores),
      "seconds_a_step": limit,
    }
  aims = {"async_over_sync": [">=", 1.6], "async_over_limit": [">=", 0.9]}
  print(
    json.dumps(
      {
        "name": "async_overlap",
        "figures": figures,
        "limits": limits,
        "aims": aims,
        "met": figures["async_over_sync"] >= 1.6
        and figures["async_over_limit"] >= 0.9,
      }
    )
  )


if __name__ == "__main__":
  app.run(main)
