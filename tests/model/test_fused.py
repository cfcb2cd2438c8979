"""Joint projections compute what the separate ones do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.model import forward
from arl_jax.model.fused import fuse


# Biases; a q/k norm; a shared expert beside routed ones; a dense model.
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3", "kimi_k2", "llama"])
def test_joint_projections_give_the_same(name, golden):
  model = golden(name)
  ids, segments = jnp.asarray(model.ids), jnp.asarray(model.mask)

  def total(params, join):
    out = forward(
      fuse(params) if join else params,
      model.config,
      ids,
      segment_ids=segments,
    )
    return (jnp.where(segments[..., None], out, 0) ** 2).mean(), out

  both = [
    jax.jit(jax.grad(total, has_aux=True), static_argnums=1)(model.params, join)
    for join in (False, True)
  ]
  (apart, logits), (joint, found) = both
  # float32, as in test_families: other shapes, other orders of summing.
  np.testing.assert_allclose(found, logits, atol=2e-4)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), apart, joint
  )


def test_what_is_joined(golden):
  params = golden("kimi_k2").params
  fused = fuse(params)
  dense, moe = (fused["layers"][name] for name in sorted(fused["layers"])[:2])
  assert {"gate", "up"}.isdisjoint(dense["mlp"])
  assert {"gate", "up"}.isdisjoint(moe["moe"]["shared"])
  # Latent attention and routed experts stay.
  assert {"q_latent", "latent"} <= dense["attention"].keys()
  assert {"gate", "up"} <= moe["moe"].keys()
  attention = fuse(golden("gpt_oss").params)["layers"]["000"]["attention"]
  assert {"qkv", "qkv_bias", "out"} <= attention.keys()
  assert {"q", "k", "v", "q_bias"}.isdisjoint(attention)
  # The caller's own parameters are as they were.
  assert "gate" in params["layers"]["000"]["mlp"]
