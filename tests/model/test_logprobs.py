import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import sharding
from arl_jax.model import ModelConfig, init, logprobs, specs
from arl_jax.model import forward as _forward
from arl_jax.model import token_logprobs as _token_logprobs
from arl_jax.model.rope import segment_positions

CONFIG = ModelConfig(
  vocab_size=64, width=32, layers=1, heads=2, head_dim=8, expert_width=16
)

# Compiled: eager dispatch of the many small operations takes longer. Not
# optimised, which takes longer still.
_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
forward = _jit(functools.partial(_forward, config=CONFIG))
token_logprobs = _jit(functools.partial(_token_logprobs, config=CONFIG))


@pytest.fixture(scope="module")
def params():
  return _jit(functools.partial(init, CONFIG))(jax.random.key(0))


def _ids(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 64, shape, np.int32)


def _naive(logits, ids, temperature):
  """Log-probs and entropies aligned with ids, 0 for the first of a row."""
  log_p = jax.nn.log_softmax(logits[:, :-1] / temperature, -1)
  logp = jnp.take_along_axis(log_p, ids[:, 1:, None], -1)[..., 0]
  entropy = -(jnp.exp(log_p) * log_p).sum(-1)
  return (jnp.pad(x, ((0, 0), (1, 0))) for x in (logp, entropy))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_are_those_of_the_logits_and_aligned(
  params, temperature
):
  ids = _ids(2, 16)
  logp, entropy = token_logprobs(params, input_ids=ids, temperature=temperature)
  want = _naive(forward(params, input_ids=ids), ids, temperature)
  for got, expected in zip((logp, entropy), want, strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-5)
  assert (np.asarray(entropy)[:, 1:] > 0).all()
  assert np.asarray(entropy).max() <= np.log(64) + 1e-5


def test_temperature_of_each_token_is_its_own(params):
  ids = _ids(2, 16)
  temperature = np.where(np.arange(32).reshape(2, 16) % 3, 1.0, 0.5)
  mixed, _ = token_logprobs(
    params, input_ids=ids, temperature=temperature.astype(np.float32)
  )
  cold, warm = (
    token_logprobs(params, input_ids=ids, temperature=t)[0] for t in (0.5, 1.0)
  )
  np.testing.assert_allclose(
    mixed, np.where(temperature == 1.0, warm, cold), atol=1e-6
  )


def test_first_tokens_and_padding_have_no_log_prob(params):
  ids = _ids(2, 16)
  numbers = np.array(
    [[1] * 5 + [2] * 1 + [3] * 7 + [0] * 3, [4] * 16], np.int32
  )
  logp, entropy = token_logprobs(params, input_ids=ids, segment_ids=numbers)
  positions = np.asarray(segment_positions(jnp.array(numbers)))
  nothing = (numbers == 0) | (positions == 0)
  # The first of four segments, and three tokens of padding.
  assert nothing.sum() == 4 + 3
  for array in (np.asarray(logp), np.asarray(entropy)):
    assert not array[nothing].any()
    assert array[~nothing].all()


_WANTED = np.random.default_rng(3).random((2, 16)) < 0.3
_WEIGHT = np.arange(32, dtype=np.float32).reshape(2, 16) / 32 - 0.4


def _weighted(logp, entropy, wanted):
  return jnp.where(wanted, _WEIGHT * (logp + 0.1 * entropy), 0.0).sum()


@pytest.fixture(scope="module")
def naive(params):
  """Log-probs, entropies and the gradient from whole logits."""
  ids = jnp.array(_ids(2, 16))

  def total(p):
    logp, entropy = _naive(_forward(p, CONFIG, ids), ids, 0.8)
    return _weighted(logp, entropy, _WANTED), (logp, entropy)

  return _jit(jax.value_and_grad(total, has_aux=True))(params)


@pytest.mark.parametrize("chunk", [512, 8])
def test_wanted_log_probs_and_their_gradient_are_those_of_the_naive_form(
  params, naive, chunk, monkeypatch
):
  # 8 positions a chunk: some are skipped, one is partly filled.
  monkeypatch.setattr(logprobs, "_LOGIT_CHUNK", chunk)
  ids = jnp.array(_ids(2, 16))

  @_jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def sparse(p, wanted):
    logp, entropy = _token_logprobs(
      p, CONFIG, ids, temperature=0.8, wanted=wanted
    )
    return _weighted(logp, entropy, wanted), (logp, entropy)

  (value, got), gradient = sparse(params, _WANTED)
  (value_2, want), gradient_2 = naive
  np.testing.assert_allclose(value, value_2, rtol=1e-5)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, np.where(_WANTED, b, 0.0), atol=1e-5)
  for a, b in zip(*map(jax.tree.leaves, (gradient, gradient_2)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)

  (value, _), gradient = sparse(params, np.zeros((2, 16), bool))
  assert value == 0
  assert not any(np.asarray(x).any() for x in jax.tree.leaves(gradient))


def _sizes(jaxpr):
  """Number of entries of every array in a jaxpr, inner ones included."""
  for equation in jaxpr.eqns:
    for variable in equation.outvars:
      yield variable.aval.shape
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      yield from _sizes(inner)


def test_no_array_of_all_logits_exists_forward_or_backward(params):
  # A vocabulary larger than anything else, so that its axis is recognised.
  config = ModelConfig(
    vocab_size=4099, width=8, layers=1, heads=1, head_dim=8, expert_width=8
  )
  big = sharding.shapes(specs(config))
  ids = jax.ShapeDtypeStruct((3, 400), jnp.int32)
  assert logprobs._LOGIT_CHUNK < 3 * 400

  def total(p, ids):
    return _token_logprobs(p, config, ids)[0].sum()

  shapes = list(_sizes(jax.make_jaxpr(jax.grad(total))(big, ids).jaxpr))
  wide = [s for s in shapes if 4099 in s]
  assert (1, logprobs._LOGIT_CHUNK, 4099) in wide
  largest = max(logprobs._LOGIT_CHUNK, config.width)
  assert max(np.prod(s) for s in wide) <= largest * 4099


@pytest.fixture(scope="module")
def on_one(golden, cut):
  """A function of sums over wanted log-probs, and its value on one device.

  A layer of gpt-oss: a window, sinks, and experts with biases.
  """
  model = golden("gpt_oss")
  config, params = cut(model.config, model.params, 1)
  config = dataclasses.replace(config, dispatch_tokens=5)
  ids = jnp.array(np.resize(model.ids[:, :12], (8, 12)))
  numbers = jnp.tile(
    jnp.repeat(jnp.array([1, 2, 0]), np.array([7, 4, 1])), (8, 1)
  )
  draw = np.random.default_rng(0)
  wanted = jnp.array(draw.random((8, 12)) < 0.5)
  weights = jnp.array(draw.normal(size=(8, 12)).astype(np.float32))

  def total(params):
    logp, entropy = _token_logprobs(
      params, config, ids, segment_ids=numbers, wanted=wanted
    )
    return (weights * (logp + 0.1 * entropy)).sum(), (logp, entropy)

  def run():
    return _jit(jax.value_and_grad(total, has_aux=True))

  return config, params, run, jax.device_get(run()(params))


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes",
  [
    {"data": 2, "fsdp": 2, "expert": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"expert": 8},
  ],
  ids=str,
)
def test_log_probs_on_many_devices_are_those_of_one(sizes, on_one, monkeypatch):
  # Three positions of a device at a time, of which some chunks want none.
  monkeypatch.setattr(logprobs, "_LOGIT_CHUNK", 3)
  config, params, run, want = on_one
  mesh = sharding.make_mesh(**sizes)
  params = jax.device_put(params, sharding.shardings(specs(config), mesh))
  with jax.set_mesh(mesh):
    got = jax.device_get(run()(params))
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(got),
    jax.tree.leaves(want),
    strict=True,
  ):
    np.testing.assert_allclose(
      a,
      b,
      rtol=0,
      atol=1e-5 * np.abs(b).max(),
      err_msg=jax.tree_util.keystr(path),
    )


@pytest.mark.parametrize("sorted_first", [True, False])
def test_scores_with_a_constant_entropy_are_the_same(sorted_first):
  # The form without the entropy's gradient has a derivative of its own.
  keys = jax.random.split(jax.random.key(3), 6)
  head = jax.random.normal(keys[0], (301, 24))
  hidden = jax.random.normal(keys[1], (3, 700, 24)) / 5
  ids = jax.random.randint(keys[2], (3, 700), 0, 301)
  segments = jnp.repeat(jnp.array([[1, 2]]), 350, 1).repeat(3, 0)
  wanted = jax.random.bernoulli(keys[3], 0.4, (3, 700))
  temperature = jax.random.uniform(keys[4], (3, 700), minval=0.5, maxval=2.0)
  weight = jax.random.normal(keys[5], (3, 700))

  def scored(differentiable):
    def total(head, hidden):
      logp, entropy = logprobs.from_hidden(
        {"embed": head},
        hidden,
        ids,
        segments,
        temperature=temperature,
        wanted=wanted if sorted_first else None,
        entropy_gradient=differentiable,
      )
      return (weight * logp).sum(), (logp, entropy)

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(
      head, hidden
    )

  for a, b in zip(
    *map(jax.tree.leaves, map(scored, (True, False))), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
