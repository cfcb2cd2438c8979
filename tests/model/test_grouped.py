"""Products of sorted rows with their groups' matrices."""

import functools
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pallas_tpu

from arl_jax import sharding
from arl_jax.model.grouped import grouped_matmul

# Rows, groups, inner and outer dimension. Blocks of 16 rows, the smallest; of
# 256, the largest; longer than all rows; and one group.
SHAPES = ((70, 7, 5, 3), (600, 2, 3, 4), (3, 4, 2, 2), (40, 1, 4, 6))
ROWS = {rows: (groups, d, f) for rows, groups, d, f in SHAPES}

# Of about 70 rows in 7 groups.
SIZES = {
  "even": [10] * 7,
  "some_empty": [0, 30, 0, 0, 39, 1, 0],
  "all_in_first": [70, 0, 0, 0, 0, 0, 0],
  "all_in_last": [0, 0, 0, 0, 0, 0, 70],
  "whole_blocks": [16, 32, 0, 16, 0, 0, 6],
  "rows_left": [3, 0, 20, 0, 17, 0, 5],
  "nothing": [0] * 7,
}


def _arrays(rows, dtype=np.float32):
  groups, d, f = ROWS[rows]
  draw = np.random.default_rng(rows)
  x, w, g = (
    draw.normal(size=size).astype(dtype)
    for size in ((rows, d), (groups, d, f), (rows, f))
  )
  return x, w, g


def _one_by_one(x, w, g, sizes):
  """Product and both gradients in float64; rows beyond the sizes are NaN."""
  x, w, g = (a.astype(np.float64) for a in (x, w, g))
  y, dx = np.full(g.shape, np.nan), np.full(x.shape, np.nan)
  dw = np.zeros(w.shape)
  row = 0
  for group, size in enumerate(sizes):
    for _ in range(size):
      y[row] = x[row] @ w[group]
      dx[row] = w[group] @ g[row]
      dw[group] += np.outer(x[row], g[row])
      row += 1
  return y, dx, dw


@jax.jit
def _product_and_gradients(x, w, g, sizes):
  y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
  return y, *pull(g)


def _agree(got, want, atol, rtol=0.0):
  for a, b in zip(got, want, strict=True):
    assert a.shape == b.shape
    # Rows beyond the sizes may be anything.
    known = ~np.isnan(b)
    np.testing.assert_allclose(
      np.asarray(a, np.float64)[known], b[known], atol=atol, rtol=rtol
    )


@pytest.mark.parametrize("name", SIZES)
def test_product_and_gradients_are_those_of_a_loop(name):
  arrays = _arrays(70)
  sizes = np.array(SIZES[name], np.int32)
  got = _product_and_gradients(*arrays, sizes)
  assert {a.dtype for a in got} == {jnp.dtype("float32")}
  _agree(got, _one_by_one(*arrays, sizes), 1e-5)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(rows=st.sampled_from(list(ROWS)), data=st.data())
def test_any_sizes_give_what_a_loop_gives(rows, data):
  arrays = _arrays(rows)
  left, sizes = rows, []
  for _ in range(ROWS[rows][0]):
    sizes.append(data.draw(st.integers(0, left)))
    left -= sizes[-1]
  # Not always the first groups are the large ones.
  sizes = np.array(data.draw(st.permutations(sizes)), np.int32)
  got = _product_and_gradients(*arrays, sizes)
  # Sums of up to 600 products.
  _agree(got, _one_by_one(*arrays, sizes), 1e-4)


def test_bfloat16_rounds_only_its_inputs_and_results():
  arrays = _arrays(600, jnp.bfloat16)
  sizes = np.array([550, 41], np.int32)
  got = _product_and_gradients(*arrays, sizes)
  assert {a.dtype for a in got} == {jnp.dtype("bfloat16")}
  # A result is rounded to 8 bits: by 2^-9 of it. Sums over 550 rows are kept
  # in float32, or far more would be lost.
  _agree(got, _one_by_one(*arrays, sizes), 1e-3, rtol=2**-8)


@jax.jit
def _ragged(x, w, g, sizes):
  y, pull = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
  return y, *pull(g)


@pytest.mark.parametrize("name", ["some_empty", "rows_left"])
def test_result_is_that_of_ragged_dot(name):
  arrays = _arrays(70)
  sizes = np.array(SIZES[name], np.int32)
  used = sizes.sum()
  for a, b in zip(
    _product_and_gradients(*arrays, sizes),
    _ragged(*arrays, sizes),
    strict=True,
  ):
    rows = slice(used) if len(a) == 70 else slice(None)
    np.testing.assert_allclose(a[rows], b[rows], atol=1e-5)


def _for(platform):
  return sharding.compiling_for(types.SimpleNamespace(platform=platform))


@pytest.mark.parametrize("name", ["some_empty", "rows_left"])
def test_kernel_of_tpus_gives_the_same(name):
  arrays = _arrays(70)
  sizes = np.array(SIZES[name], np.int32)
  # A function of its own: traces are kept for functions.
  run = jax.jit(functools.partial(_product_and_gradients.__wrapped__))
  with _for("tpu"), pallas_tpu.force_tpu_interpret_mode():
    got = run(*arrays, sizes)
  _agree(got, _one_by_one(*arrays, sizes), 1e-5)


@pytest.mark.parametrize(
  ("platform", "primitive"),
  [("cpu", "while"), ("gpu", "ragged_dot"), ("tpu", "pallas_call")],
)
def test_each_platform_has_its_own_product(platform, primitive):
  x, w, _ = map(jnp.array, _arrays(70))
  sizes = jnp.array(SIZES["even"])
  with _for(platform):
    traced = jax.make_jaxpr(functools.partial(grouped_matmul))(x, w, sizes)
  present = {
    p for p in ("while", "ragged_dot", "pallas_call") if p in str(traced)
  }
  assert present == {primitive}
