"""Peak figures by name, and bounds derived by hand from them."""

import pytest

from arl_jax.observability import chips


@pytest.mark.parametrize(
  ("topology", "name"),
  [
    ("v5p:8x8x8", "v5p"),
    ("v5e:16x16", "v5e"),
    ("v4", "v4"),
    ("V6E:2x4", "v6e"),
    ("h200:8", "h200"),
  ],
)
def test_a_topology_begins_with_its_chip(topology, name):
  assert chips.chip_of(topology) is chips.CHIPS[name]


@pytest.mark.parametrize("topology", ["v9:2x2", "8x8", ":v4", ""])
def test_an_unknown_topology_is_told_the_known_ones(topology):
  with pytest.raises(
    ValueError,
    match=r"has no known .* known are v4, v5e, v5p, v6e, h100, h200, b200$",
  ) as caught:
    chips.chip_of(topology)
  assert str(caught.value).startswith(f"topology {topology!r} ")


def test_units_are_bytes_and_seconds():
  v5p = chips.chip_of("v5p")
  # 95 GiB of 1024^3 bytes each.
  assert v5p.hbm_bytes == 102_005_473_280
  # 102.005 GB at 2765 GB/s: the memory is read once in 36.9 ms.
  times = chips.roofline(0, v5p.hbm_bytes, 0, v5p)
  assert times["memory_s"] == pytest.approx(0.036892, rel=1e-4)


@pytest.mark.parametrize(
  ("work", "seconds", "bound"),
  [
    # A v5e computes 197 TFLOP/s, moves 819 GB/s and sends 200 GB/s.
    ((394e12, 819e9, 100e9), (2.0, 1.0, 0.5), "compute"),
    ((197e12, 1638e9, 300e9), (1.0, 2.0, 1.5), "memory"),
    ((98.5e12, 409.5e9, 600e9), (0.5, 0.5, 3.0), "network"),
  ],
)
def test_the_longest_of_three_times_is_the_bound(work, seconds, bound):
  times = chips.roofline(*work, chips.chip_of("v5e:2x2"))
  assert times == {
    "compute_s": pytest.approx(seconds[0]),
    "memory_s": pytest.approx(seconds[1]),
    "network_s": pytest.approx(seconds[2]),
    "bound": bound,
  }


@pytest.mark.parametrize(
  ("rows", "compute_s", "memory_s", "bound"),
  [
    # 2 * 4096^3 = 137.44 GFLOP at 459 TFLOP/s; three bfloat16 matrices of
    # 4096^2, 100.66 MB, at 2765 GB/s.
    (4096, 2.9943e-4, 3.6406e-5, "compute"),
    # 2 * 4096^2 = 33.554 MFLOP; one matrix and two vectors, 33.571 MB.
    (1, 7.3103e-8, 1.2141e-5, "memory"),
  ],
)
def test_products_of_matrices_on_a_v5p(rows, compute_s, memory_s, bound):
  n = 4096
  flops = 2 * rows * n * n
  moved = 2 * (n * n + 2 * rows * n)
  times = chips.roofline(flops, moved, 0, chips.chip_of("v5p:2x2x1"))
  assert times == {
    "compute_s": pytest.approx(compute_s, rel=1e-4),
    "memory_s": pytest.approx(memory_s, rel=1e-4),
    "network_s": 0,
    "bound": bound,
  }
