"""Whether a step fits a pod, and the least time it can take."""

from __future__ import annotations

import os
import time
from typing import Any

import jax
from jax.experimental import topologies

from arl_jax import sharding
from arl_jax.model import transformer
from arl_jax.observability import chips, hlo
from arl_jax.runtime import pod
from arl_jax.runtime.pod_config import PodConfig

_GIB = 1 << 30

# Programs with work on the sparse cores can't be written out as text.
_OPTIONS = {
  "xla_tpu_offload_gather_to_sparsecore": "false",
  "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
}


def compile_step(config: PodConfig, step: str, topology: str) -> dict[str, Any]:
  """Compiles "train", "prefill" or "decode" ahead of time, for every chip.

  Needs libtpu (extra `[tpu]`) and no TPU.

  Args:
    config: of the pod.
    step: which program.
    topology: chips and their grid, such as "v5p:4x4x4".

  Returns:
    What `table` prints: bytes a chip, FLOPs, bytes moved and sent, and the
    roofline in seconds; "fits" says whether the compiler found room. A loop
    over microbatches, whose number is known only as it runs, counts as one:
    the figures of "train" are those of one microbatch with the update. Kernels
    of experts count the rows that their buffers hold, not those that will be
    in use.

  Raises:
    ValueError: an unknown topology, a mesh that doesn't fit it, or no libtpu.
  """
  chip = chips.chip_of(topology)
  devices = _devices(topology)
  lowered = pod.lower(config, step, devices)
  report: dict[str, Any] = {
    "step": step,
    "topology": topology,
    "chips": len(devices),
    "parameters": sharding.parameter_count(transformer.specs(config.model)),
    "hbm_bytes_per_chip": chip.hbm_bytes,
  }
  began = time.monotonic()
  try:
    compiled = lowered.compile(_OPTIONS)
  except jax.errors.JaxRuntimeError as e:
    if "RESOURCE_EXHAUSTED" not in str(e):
      raise
    return {**report, "fits": False, "reason": str(e).split("\n")[0][:500]}
  report["compile_seconds"] = round(time.monotonic() - began, 1)
  memory = compiled.memory_analysis()
  spent = hlo.account(compiled.as_text())
  # Donated arguments are also results and count once.
  peak = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )
  rows = config.rows_per_shard * config.train_mesh.shards(len(devices))
  # Decoding doesn't use the kernel.
  attention = 0.0
  if step == "train":
    attention = _attention_flops(config, rows) / len(devices)
  bound = chips.roofline(
    spent.flops + attention,
    spent.hbm_bytes,
    sum(spent.collective_bytes.values()),
    chip,
  )
  return {
    **report,
    "argument_bytes": memory.argument_size_in_bytes,
    "temporary_bytes": memory.temp_size_in_bytes,
    "peak_bytes": peak,
    "flops_per_chip": spent.flops,
    "attention_flops_per_chip": attention,
    "bytes_per_chip": spent.hbm_bytes,
    "collective_bytes_per_chip": dict(spent.collective_bytes),
    "opaque_calls": dict(spent.opaque_calls),
    "unknown_loops": list(spent.unknown_loops),
    "roofline": bound,
    "tokens": _tokens(config, step, rows),
    "fits": peak <= chip.hbm_bytes,
  }


def _devices(topology: str) -> list[Any]:
  # libtpu would look for the machine it runs on; here it only compiles.
  for name, value in (
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("TPU_ACCELERATOR_TYPE", "v5p-8"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
  ):
    os.environ.setdefault(name, value)
  try:
    described = topologies.get_topology_desc(
      platform="tpu", topology_name=topology
    )
  except Exception as e:  # Whatever the plug-in raises.
    reason = str(e).strip().split("\n")[-1][:300]
    raise ValueError(
      f"topology {topology!r} can't be described: {reason}; is libtpu"
      " installed (pip install 'arl-jax[tpu]')?"
    ) from None
  return list(described.devices)


def _tokens(config: PodConfig, step: str, rows: int) -> int:
  return {
    "train": rows * config.sequence_length,
    "prefill": config.prefill_rows * config.prefill_chunk,
    "decode": config.slots,
  }[step]


def _attention_flops(config: PodConfig, rows: int) -> float:
  """Products of the attention kernel, which tells XLA nothing of its cost.

  Each query meets on average half of a full context, or its window. Forward
  there are two products, backward five, and the backward pass of a
  rematerialised layer starts with another forward one.
  """
  model, t = config.model, config.sequence_length
  met = sum(min(t / 2, model.layer(i).window or t) for i in range(model.layers))
  forward = 2 * model.heads * (model.head_dim + model.values) * met
  passes = 1 + 2.5 + (model.remat != "none")
  return passes * forward * rows * t


def table(report: dict[str, Any]) -> str:
  """The report for people."""
  lines = [
    f"{report['step']} on {report['topology']} ({report['chips']} chips),"
    f" {report['parameters'] / 1e9:.1f}B parameters"
  ]
  if "reason" in report:
    return "\n".join([*lines, f"does not fit: {report['reason']}"])
  limit = report["hbm_bytes_per_chip"]
  for name in ("argument", "temporary", "peak"):
    size = report[f"{name}_bytes"]
    lines.append(
      f"  {name:<12}{size / _GIB:8.2f} GiB a chip {size / limit:6.0%} of HBM"
    )
  lines.append(f"  compute     {report['flops_per_chip'] / 1e12:8.2f} TFLOP")
  lines.append(
    f"  attention   {report['attention_flops_per_chip'] / 1e12:8.2f} TFLOP"
  )
  lines.append(f"  memory      {report['bytes_per_chip'] / 1e9:8.2f} GB moved")
  for kind, size in report["collective_bytes_per_chip"].items():
    lines.append(f"  {kind:<20}{size / 1e9:8.2f} GB sent")
  for name, value in report["roofline"].items():
    shown = f"{value:.4g}" if isinstance(value, float) else value
    lines.append(f"  {name:<20}{shown}")
  lines.append("fits" if report["fits"] else "does not fit")
  return "\n".join(lines)
