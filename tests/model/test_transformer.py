import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import sharding
from arl_jax.model import (
  ModelConfig,
  RopeConfig,
  attention,
  init,
  specs,
  transformer,
)
from arl_jax.model import forward as _forward
from arl_jax.model import token_logprobs as _token_logprobs
from arl_jax.model.config import Layer, Stack
from arl_jax.model.rope import segment_positions

CONFIG = ModelConfig(
  vocab_size=64, width=32, heads=4, kv_heads=2, head_dim=8, expert_width=16
)

# Compiled: eager dispatch of the many small operations takes longer. Not
# optimised, which takes longer still.
_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
forward = _jit(functools.partial(_forward, config=CONFIG))
token_logprobs = _jit(functools.partial(_token_logprobs, config=CONFIG))
_init = _jit(init, static_argnums=0)


@pytest.fixture(scope="module")
def params():
  return _init(CONFIG, jax.random.key(0))


def _ids(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 64, shape, np.int32)


def test_logits_have_shape_and_type_declared(params):
  shape = jax.eval_shape(
    lambda p: _forward(p, CONFIG, jnp.ones((2, 5), int)), params
  )
  assert shape.shape == (2, 5, 64)
  assert shape.dtype == jnp.float32
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_init_gives_what_specs_declare_and_the_same_twice(params):
  declared = sharding.shapes(specs(CONFIG))
  assert jax.tree.structure(params) == jax.tree.structure(declared)
  again, other = (_init(CONFIG, jax.random.key(seed)) for seed in (0, 1))
  for (path, a), b, c, spec in zip(
    jax.tree_util.tree_leaves_with_path(params),
    *map(jax.tree.leaves, (again, other, declared)),
    strict=True,
  ):
    assert (a.shape, a.dtype) == (spec.shape, spec.dtype)
    np.testing.assert_array_equal(a, b)
    if "norm" not in jax.tree_util.keystr(path):
      assert not np.array_equal(a, c)


def test_init_draws_every_path_anew(params):
  drawn = {}
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    if "norm" not in jax.tree_util.keystr(path):
      drawn[jax.tree_util.keystr(path)] = tuple(np.ravel(x)[:4])
  assert len(set(drawn.values())) == len(drawn)


def test_init_has_the_standard_deviation_of_its_fan_in(params):
  # 16384 draws: the standard deviation is known to 0.6 %.
  gate = np.asarray(params["layers"]["000"]["moe"]["gate"])
  assert gate.std() == pytest.approx(32**-0.5, rel=0.1)


@pytest.mark.parametrize(
  ("fields", "match"),
  [
    ({"width": 0}, "model.width is 0"),
    ({"layers": 0}, "model.layers is 0"),
    ({"kv_heads": 3}, "model.kv_heads 3 does not divide heads 4"),
    ({"head_dim": 7}, "model.head_dim 7"),
    ({"latent_rank": 8, "rope_dim": 3}, "model.rope_dim 3"),
    ({"rope_dim": 8}, "model.rope_dim is 8 and model.latent_rank 0"),
    ({"latent_rank": 8}, "model.rope_dim is 0 and model.latent_rank 8"),
    ({"latent_rank": 8, "rope_dim": 8}, "model.qk_norm is not part"),
    (
      {"latent_rank": 8, "rope_dim": 8, "qk_norm": False, "kv_heads": 2},
      "model.kv_heads 2 is not heads 4",
    ),
    ({"norm_eps": -1e-6}, "model.norm_eps is -1e-06, not >= 0"),
    ({"shared_experts": -1}, "model.shared_experts is -1, not >= 0"),
    ({"windows": ()}, "model.windows"),
    ({"windows": (4, -1)}, "model.windows"),
    ({"mtp_heads": 2}, "model.mtp_heads is 2"),
    ({"router": "hash"}, "model.router is 'hash'"),
    ({"remat": "all"}, "model.remat is 'all'"),
    ({"rope": RopeConfig(kind="ntk")}, "model.rope.kind is 'ntk'"),
    ({"rope": RopeConfig(kind="yarn")}, "model.rope.original_length is 0"),
    ({"experts_per_token": 5}, "model.experts_per_token 5"),
    ({"experts_per_token": 0}, "model.experts_per_token 0"),
    ({"expert_width": 0}, "model.expert_width is 0"),
    ({"dispatch_tokens": 0}, "model.dispatch_tokens is 0"),
    ({"experts": 0}, "model.dense_width is 0"),
    ({"dense_layers": 1}, "model.dense_width is 0"),
    ({"dense_layers": 3, "dense_width": 8}, "model.dense_layers 3"),
    ({"expert_groups": 3}, "model.groups_kept 1 of model.expert_groups 3"),
    ({"expert_groups": 2, "groups_kept": 3}, "model.groups_kept 3"),
    (
      {"router": "sigmoid", "expert_groups": 2, "experts_per_token": 3},
      "model.groups_kept 1 leaves fewer experts",
    ),
    ({"expert_groups": 4, "groups_kept": 2}, "ranked by its two best"),
    ({"expert_groups": 2}, "needs model.router 'sigmoid'"),
  ],
)
def test_impossible_config_is_refused_by_name(fields, match):
  config = ModelConfig(vocab_size=64, heads=4, **fields)
  with pytest.raises(ValueError, match=match):
    init(config, jax.random.key(0))


def test_scanned_layers_are_grouped_by_their_pattern():
  config = ModelConfig(
    layers=8, dense_layers=1, dense_width=8, windows=(4, 0), scan_layers=True
  )
  # Depths 0; 1 to 6 in pairs; and 7, of which the pattern has no second.
  assert config.stacks() == (
    Stack(0, (Layer(False, 4),), 1),
    Stack(1, (Layer(True, 0), Layer(True, 4)), 3),
    Stack(7, (Layer(True, 0),), 1),
  )
  layers = specs(dataclasses.replace(config, vocab_size=64))["layers"]
  kinds = {name: set(layer) - {"attention"} for name, layer in layers.items()}
  assert kinds == {
    "000": {"mlp"},
    "001": {"moe"},
    "002": {"moe"},
    "007": {"moe"},
  }
  # Repeats, experts, width, hidden units.
  assert layers["002"]["moe"]["gate"].shape == (3, 4, 128, 48)
  assert layers["002"]["moe"]["gate"].axes == (None, "experts", "width", "mlp")
  unrolled = dataclasses.replace(config, scan_layers=False)
  assert [s.names() for s in unrolled.stacks()] == [
    (f"00{i}",) for i in range(8)
  ]
  assert {s.repeats for s in unrolled.stacks()} == {0}


# Longer than a block of queries, so that segments straddle blocks.
_LENGTHS = (5, 127, 20)


@pytest.fixture(scope="module")
def packed_rows():
  """Three segments, a row that packs them and one row for each."""
  segments = [_ids(n, seed=i) for i, n in enumerate(_LENGTHS)]
  width = sum(_LENGTHS) + 8
  numbers = np.repeat([1, 2, 3, 0], [*_LENGTHS, 8]).astype(np.int32)
  packed = np.concatenate([*segments, _ids(8, seed=9)])
  alone = np.zeros((3, width), np.int32)
  alone_numbers = np.zeros((3, width), np.int32)
  for i, segment in enumerate(segments):
    alone[i, : len(segment)] = segment
    alone_numbers[i, : len(segment)] = 1
  ids = np.stack([packed, *alone])
  return ids, np.stack([numbers, *alone_numbers])


def _spans():
  at = 0
  for i, n in enumerate(_LENGTHS, 1):
    yield i, slice(at, at + n), slice(n)
    at += n


def test_packed_rows_give_what_rows_of_their_own_give(params, packed_rows):
  ids, numbers = packed_rows
  logits = np.asarray(forward(params, input_ids=ids, segment_ids=numbers))
  for i, inside, alone in _spans():
    np.testing.assert_allclose(logits[0, inside], logits[i, alone], atol=1e-5)


def test_poisoned_neighbours_and_padding_change_nothing(params, packed_rows):
  ids, numbers = packed_rows
  poisoned = np.where(numbers == 2, ids, 63 - ids)
  one = forward(params, input_ids=ids, segment_ids=numbers)
  two = forward(params, input_ids=poisoned, segment_ids=numbers)
  assert np.isfinite(two).all()
  np.testing.assert_allclose(
    np.asarray(one)[numbers == 2], np.asarray(two)[numbers == 2], atol=1e-5
  )
  logp, entropy = token_logprobs(params, input_ids=ids, segment_ids=numbers)
  logp_2, entropy_2 = token_logprobs(
    params, input_ids=poisoned, segment_ids=numbers
  )
  for a, b in ((logp, logp_2), (entropy, entropy_2)):
    np.testing.assert_allclose(
      np.asarray(a)[numbers == 2], np.asarray(b)[numbers == 2], atol=1e-5
    )


def test_gradient_of_a_segment_does_not_see_its_neighbours(params, packed_rows):
  # Nor does the padding turn it into NaN.
  ids, numbers = packed_rows

  @_jit
  def gradient(ids):
    def total(p):
      logp, _ = _token_logprobs(
        p, CONFIG, ids[:1], segment_ids=jnp.array(numbers[:1])
      )
      return jnp.where(numbers[:1] == 2, logp, 0.0).sum() / 127

    return jax.grad(total)(params)

  one, two = gradient(ids), gradient(np.where(numbers == 2, ids, 63 - ids))
  for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_long_rows_recompute_their_scores_and_keep_the_gradient(
  packed_rows, monkeypatch
):
  ids, numbers = (jnp.array(x[:1]) for x in packed_rows)
  config = ModelConfig(
    vocab_size=64,
    width=8,
    layers=1,
    heads=1,
    head_dim=8,
    windows=(9,),
    experts=0,
    dense_width=8,
  )
  params = _init(config, jax.random.key(0))

  def gradient():
    def total(p):
      logits = _forward(p, config, ids, segment_ids=numbers)
      return jnp.where(numbers[..., None] > 0, logits, 0)[..., :9].sum()

    return _jit(jax.grad(total))

  want = gradient()(params)
  monkeypatch.setattr(attention, "_SCORES_HELD", ids.shape[1] - 1)
  again = gradient()
  assert "remat" in str(again.trace(params).jaxpr)
  for a, b in zip(*map(jax.tree.leaves, (again(params), want)), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_embeddings_are_scaled_only_where_asked():
  config = ModelConfig(
    vocab_size=64,
    width=16,
    layers=1,
    heads=1,
    head_dim=8,
    experts=0,
    dense_width=8,
  )
  table = {"embed": jnp.ones((64, 16))}
  ids = jnp.zeros((1, 1), jnp.int32)
  scaled = dataclasses.replace(config, scaled_embedding=True)
  # √16.
  assert transformer.embed(table, scaled, ids).max() == 4
  assert transformer.embed(table, config, ids).max() == 1


def test_positions_start_from_zero_in_every_segment():
  segment_ids = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0], [2, 2, 1, 1, 1, 1, 1, 0]])
  np.testing.assert_array_equal(
    segment_positions(segment_ids),
    [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 0, 1, 2, 3, 4, 0]],
  )


def test_later_tokens_do_not_change_earlier_logits(params):
  ids = _ids(2, 16)
  changed = ids.copy()
  changed[0, 9] = (changed[0, 9] + 1) % 64
  one, two = (np.asarray(forward(params, input_ids=x)) for x in (ids, changed))
  np.testing.assert_array_equal(one[0, :9], two[0, :9])
  assert np.abs(one[0, 9:] - two[0, 9:]).max(-1).min() > 1e-4


@pytest.mark.parametrize(
  ("arguments", "match"),
  [
    ({"input_ids": np.zeros(3, np.int32)}, r"input_ids has shape \(3,\)"),
    ({"input_ids": np.zeros((0, 3), np.int32)}, r"input_ids has shape \(0, 3"),
    ({"segment_ids": np.ones((2, 1), np.int32)}, r"segment_ids has shape"),
    ({"positions": np.ones((1, 4), np.int32)}, r"positions has shape"),
    (
      {"replay_experts": np.zeros((1, 4, 2, 2), np.int32)},
      r"replay_experts has shape \(1, 4, 2, 2\), not \(2, 4, 2, 2\)",
    ),
  ],
)
def test_shapes_that_do_not_fit_are_named(arguments, match):
  config = ModelConfig(vocab_size=8, width=8, head_dim=4)
  params = sharding.shapes(specs(config))
  arguments = {"input_ids": np.zeros((2, 4), np.int32)} | arguments
  arguments = {name: jnp.array(a) for name, a in arguments.items()}
  for function in (_forward, _token_logprobs):
    with pytest.raises(ValueError, match=match):
      jax.eval_shape(lambda p, f=function: f(p, config, **arguments), params)


def test_layers_of_another_configuration_are_named():
  config = ModelConfig(vocab_size=8, width=8, head_dim=4, layers=3)
  params = sharding.shapes(specs(config))
  config.layers = 2
  with pytest.raises(ValueError, match=r"params has layers .*'002'"):
    jax.eval_shape(
      lambda p: _forward(p, config, jnp.zeros((1, 2), jnp.int32)), params
    )


def test_temperature_must_be_positive():
  config = ModelConfig(vocab_size=8, width=8, head_dim=4)
  params = sharding.shapes(specs(config))
  with pytest.raises(ValueError, match=r"temperature is 0\.0, not > 0"):
    jax.eval_shape(
      lambda p: _token_logprobs(
        p, config, jnp.zeros((1, 2), jnp.int32), temperature=0.0
      ),
      params,
    )
