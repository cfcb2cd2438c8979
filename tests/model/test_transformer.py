import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import sharding
from arl_jax.model import ModelConfig, init, init_cache, specs, transformer
from arl_jax.model import extend as _extend
from arl_jax.model import forward as _forward
from arl_jax.model import token_logprobs as _token_logprobs

CONFIG = ModelConfig(
  vocab_size=64, width=32, heads=4, kv_heads=2, head_dim=8, expert_width=16
)

# Compiled: eager dispatch of the many small operations takes longer.
forward = jax.jit(functools.partial(_forward, config=CONFIG))
token_logprobs = jax.jit(functools.partial(_token_logprobs, config=CONFIG))
extend = jax.jit(lambda p, *a: _extend(p, CONFIG, *a))


@pytest.fixture(scope="module")
def params():
  return init(CONFIG, jax.random.key(0))


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
  again, other = (init(CONFIG, jax.random.key(seed)) for seed in (0, 1))
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
  ("field", "value", "match"),
  [
    ("width", 0, "model.width"),
    ("layers", 0, "model.layers"),
    ("kv_heads", 3, "model.kv_heads 3"),
    ("head_dim", 7, "model.head_dim 7"),
    ("experts_per_token", 5, "model.experts_per_token 5"),
    ("experts_per_token", 0, "model.experts_per_token 0"),
    ("mtp_heads", 2, "model.mtp_heads"),
  ],
)
def test_impossible_config_is_refused_by_name(field, value, match):
  config = ModelConfig(vocab_size=64, heads=4)
  setattr(config, field, value)
  with pytest.raises(ValueError, match=match):
    init(config, jax.random.key(0))


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

  @jax.jit
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


def test_positions_start_from_zero_in_every_segment():
  segment_ids = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0], [2, 2, 1, 1, 1, 1, 1, 0]])
  np.testing.assert_array_equal(
    transformer.segment_positions(segment_ids),
    [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 0, 1, 2, 3, 4, 0]],
  )


def test_later_tokens_do_not_change_earlier_logits(params):
  ids = _ids(2, 16)
  changed = ids.copy()
  changed[0, 9] = (changed[0, 9] + 1) % 64
  one, two = (np.asarray(forward(params, input_ids=x)) for x in (ids, changed))
  np.testing.assert_array_equal(one[0, :9], two[0, :9])
  assert np.abs(one[0, 9:] - two[0, 9:]).max(-1).min() > 1e-4


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


def test_first_tokens_and_padding_have_no_log_prob(params, packed_rows):
  ids, numbers = packed_rows
  logp, entropy = token_logprobs(params, input_ids=ids, segment_ids=numbers)
  positions = np.asarray(transformer.segment_positions(jnp.array(numbers)))
  nothing = (numbers == 0) | (positions == 0)
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

  return jax.jit(jax.value_and_grad(total, has_aux=True))(params)


@pytest.mark.parametrize("chunk", [512, 8])
def test_wanted_log_probs_and_their_gradient_are_those_of_the_naive_form(
  params, naive, chunk, monkeypatch
):
  # 8 positions a chunk: some are skipped, one is partly filled.
  monkeypatch.setattr(transformer, "_LOGIT_CHUNK", chunk)
  ids = jnp.array(_ids(2, 16))

  @jax.jit
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
  assert transformer._LOGIT_CHUNK < 3 * 400

  def total(p, ids):
    return _token_logprobs(p, config, ids)[0].sum()

  shapes = list(_sizes(jax.make_jaxpr(jax.grad(total))(big, ids).jaxpr))
  wide = [s for s in shapes if 4099 in s]
  assert (transformer._LOGIT_CHUNK, 4099) in wide
  largest = max(transformer._LOGIT_CHUNK, config.width)
  assert max(np.prod(s) for s in wide) <= largest * 4099


def _in_chunks(params, ids, plan, slots):
  """Hidden states of `ids` appended as `plan` says, [S, T, D]."""
  cache = init_cache(CONFIG, slots, 20)
  start = np.zeros(slots, np.int32)
  out = [[] for _ in range(slots)]
  for width, count in plan:
    count = np.array(count, np.int32)
    part = np.full((slots, width), 7, np.int32)
    for s in range(slots):
      part[s, : count[s]] = ids[s, start[s] : start[s] + count[s]]
    cache, hidden = extend(params, cache, part, start, count)
    for s in range(slots):
      out[s].append(np.asarray(hidden)[s, : count[s]])
    start = start + count
  return np.stack([np.concatenate(x) for x in out])


@pytest.mark.parametrize(
  "plan",
  [
    [(1, (1, 1))] * 12,
    [(5, (5, 0)), (5, (2, 5)), (5, (5, 5)), (5, (0, 2))],
    [(12, (12, 12))],
  ],
  ids=["one_by_one", "chunks_with_idle_slots", "at_once"],
)
def test_extend_gives_the_logits_of_forward(params, plan):
  ids = _ids(2, 12)
  hidden = _in_chunks(params, ids, plan, 2)
  logits = transformer.unembed(params, jnp.array(hidden))
  np.testing.assert_allclose(logits, forward(params, input_ids=ids), atol=1e-4)


def test_extend_leaves_idle_slots_as_they_are(params):
  cache = jax.tree.map(lambda x: x + 1.5, init_cache(CONFIG, 2, 20))
  zeros = np.zeros(2, np.int32)
  new, _ = extend(params, cache, _ids(2, 5), zeros, np.array([0, 2], np.int32))
  for old, got in zip(*map(jax.tree.leaves, (cache, new)), strict=True):
    np.testing.assert_array_equal(got[0], old[0])
    np.testing.assert_array_equal(got[1, :, 2:], old[1, :, 2:])
    assert not np.array_equal(got[1, :, :2], old[1, :, :2])


def test_what_a_slot_held_before_does_not_matter(params):
  # A rewritten prefix: tokens from 3 on are replaced, old ones lie beyond.
  ids, old = _ids(2, 12), _ids(2, 12, seed=1)
  old[:, :3] = ids[:, :3]
  zero, three, five, all_ = (np.full(2, n, np.int32) for n in (0, 3, 5, 12))
  cache, _ = extend(params, init_cache(CONFIG, 2, 20), old, zero, all_)
  _, hidden = extend(params, cache, ids[:, 3:8], three, five)
  logits = transformer.unembed(params, hidden)
  want = forward(params, input_ids=ids)[:, 3:8]
  np.testing.assert_allclose(logits, want, atol=1e-4)
