"""Times measured so that a shared machine's noise hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

_REPEATS = 5
_PRODUCTS = 5


def interleaved(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
  """Median seconds of each, measured in turns; the first turn is left out."""
  times: dict[str, list[float]] = {name: [] for name in runs}
  for repeat in range(_REPEATS + 1):
    for name, run in runs.items():
      began = time.perf_counter()
      jax.block_until_ready(run())
      if repeat:
        times[name].append(time.perf_counter() - began)
  return {name: statistics.median(t) for name, t in times.items()}


def product() -> tuple[Callable[[], object], float]:
  """XLA's own float32 matrix product, and the FLOPs of a run of it."""
  n = 3072
  x = jnp.ones((n, n))
  multiply = jax.jit(jnp.matmul)

  def run() -> object:
    # Several in a row: the first one after other work finds cold caches.
    for _ in range(_PRODUCTS):
      y = multiply(x, x).block_until_ready()
    return y

  return run, _PRODUCTS * 2.0 * n**3
