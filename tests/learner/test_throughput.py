import inspect

import jax
import jax.numpy as jnp
import pytest

from arl_jax.learner import throughput
from arl_jax.model import ModelConfig, init


def _count(model):
  shapes = jax.eval_shape(lambda: init(model, jax.random.key(0)))
  return sum(x.size for x in jax.tree.leaves(shapes))


def test_token_passes_through_its_experts_only():
  # Of 8 experts of 3 · 16 · 32 a token meets 2, in 2 layers and the module.
  fields = {"vocab_size": 64, "width": 16, "layers": 3, "head_dim": 8}
  model = ModelConfig(
    **fields,
    dense_layers=1,
    dense_width=16,
    experts=8,
    experts_per_token=2,
    expert_width=32,
  )
  idle = 3 * 6 * (3 * 16 * 32)
  assert throughput.active_parameters(model) == _count(model) - idle
  dense = ModelConfig(**fields, experts=0, dense_width=16, mtp_heads=0)
  assert throughput.active_parameters(dense) == _count(dense)


def test_compilations_count_programs_once():
  double = jax.jit(lambda x: 2 * x + 1)
  x, wider = jnp.ones(7), jnp.ones(9)
  before = throughput.compilations()
  double(x), double(x)
  assert throughput.compilations() == before + 1
  double(wider)
  assert throughput.compilations() == before + 2


class _Device:
  platform = "tpu"

  def __init__(self, kind):
    self.device_kind = kind


@pytest.mark.parametrize(
  ("kind", "flops"),
  # bfloat16, as Google publishes them.
  [
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v5p", 459e12),
    ("TPU v99", 0.0),
  ],
)
def test_peak_of_a_known_chip_is_the_published_one(kind, flops):
  assert inspect.unwrap(throughput.peak_flops)(_Device(kind)) == flops


def test_peak_of_a_cpu_is_measured():
  assert 1e8 < throughput.peak_flops(jax.devices()[0]) < 1e15
