"""Every published family against an independent implementation of it.

`tests/testdata/models` holds tiny checkpoints and the logits that transformers
computes from them in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.model import extend, forward, init_cache, transformer

NAMES = (
  "deepseek_v3",
  "deepseek_v3_fp8",
  "deepseek_v3_mtp",
  "gpt_oss",
  "gpt_oss_mxfp4",
  "kimi_k2",
  "llama",
  "llama3_rope",
  "qwen3",
  "qwen3_moe",
)

# Different only in how they are stored, or by the MTP module.
_SAME_TRUNK = ("deepseek_v3_fp8", "deepseek_v3_mtp", "gpt_oss_mxfp4")
COMPUTED = [name for name in NAMES if name not in _SAME_TRUNK]

# Each function runs a few times: optimising it takes longer than it saves.
_UNOPTIMISED = {"xla_backend_optimization_level": 0}

# float32 on both sides; found are up to 7e-5.
_TOLERANCE = 2e-4

_jit = functools.partial(
  jax.jit, static_argnames="config", compiler_options=_UNOPTIMISED
)
_forward = _jit(forward)


@_jit
def _extend(params, config, cache, ids, start, count):
  cache, hidden = extend(params, config, cache, ids, start, count)
  return cache, transformer.unembed(params, hidden)


def _agree(got, model, tolerance=_TOLERANCE):
  real = model.mask > 0
  np.testing.assert_allclose(
    np.asarray(got)[real], model.logits[real], atol=tolerance, rtol=0
  )


def test_every_checkpoint_is_compared(golden):
  folder = golden("llama").folder.parent
  assert {f.name for f in folder.iterdir() if f.is_dir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference(name, golden):
  model = golden(name)
  logits = _forward(
    model.params, model.config, model.ids, segment_ids=model.mask
  )
  assert logits.dtype == jnp.float32
  _agree(logits, model)


# Tokens that each slot takes in a call: idle, single and full ones. Chunks of
# 16 are longer than the window of 7, which they also cross.
_CHUNKS = ((16, 5, 0), (1, 16, 3), (0, 0, 13), (16, 10, 1), (7, 0, 0))


def _decoded(model, config, params):
  """Logits [B, T, V] from a cache that is filled as `_CHUNKS` says."""
  slots = len(model.ids)
  cache = init_cache(config, slots, 45)
  start = np.zeros(slots, np.int32)
  out = np.zeros(model.logits.shape, np.float32)
  for count in np.array(_CHUNKS, np.int32)[:, :slots]:
    # Rows may be shorter than the plan; what follows a count is never read.
    count = np.minimum(count, model.ids.shape[1] - start)
    part = np.full((slots, 16), 9, np.int32)
    for s, n in enumerate(count):
      part[s, :n] = model.ids[s, start[s] : start[s] + n]
    cache, logits = _extend(params, config, cache, part, start, count)
    for s, n in enumerate(count):
      out[s, start[s] : start[s] + n] = logits[s, :n]
    start += count
  np.testing.assert_array_equal(start, model.mask.sum(1))
  return out


@pytest.mark.parametrize("name", COMPUTED)
def test_logits_from_a_cache_are_those_of_the_reference(name, golden, scanned):
  model = golden(name)
  config, params = model.config, model.params
  if name in ("gpt_oss", "deepseek_v3", "qwen3_moe"):
    config, params = scanned(config, params)
  _agree(_decoded(model, config, params), model)


def test_latent_cache_holds_rank_and_rope_numbers_a_token(golden):
  config = golden("deepseek_v3").config
  cache = init_cache(config, 3, 10)
  # kv_lora_rank 16 and qk_rope_head_dim 8, one for all heads.
  for layer in cache.values():
    (latent,) = layer.pop("latent")
    assert latent.shape == (3, 1, 10, 24)
    assert not layer
