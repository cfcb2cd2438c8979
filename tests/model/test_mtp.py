import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.model import ModelConfig, init, mtp, mtp_forward, transformer
from arl_jax.model.rope import segment_positions

CONFIG = ModelConfig(
  vocab_size=64, width=32, layers=1, heads=2, head_dim=8, expert_width=16
)


# Each function runs a few times: optimising it takes longer than it saves.
_jit = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@pytest.fixture(scope="module")
def params():
  return _jit(init, static_argnums=0)(CONFIG, jax.random.key(0))


def _row(ids, segment_ids=None):
  ids = jnp.array(ids)
  numbers = (
    jnp.ones_like(ids) if segment_ids is None else jnp.array(segment_ids)
  )
  return ids, segment_positions(numbers), numbers


_hidden = _jit(
  lambda params, *row: transformer.hidden_states(params, CONFIG, *row)
)


@_jit
def _draft(params, ids, positions, segment_ids):
  hidden, _ = transformer.hidden_states(
    params, CONFIG, ids, positions, segment_ids
  )
  return mtp_forward(params, CONFIG, hidden, ids, positions, segment_ids)


@_jit
def _distil(params, ids, positions, segment_ids, mask):
  def loss(p):
    hidden, _ = transformer.hidden_states(
      p, CONFIG, ids, positions, segment_ids
    )
    total, *rest = mtp.distillation(
      p, CONFIG, hidden, ids, positions, segment_ids, mask
    )
    return total, rest

  return jax.value_and_grad(loss, has_aux=True)(params)


def _ids(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, 64, shape, np.int32)


def test_entry_t_has_seen_tokens_up_to_t_plus_one(params):
  # It predicts t + 2, so token 6 is known to entries from 5 on.
  ids = _ids(1, 12)
  changed = ids.copy()
  changed[0, 6] = (changed[0, 6] + 1) % 64
  one, two = (np.asarray(_draft(params, *_row(x))) for x in (ids, changed))
  assert one.shape == (1, 11, 64)
  np.testing.assert_array_equal(one[0, :5], two[0, :5])
  assert np.abs(one[0, 5:] - two[0, 5:]).max(-1).min() > 1e-4


def test_gradient_of_distillation_reaches_the_module_only(params):
  row = _row(_ids(1, 12))
  (value, _), gradient = _distil(params, *row, jnp.ones((1, 12), bool))
  assert value > 0
  for name, part in gradient.items():
    for path, x in jax.tree_util.tree_leaves_with_path(part):
      if name == "mtp":
        assert np.asarray(x).any(), path
      else:
        assert not np.asarray(x).any(), (name, path)


def test_loss_is_the_cross_entropy_to_the_main_head_one_later(params):
  row = _row(_ids(1, 12))
  hidden, _ = _hidden(params, *row)
  target = np.asarray(transformer.unembed(params, hidden), np.float64)[:, 1:-1]
  draft = np.asarray(_draft(params, *row), np.float64)[:, :-1]
  p, q = (np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in (target, draft))
  mask = jnp.array(np.arange(12)[None] % 3 == 0)
  inside = np.asarray(mask)[:, 2:]
  want = -(p * np.log(q)).sum(-1)[inside].sum()
  agree = (p.argmax(-1) == q.argmax(-1))[inside].sum()
  (value, (count, agreed)), _ = _distil(params, *row, mask)
  np.testing.assert_allclose(value, want, rtol=1e-5)
  # Tokens 3, 6 and 9; token 0 isn't two after any.
  assert count == 3
  assert agreed == agree


def test_targets_beyond_the_segment_do_not_count(params):
  ids = _ids(1, 12)
  numbers = np.array([[1] * 5 + [2] * 5 + [0] * 2])
  everything = jnp.array(numbers > 0)
  (value, (count, _)), _ = _distil(params, *_row(ids, numbers), everything)
  assert count == (5 - 2) + (5 - 2)
  poisoned = np.where(numbers == 0, 63 - ids, ids)
  (value_2, _), _ = _distil(params, *_row(poisoned, numbers), everything)
  np.testing.assert_allclose(value, value_2, rtol=1e-5)
  alone = 0.0
  for part in (ids[:, :5], ids[:, 5:10]):
    wide = np.pad(part, ((0, 0), (0, 7)))
    own = np.array([[1] * 5 + [0] * 7])
    (total, _), _ = _distil(params, *_row(wide, own), jnp.array(own > 0))
    alone += total
  np.testing.assert_allclose(value, alone, rtol=1e-5)


def test_model_without_the_module_has_no_parameters_of_it():
  config = ModelConfig(vocab_size=64, mtp_heads=0)
  assert "mtp" not in transformer.specs(config)


def test_logits_are_those_of_the_reference(golden):
  model = golden("deepseek_v3_mtp")
  # config.json may announce a module that the file doesn't hold; here it does.
  assert model.config.mtp_heads == 1

  @_jit
  def draft(params, *row):
    hidden, _ = transformer.hidden_states(params, model.config, *row)
    return mtp_forward(params, model.config, hidden, *row)

  want = np.load(model.folder / "mtp_logits.npy")
  got = draft(model.params, *_row(model.ids))
  # Both in float32; found is 2e-5.
  np.testing.assert_allclose(got, want, atol=2e-4, rtol=0)
