"""How fast the learner is, against what the hardware can do."""

from __future__ import annotations

import functools
import resource
import sys
import time

import jax
import jax.monitoring
import jax.numpy as jnp

from arl_jax import sharding
from arl_jax.model import moe, transformer
from arl_jax.model.config import ModelConfig
from arl_jax.observability.chips import CHIPS

# Metrics that are of the machine and the moment, not of what was computed: two
# runs of the same may differ in them.
OF_THE_MACHINE = (
  *("seconds", "tokens_per_second", "share_of_peak_flops"),
  *("compilations", "memory_bytes", "idle_learner"),
)

_COMPILED = "/jax/core/compile/backend_compile_duration"


class _Compilations:
  """Counts what XLA compiles in this process."""

  def __init__(self) -> None:
    self.count = 0
    jax.monitoring.register_event_duration_secs_listener(self._note)

  def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
    del duration_secs
    self.count += event == _COMPILED


@functools.cache
def _compilations() -> _Compilations:
  return _Compilations()


def compilations() -> int:
  """Programs that XLA compiled since this was first called."""
  return _compilations().count


def active_parameters(model: ModelConfig) -> int:
  """Parameters that a token passes through: K of E experts."""
  total = sharding.parameter_count(transformer.specs(model))
  layers = model.moe_layers + (model.mtp_heads if model.moe_layers else 0)
  if not layers:
    return total
  idle = 1 - model.experts_per_token / model.experts
  experts = sharding.parameter_count(moe.expert_specs(model))
  return round(total - layers * experts * idle)


@functools.cache
def peak_flops(device: jax.Device) -> float:
  """FLOP/s of matrix products: public figures, or on a CPU measured.

  On a CPU that is XLA's own float32 product, on all cores. 0 for accelerators
  without a known figure.
  """
  if device.platform == "cpu":
    return _measured_flops()
  kind = device.device_kind.lower().replace("tpu ", "").replace(" lite", "e")
  # What JAX calls a v5p on some machines (jax/_src/pallas/mosaic/tpu_info.py).
  kind = "v5p" if kind == "v5" else kind
  return next((c.flops for n, c in CHIPS.items() if n in kind), 0.0)


def _measured_flops() -> float:
  n, repeats = 1024, 5
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    x = jnp.ones((n, n))
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    seconds = []
    for _ in range(repeats):
      began = time.perf_counter()
      multiply(x, x).block_until_ready()
      seconds.append(time.perf_counter() - began)
  return 2.0 * n**3 / min(seconds)


def memory_bytes() -> int:
  """Peak so far, of the first local device, or on a CPU of the process."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return int(stats["peak_bytes_in_use"])
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
