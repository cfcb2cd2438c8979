"""On eight devices a model computes what it computes on one.

gpt-oss is in `test_logprobs`, any choice of experts in `test_dispatch`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import sharding
from arl_jax.model import forward, specs

# Compiled once, run once: optimising takes longer than it saves.
_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)

MESHES = (
  {"data": 2, "fsdp": 2, "expert": 2},
  {"fsdp": 2, "expert": 2, "tensor": 2},
  {"expert": 8},
)


def _results(config, params, ids, numbers):
  """Logits, and the gradient of sums over them and over the balance."""

  def total(params):
    logits, record = forward(
      params, config, ids, segment_ids=numbers, return_aux=True
    )
    loss = (jax.nn.log_softmax(logits) * _weights(logits.shape)).sum()
    if config.moe_layers:
      balance = record["balance"]
      loss += (balance * _weights(balance.shape)).sum()
    return loss, logits

  gradient, logits = jax.grad(total, has_aux=True)(params)
  return {"logits": logits, "gradient": gradient}


def _weights(shape):
  """Of either sign, so that no sum over them is known beforehand."""
  return jnp.cos(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


def _rows(model, rows):
  """Rows of two segments each, with padding."""
  ids = np.resize(model.ids[:, :12], (rows, 12))
  numbers = np.repeat(np.array([1, 2, 0], np.int32), [7, 4, 1])
  return ids, np.tile(numbers, (rows, 1))


def _placed(sizes, config, params):
  mesh = sharding.make_mesh(**sizes)
  return mesh, jax.device_put(params, sharding.shardings(specs(config), mesh))


def _agree(got, want):
  """Every array within 1e-5 of its largest entry."""
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(jax.device_get(got)),
    jax.tree.leaves(want),
    strict=True,
  ):
    name = jax.tree_util.keystr(path)
    scale = np.abs(b).max()
    # The bias of the choice has no gradient.
    assert (scale > 0) == ("choice_bias" not in name), name
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.fixture(scope="module")
def models(golden, cut, scanned):
  """Name -> configuration, parameters, rows and what one device computes.

  One layer, but both kinds of layers of a model that has dense ones. Five
  tokens travel at a time: 12 of each device make three chunks, the last one
  not full.
  """

  @functools.cache
  def make(name):
    model = golden(name)
    layers = model.config.dense_layers + 1
    config, params = cut(model.config, model.params, layers)
    config = dataclasses.replace(config, dispatch_tokens=5)
    if name == "qwen3_moe":
      config, params = scanned(config, params)
    ids, numbers = _rows(model, 8)
    run = _jit(functools.partial(_results, config))
    want = jax.device_get(run(params, jnp.array(ids), jnp.array(numbers)))
    return config, params, ids, numbers, want

  return make


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_on_many_devices_compute_what_one_does(name, sizes, models):
  config, params, ids, numbers, want = models(name)
  mesh, params = _placed(sizes, config, params)
  with jax.set_mesh(mesh):
    run = _jit(functools.partial(_results, config))
    _agree(run(params, jnp.array(ids), jnp.array(numbers)), want)
  gate = params["layers"][f"{config.dense_layers:03d}"]["moe"]["gate"]
  held = gate.addressable_shards[0].data.shape[-3]
  assert held == config.experts // sizes["expert"]


def test_dense_model_on_many_devices_computes_what_one_does(models):
  config, params, ids, numbers, want = models("llama")
  mesh, params = _placed({"data": 2, "fsdp": 2, "tensor": 2}, config, params)
  with jax.set_mesh(mesh):
    run = _jit(functools.partial(_results, config))
    _agree(run(params, jnp.array(ids), jnp.array(numbers)), want)
