"""What must not change the result: packing, scanning, recomputing, rounding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.checkpoints import hf
from arl_jax.model import (
  attention,
  extend,
  forward,
  init_cache,
  token_logprobs,
  transformer,
)

# Each function runs a few times: optimising it takes longer than it saves.
_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)

# Segments that straddle the blocks of 32 queries set below.
_LENGTHS = (40, 31, 17)
_WIDTH = 96


@dataclasses.dataclass
class Rows:
  """Row 0 packs three segments, 1 has other neighbours of the second one.

  Rows 2 to 4 hold a segment each. `logits` are those of `forward`.
  """

  params: dict
  config: object
  ids: np.ndarray
  numbers: np.ndarray
  logits: np.ndarray


@pytest.fixture(scope="module", params=["llama", "gpt_oss", "deepseek_v3"])
def rows(request, golden, cut):
  """Grouped queries; windows and sinks; latents. Two layers: of every kind."""
  model = golden(request.param)
  config, params = cut(model.config, model.params, 2)
  segments = [row[:n] for row, n in zip(model.ids, _LENGTHS, strict=True)]
  padding = np.full(_WIDTH - sum(_LENGTHS), 5, np.int32)
  packed = np.concatenate([*segments, padding])
  second = np.repeat([1, 2, 3, 0], [*_LENGTHS, len(padding)]).astype(np.int32)
  other = np.where(second == 2, packed, (packed + 11) % config.vocab_size)
  alone = np.zeros((3, _WIDTH), np.int32)
  own = np.zeros((3, _WIDTH), np.int32)
  for i, segment in enumerate(segments):
    alone[i, : len(segment)] = segment
    own[i, : len(segment)] = 1
  ids = np.stack([packed, other, *alone])
  numbers = np.stack([second, second, *own])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(attention, "_QUERY_BLOCK", 32)
    logits = _jit(forward, static_argnames="config")(
      params, config, ids, segment_ids=numbers
    )
  return Rows(params, config, ids, numbers, np.asarray(logits))


def _close(a, b, scale=None):
  """Within 1e-5 of the largest."""
  scale = np.abs(b).max() if scale is None else scale
  np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)


def test_packed_rows_give_what_rows_of_their_own_give(rows):
  at = 0
  for i, n in enumerate(_LENGTHS):
    _close(rows.logits[0, at : at + n], rows.logits[2 + i, :n])
    at += n


def test_neighbours_in_a_row_change_nothing(rows):
  second = rows.numbers[0] == 2
  assert np.isfinite(rows.logits).all()
  assert np.abs(rows.logits[0] - rows.logits[1])[~second].max() > 0.1
  _close(rows.logits[0, second], rows.logits[1, second])


def test_token_logprobs_are_those_of_the_logits(rows):
  logp, entropy = _jit(token_logprobs, static_argnames="config")(
    rows.params, rows.config, rows.ids, segment_ids=rows.numbers
  )
  z = rows.logits.astype(np.float64)
  log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
  own = np.take_along_axis(log_p[:, :-1], rows.ids[:, 1:, None], -1)[..., 0]
  spread = -(np.exp(log_p) * log_p).sum(-1)[:, :-1]
  numbers = rows.numbers
  known = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] > 0)
  for got, want in ((logp, own), (entropy, spread)):
    assert not np.asarray(got)[:, 0].any()
    # Differences of logits, which are as large as 30.
    _close(np.asarray(got)[:, 1:], np.where(known, want, 0), np.abs(z).max())


# Three layers: two kinds in turn and one left; a dense one and two of a kind.
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_scanned_layers_are_the_unrolled_ones(name, golden, cut, scanned):
  model = golden(name)
  # Routers without strong opinions: no replayed expert is implausible.
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: x / 10 if "router" in jax.tree_util.keystr(path) else x,
    model.params,
  )
  models = [cut(model.config, params, 3)]
  models.append(scanned(*models[0]))
  layers, k = models[0][0].moe_layers, models[0][0].experts_per_token
  assert [s.repeats for s in models[1][0].stacks()] == (
    [1, 1] if name == "gpt_oss" else [1, 2]
  )
  # Experts of its own for every layer, so that none can be taken for another.
  draw = np.random.default_rng(0)
  order = draw.random((*model.ids.shape, layers, models[0][0].experts))
  replay = np.argsort(order, -1)[..., :k].astype(np.int32)
  results = [
    _jit(functools.partial(forward, config=config, return_aux=True))(
      params, input_ids=model.ids, replay_experts=replay
    )
    for config, params in models
  ]
  (one, record_1), (two, record_2) = jax.device_get(results)
  _close(two, one)
  assert set(record_1) == {"experts", "balance", "z"}
  np.testing.assert_array_equal(record_1["experts"], record_2["experts"])
  np.testing.assert_array_equal(
    np.sort(record_1["experts"], -1), np.sort(replay, -1)
  )
  for part in ("balance", "z"):
    assert record_1[part].shape == (*model.ids.shape, layers)
    _close(record_2[part], record_1[part])


def _gradient(config, params, ids):
  """Of a sum over logits with weights of either sign."""
  weights = np.cos(np.arange(config.vocab_size, dtype=np.float32))
  ids = jnp.array(ids)

  def total(params):
    return (forward(params, config, ids) * weights).mean()

  return _jit(jax.grad(total)), params


@pytest.fixture(scope="module")
def short(golden, cut):
  """A dense layer and one with experts, and the gradient of the whole."""
  model = golden("deepseek_v3")
  config, params = cut(model.config, model.params, 2)
  gradient, _ = _gradient(config, params, model.ids)
  assert "policy=" not in str(gradient.trace(params).jaxpr)
  return config, params, model.ids, jax.device_get(gradient(params))


@pytest.mark.parametrize(
  ("remat", "scan"), [("block", False), ("dots", False), ("block", True)]
)
def test_recomputing_does_not_change_the_gradient(remat, scan, short, scanned):
  config, params, ids, want = short
  config = dataclasses.replace(config, remat=remat)
  if scan:
    config, params = scanned(config, params)
    _, want = scanned(config, want)
  gradient, params = _gradient(config, params, ids)
  assert "policy=" in str(gradient.trace(params).jaxpr)
  got = jax.device_get(gradient(params))
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(got),
    jax.tree.leaves(want),
    strict=True,
  ):
    scale = np.abs(b).max()
    # The bias of the choice has no gradient.
    assert (scale > 0) == ("choice_bias" not in jax.tree_util.keystr(path))
    np.testing.assert_allclose(
      a, b, rtol=0, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path)
    )


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_bfloat16_is_finite_and_close_to_float32(name, golden, scanned):
  model = golden(name)
  config, params = hf.load(model.folder, dtype=jnp.bfloat16)
  kept = {
    jax.tree_util.keystr(path)
    for path, x in jax.tree_util.tree_leaves_with_path(params)
    if x.dtype != jnp.bfloat16
  }
  # Biases of the choice are small against the scores: they stay as they were.
  assert all("choice_bias" in path for path in kept)
  assert bool(kept) == (config.router == "sigmoid")
  config, params = scanned(config, params)

  @_jit
  def both(params, ids):
    slots, length = ids.shape
    cache = init_cache(config, slots, length, jnp.bfloat16)
    start, count = jnp.zeros(slots, int), jnp.full(slots, length)
    new, hidden = extend(params, config, cache, ids, start, count)
    cached = transformer.unembed(params, hidden)
    return forward(params, config, ids), cached, new

  *logits, cache = both(params, model.ids)
  assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}
  real = model.mask > 0
  want = model.logits[real]
  for got in logits:
    assert got.dtype == jnp.float32
    assert np.isfinite(np.asarray(got)).all()
    # 8 bits of mantissa through a few layers; found is 0.04. The median, as
    # some tokens change their experts.
    error = np.median(np.abs(np.asarray(got)[real] - want))
    assert 0 < error < 0.06 * np.sqrt((want**2).mean())
