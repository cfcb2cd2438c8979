import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import sharding
from arl_jax.model import ModelConfig, decoding, init, init_cache, transformer
from arl_jax.model import extend as _extend
from arl_jax.model import forward as _forward

CONFIG = ModelConfig(
  vocab_size=64, width=32, heads=4, kv_heads=2, head_dim=8, expert_width=16
)

# Compiled: eager dispatch of the many small operations takes longer. Not
# optimised, which takes longer still.
_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
forward = _jit(functools.partial(_forward, config=CONFIG))
extend = _jit(lambda p, *a: _extend(p, CONFIG, *a))


@pytest.fixture(scope="module")
def params():
  return _jit(functools.partial(init, CONFIG))(jax.random.key(0))


def _ids(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 64, shape, np.int32)


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


def test_cache_has_an_entry_a_layer_or_an_axis_of_scanned_ones():
  config = dataclasses.replace(CONFIG, layers=5, windows=(4, 0))

  def shapes(config):
    cache = jax.eval_shape(lambda: init_cache(config, 3, 20))
    assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype("float32")}
    assert {k: v["k"] for k, v in cache.items()} == (
      {k: v["v"] for k, v in cache.items()}
    )
    return {name: entry["k"][0].shape for name, entry in cache.items()}

  # Slots, kv heads, tokens, dimensions of a head.
  one = (3, 2, 20, 8)
  assert shapes(config) == {f"00{i}": one for i in range(5)}
  scanned = dataclasses.replace(config, scan_layers=True)
  # The pattern twice, then its first layer.
  assert shapes(scanned) == {
    "000": (2, *one),
    "001": (2, *one),
    "004": (1, *one),
  }


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
  ("stored", "kept"), [("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_cache_of_another_type_than_the_parameters_changes_no_other(
  stored, kept, scan
):
  config = dataclasses.replace(CONFIG, scan_layers=scan)
  abstract = sharding.shapes(transformer.specs(config), jnp.dtype(stored))
  vector = jax.ShapeDtypeStruct((2,), jnp.int32)
  cache, hidden = jax.eval_shape(
    lambda p, c, i, s, n: _extend(p, config, c, i, s, n),
    abstract,
    jax.eval_shape(lambda: init_cache(config, 2, 20, jnp.dtype(kept))),
    jax.ShapeDtypeStruct((2, 5), jnp.int32),
    vector,
    vector,
  )
  assert hidden.dtype == stored
  assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype(kept)}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("chunk", [1, 7])
def test_blocks_and_rings_give_the_logits_of_forward(chunk, scan):
  """A window of 4 in rings of 4 + chunk - 1, other layers in blocks of 8."""
  config = dataclasses.replace(
    CONFIG, layers=3, windows=(4, 0), scan_layers=scan
  )
  specs = decoding.cache_specs(config, 2, 30, chunk, block=8)
  cache = jax.tree.map(lambda s: jnp.full(s.shape, 1e3), sharding.shapes(specs))
  sizes = {x.shape[-2] for x in jax.tree.leaves(cache)}
  assert sizes == {4 + chunk - 1, 8, 6}
  weights = _jit(functools.partial(init, config))(jax.random.key(1))
  # Spans end within a block, at its end and at the cache's.
  append = _jit(
    lambda p, c, *a, span: decoding.extend(
      p, config, c, *a, span=span, return_experts=True
    ),
    static_argnames="span",
  )
  ids = _ids(2, 30)
  hidden, experts = [], []
  for first in range(0, 30, chunk):
    part = ids[:, first : first + chunk]
    count = np.full(2, part.shape[1], np.int32)
    part = np.pad(part, ((0, 0), (0, chunk - part.shape[1])))
    span = next(s for s in (11, 16, 30) if s >= first + count[0])
    cache, x, chosen = append(
      weights, cache, part, np.full(2, first, np.int32), count, span=span
    )
    hidden.append(x[:, : count[0]])
    experts.append(chosen[:, : count[0]])
  logits = transformer.unembed(weights, jnp.concatenate(hidden, 1))
  want, record = _jit(
    functools.partial(_forward, config=config, return_aux=True)
  )(weights, input_ids=jnp.asarray(ids))
  np.testing.assert_allclose(logits, want, atol=1e-4)
  np.testing.assert_array_equal(np.concatenate(experts, 1), record["experts"])


def test_cache_on_many_devices_gives_what_it_gives_on_one(params):
  ids, zero, count = _ids(8, 5), np.zeros(8, np.int32), np.full(8, 5, np.int32)
  count[3] = 2
  cache = init_cache(CONFIG, 8, 20)
  want = jax.device_get(extend(params, cache, ids, zero, count))
  mesh = sharding.make_mesh(data=2, expert=2, tensor=2)
  placement = sharding.shardings(transformer.specs(CONFIG), mesh)
  with jax.set_mesh(mesh):
    got = _jit(lambda p, *a: _extend(p, CONFIG, *a))(
      jax.device_put(params, placement), cache, ids, zero, count
    )
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
