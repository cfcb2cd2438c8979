"""The splash kernel, interpreted on CPU, against a plain softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention as pallas_splash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from arl_jax.model.splash import Band, splash_attention

# Three packed segments and padding; no border falls on one of a block.
LENGTHS = (100, 37, 90)
T = 256
SEGMENTS = np.repeat(
  [1, 2, 3, 0], [*LENGTHS, T - sum(LENGTHS)]
)  # fmt: skip
SCALE = 0.3


def reference(q, k, v, segment_ids, window, sinks):
  """The same in a few lines, with every score in memory."""
  repeats = q.shape[1] // k.shape[1]
  k, v = jnp.repeat(k, repeats, 1), jnp.repeat(v, repeats, 1)
  scores = SCALE * jnp.einsum("bhtk,bhuk->bhtu", q, k)
  age = jnp.arange(q.shape[2])[:, None] - jnp.arange(q.shape[2])
  visible = (age >= 0) & (age < (window or q.shape[2]))
  visible &= segment_ids[:, None, :, None] == segment_ids[:, None, None]
  scores = jnp.where(visible, scores, -jnp.inf)
  if sinks is None:
    return jnp.einsum("bhtu,bhun->bhtn", jax.nn.softmax(scores, -1), v)
  sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
  weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), -1)
  return jnp.einsum("bhtu,bhun->bhtn", weights[..., :-1], v)


def draw(b, heads, groups, k, n, t=T):
  keys = jax.random.split(jax.random.key(0), 5)
  return (
    jax.random.normal(keys[0], (b, heads, t, k)),
    jax.random.normal(keys[1], (b, groups, t, k)),
    jax.random.normal(keys[2], (b, groups, t, n)),
    jax.random.normal(keys[3], (heads,)),
    # Weighs the output in the gradients, none of it on padding.
    jax.random.normal(keys[4], (b, heads, t, n)),
  )


@pytest.mark.parametrize(
  ("heads", "groups", "k", "n", "window", "with_sinks"),
  [
    pytest.param(
      4, 2, 64, 64, 0, True, id="grouped, sinks", marks=pytest.mark.slow
    ),
    pytest.param(4, 2, 64, 64, 50, True, id="window, sinks"),
    pytest.param(
      2, 2, 192, 128, 0, False, id="k unlike v", marks=pytest.mark.slow
    ),
    pytest.param(2, 1, 128, 128, 130, False, id="window over blocks"),
  ],
)
def test_equals_softmax(heads, groups, k, n, window, with_sinks):
  q, key, v, sinks, weights = draw(1, heads, groups, k, n)
  ids = jnp.asarray(SEGMENTS, jnp.int32)[None]
  weights = weights * (ids > 0)[:, None, :, None]

  def kernel(q, key, v, sinks):
    return splash_attention(
      q,
      key,
      v,
      ids,
      scale=SCALE,
      window=window,
      sinks=sinks if with_sinks else None,
      block=128,
      interpret=True,
    )

  def plain(q, key, v, sinks):
    return reference(q, key, v, ids, window, sinks if with_sinks else None)

  args = (q, key, v, sinks)
  out, pull = jax.vjp(kernel, *args)
  expected, expected_pull = jax.vjp(plain, *args)
  real = SEGMENTS > 0
  assert out.shape == (1, heads, T, n)
  np.testing.assert_allclose(
    out[:, :, real], expected[:, :, real], rtol=2e-5, atol=2e-5
  )
  for grad, other in zip(pull(weights), expected_pull(weights), strict=True):
    np.testing.assert_allclose(grad, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [0, 1, 128, 300, 512])
def test_bands_mean_what_the_masks_of_the_kernel_mean(window):
  size = (1024, 1024)
  if window:
    mask = pallas_splash.LocalMask(size, (window - 1, 0), offset=0)
  else:
    mask = pallas_splash.CausalMask(size)
  band = Band(size, (window - 1 if window else None, 0), offset=0)
  blocks = pallas_splash.BlockSizes(
    **dict.fromkeys(
      (
        "block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq",
        "block_kv_dq",
      ),
      128,
    )
  )  # fmt: skip
  one, other = (
    pallas_splash.make_splash_mha_single_device(
      pallas_splash.MultiHeadMask([m] * 2), block_sizes=blocks
    )
    for m in (band, mask)
  )
  # Which blocks run, which are masked, and where each finds its keys.
  leaves, expected = (jax.tree.leaves(kernel) for kernel in (one, other))
  assert len(leaves) == 9
  for leaf, wanted in zip(leaves, expected, strict=True):
    np.testing.assert_array_equal(leaf, wanted)


def test_pads_rows_to_whole_blocks():
  # 200 tokens in blocks of at most 128: two of 128, and 56 of padding.
  q, k, v, _, _ = draw(1, 2, 2, 64, 64, t=200)
  ids = jnp.repeat(jnp.array([[1, 2]], jnp.int32), 100, axis=1)
  out = splash_attention(q, k, v, ids, scale=SCALE, block=128, interpret=True)
  expected = reference(q, k, v, ids, 0, None)
  np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_a_window_of_one_returns_the_value():
  # Without sinks, a query that sees itself alone gives its value all weight.
  q, k, v, _, _ = draw(1, 2, 1, 64, 64, t=128)
  ids = jnp.ones((1, 128), jnp.int32)
  out = splash_attention(q, k, v, ids, scale=SCALE, window=1, interpret=True)
  np.testing.assert_allclose(out, jnp.repeat(v, 2, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_mesh_changes_nothing(groups):
  # Four heads over four chips: one group is repeated four times, two twice.
  q, k, v, sinks, weights = draw(2, 4, groups, 64, 64, t=128)
  ids = jnp.repeat(jnp.array([[1, 2], [3, 0]], jnp.int32), 64, axis=1)
  weights = weights * (ids > 0)[:, None, :, None]
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))

  def loss(q, k, v, sinks, **axes):
    out = splash_attention(
      q, k, v, ids, scale=SCALE, sinks=sinks, block=128, interpret=True, **axes
    )
    return (out * weights).sum()

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
  expected = value_and_grad(q, k, v, sinks)
  with jax.set_mesh(mesh):
    rows = NamedSharding(mesh, PartitionSpec("data"))
    args = [jax.device_put(x, rows) for x in (q, k, v)]
    actual = jax.jit(
      lambda *args: jax.value_and_grad(
        lambda *a: loss(*a, head_axis="tensor", batch_axes=("data",)),
        argnums=(0, 1, 2, 3),
      )(*args)
    )(*args, sinks)
  for one, other in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_layers_may_share_sinks_of_another_type():
  # Both layers of the loop send the sinks, in float32, a gradient from
  # bfloat16: it adds up, in float32, to that of two layers in a row.
  q, k, v, sinks, _ = draw(1, 2, 2, 64, 64, t=128)
  q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
  ids = jnp.ones((1, 128), jnp.int32)

  def layer(x, sinks):
    return splash_attention(
      x, k, v, ids, scale=SCALE, sinks=sinks, interpret=True
    )

  def loss(sinks):
    body = jax.checkpoint(lambda x, _: (layer(x, sinks), None))
    return jax.lax.scan(body, q, None, length=2)[0].astype(jnp.float32).sum()

  def plain(sinks):
    return layer(layer(q, sinks), sinks).astype(jnp.float32).sum()

  grad = jax.grad(loss)(sinks)
  assert grad.dtype == jnp.float32
  np.testing.assert_allclose(grad, jax.grad(plain)(sinks), rtol=0.02, atol=0.02)


def test_ignores_axes_that_the_mesh_lacks():
  q, k, v, _, _ = draw(2, 2, 2, 64, 64, t=128)
  ids = jnp.ones((2, 128), jnp.int32)
  mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
  expected = splash_attention(q, k, v, ids, scale=SCALE, interpret=True)
  with jax.set_mesh(mesh):
    out = jax.jit(
      lambda q, k, v: splash_attention(
        q,
        k,
        v,
        ids,
        scale=SCALE,
        head_axis="tensor",
        batch_axes=("data", "fsdp"),
        interpret=True,
      )
    )(q, k, v)
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ("shape", "options", "message"),
  [
    ((2, 3, 2), {}, "q has 3 heads, not a multiple of k's 2"),
    ((2, 2, 2), {"window": -1}, "window -1 is negative"),
    ((2, 2, 2), {"block": 100}, "block 100 is not a positive multiple of 128"),
    ((2, 2, 2), {"head_axis": "tensor"}, "q has 2 heads, which mesh axis"),
    ((3, 4, 4), {"batch_axes": ("data",)}, "q has 3 batch rows, which mesh"),
  ],
)
def test_names_what_is_wrong(shape, options, message):
  q, k, v, _, _ = draw(*shape, 64, 64, t=128)
  ids = jnp.ones((shape[0], 128), jnp.int32)
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))
  with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
    splash_attention(q, k, v, ids, scale=SCALE, interpret=True, **options)
