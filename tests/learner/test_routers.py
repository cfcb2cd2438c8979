"""Selection biases that follow the load of the experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.learner import OptimizerConfig
from arl_jax.model import ModelConfig, forward

_RATE = 0.25
# A dense layer, then two periods of two kinds of layers and half a period.
_SCANNED = ModelConfig(
  vocab_size=64,
  width=16,
  layers=6,
  head_dim=8,
  dense_layers=1,
  dense_width=16,
  windows=(0, 4),
  experts=4,
  expert_width=16,
  router="sigmoid",
  mtp_heads=0,
  scan_layers=True,
)
_PLAIN = dataclasses.replace(_SCANNED, scan_layers=False)


def _unscanned(params):
  """The same parameters with a layer each."""
  layers = {}
  for stack in _SCANNED.stacks():
    for i, name in enumerate(stack.names()):
      for repeat in range(stack.repeats):
        depth = stack.first + i + repeat * len(stack.layers)
        layers[f"{depth:03d}"] = jax.tree.map(
          lambda x, repeat=repeat: x[repeat], params["layers"][name]
        )
  return {**params, "layers": layers}


@pytest.fixture(scope="module")
def params(params_of):
  return params_of(_SCANNED)


@pytest.fixture(scope="module")
def load(params, experiences):
  """[MoE layers, E] choices of the tokens that are packed."""
  segments = [s for e in experiences for s in e.segments if s.trained.any()]
  ids, real = np.zeros((2, len(segments), 16), np.int32)
  for i, segment in enumerate(segments):
    ids[i, : len(segment)] = segment.ids
    real[i, : len(segment)] = 1

  @jax.jit
  def chosen(params):
    rows, numbers = jnp.asarray(ids), jnp.asarray(real)
    return forward(params, _PLAIN, rows, segment_ids=numbers, return_aux=True)[
      1
    ]["experts"]

  experts = np.asarray(chosen(_unscanned(params)))[real > 0]
  return np.stack(
    [np.bincount(experts[:, i].ravel(), minlength=4) for i in range(5)]
  )


def _biases(params):
  return {
    name: np.asarray(layer["moe"]["choice_bias"])
    for name, layer in params["layers"].items()
    if "moe" in layer
  }


def _learner(learner_of, model, params, **kwargs):
  # Two microbatches: the load is that of the whole batch.
  return learner_of(
    model, params=params, bias_rate=_RATE, rows=2, microbatches=2, **kwargs
  )


@pytest.mark.parametrize("scanned", [True, False])
def test_biases_move_towards_an_even_load(
  learner_of, params, load, experiences, scanned
):
  given = params if scanned else _unscanned(params)
  learner = _learner(learner_of, _SCANNED if scanned else _PLAIN, given)
  # No gradient reaches them, so no optimizer has moments of them.
  for path, _ in jax.tree_util.tree_leaves_with_path(learner.state.opt_state):
    assert "choice_bias" not in jax.tree_util.keystr(path)
  learner.step(experiences)
  found = jax.device_get(learner.state.params)
  biases = _biases(_unscanned(found) if scanned else found)
  mean = load.mean(-1, keepdims=True)
  want = _RATE * np.sign(mean - load)
  assert sorted(biases) == [f"{depth:03d}" for depth in range(1, 6)]
  for got, row in zip((biases[k] for k in sorted(biases)), want, strict=True):
    np.testing.assert_array_equal(got, row)
  assert len({tuple(row) for row in want}) > 2


def test_frozen_biases_stay(learner_of, params_of, experiences):
  model = dataclasses.replace(_PLAIN, layers=2, dense_layers=0)
  tx = OptimizerConfig(frozen="layers/000", warmup_steps=1)
  learner = _learner(learner_of, model, params_of(model), tx=tx)
  learner.step(experiences)
  moved = {k: b.any() for k, b in _biases(learner.state.params).items()}
  assert moved == {"000": False, "001": True}
