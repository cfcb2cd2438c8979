"""Public peak figures of accelerators, and the bound they set on a program."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
  """Peak figures of one chip.

  Attributes:
    name: generation, as topologies name it.
    flops: bfloat16 FLOP/s of dense matrix products.
    hbm_bytes: capacity of the main memory. Compilers keep a little of it.
    hbm_bandwidth: bytes/s.
    ici_bandwidth: bytes/s that all links of a chip send together, in one
      direction; half of what vendors call bidirectional. A collective along
      one axis of a torus has only some of the links.
  """

  name: str
  flops: float
  hbm_bytes: int
  hbm_bandwidth: float
  ici_bandwidth: float


CHIPS = {
  chip.name: chip
  for chip in (
    # cloud.google.com/tpu/docs/v4 for compute and memory. Links: Jouppi et
    # al., "TPU v4: An Optically Reconfigurable Supercomputer" (2023): 6 of
    # 50 GB/s.
    Chip(
      name="v4",
      flops=275e12,
      hbm_bytes=32 * 2**30,
      hbm_bandwidth=1200e9,
      ici_bandwidth=300e9,
    ),
    # cloud.google.com/tpu/docs/v5e: 400 GB/s of links in both directions.
    Chip(
      name="v5e",
      flops=197e12,
      hbm_bytes=16 * 2**30,
      hbm_bandwidth=819e9,
      ici_bandwidth=200e9,
    ),
    # cloud.google.com/tpu/docs/v5p: 1200 GB/s of links in both directions.
    Chip(
      name="v5p",
      flops=459e12,
      hbm_bytes=95 * 2**30,
      hbm_bandwidth=2765e9,
      ici_bandwidth=600e9,
    ),
    # cloud.google.com/tpu/docs/v6e: 800 GB/s of links in both directions.
    Chip(
      name="v6e",
      flops=918e12,
      hbm_bytes=32 * 2**30,
      hbm_bandwidth=1638e9,
      ici_bandwidth=400e9,
    ),
    # NVIDIA's data sheets of H100 and H200 (SXM): 1979 TFLOP/s with sparsity,
    # NVLink 900 GB/s in both directions.
    Chip(
      name="h100",
      flops=989e12,
      hbm_bytes=80 * 10**9,
      hbm_bandwidth=3350e9,
      ici_bandwidth=450e9,
    ),
    Chip(
      name="h200",
      flops=989e12,
      hbm_bytes=141 * 10**9,
      hbm_bandwidth=4800e9,
      ici_bandwidth=450e9,
    ),
    # NVIDIA's data sheet of DGX B200, an eighth of it: 1440 GB at 64 TB/s,
    # NVLink 14.4 TB/s in both directions; 4.5 PFLOP/s with sparsity.
    Chip(
      name="b200",
      flops=2250e12,
      hbm_bytes=180 * 10**9,
      hbm_bandwidth=8000e9,
      ici_bandwidth=900e9,
    ),
  )
}


def chip_of(topology: str) -> Chip:
  """The chip of a topology such as "v5p:8x8x8", or of a name alone.

  Raises:
    ValueError: no figures are known for it.
  """
  name = topology.partition(":")[0].lower()
  if name not in CHIPS:
    raise ValueError(
      f"topology {topology!r} has no known chip before its colon; known are"
      f" {', '.join(CHIPS)}"
    )
  return CHIPS[name]


def roofline(
  flops: float, hbm_bytes: float, collective_bytes: float, chip: Chip
) -> dict[str, float | str]:
  """Least time of a program on one chip, were nothing but peaks to limit it.

  Args:
    flops: that the chip computes.
    hbm_bytes: that it reads and writes.
    collective_bytes: that it sends.
    chip: its peaks.

  Returns:
    "compute_s", "memory_s" and "network_s" in seconds, and in "bound" which of
    "compute", "memory" and "network" takes longest.
  """
  seconds = {
    "compute": flops / chip.flops,
    "memory": hbm_bytes / chip.hbm_bandwidth,
    "network": collective_bytes / chip.ici_bandwidth,
  }
  times: dict[str, float | str] = {f"{k}_s": v for k, v in seconds.items()}
  return times | {"bound": max(seconds, key=lambda k: seconds[k])}
