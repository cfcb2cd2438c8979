"""Choice of experts, with every number derived by hand."""

import functools

import hypothesis
import hypothesis.extra.numpy as draw_arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import losses
from arl_jax.model import ModelConfig, forward, router


def _config(experts, k, **fields):
  fields = {"experts": experts, "experts_per_token": k, **fields}
  config = ModelConfig(vocab_size=8, width=experts, **fields)
  config.validate()
  return config


def _sigmoid(experts, k, **fields):
  return _config(experts, k, router="sigmoid", **fields)


def _params(config, bias=None):
  """A router whose logits are its input."""
  params = {"router": jnp.eye(config.experts)}
  bias = jnp.zeros(config.experts) if bias is None else jnp.array(bias)
  if config.router_bias:
    params["router_bias"] = bias
  if config.router == "sigmoid":
    params["choice_bias"] = bias
  return params


_route = jax.jit(router.route, static_argnames="config")


def _chosen(config, logits, replay=None, bias=None):
  """Gate of each chosen expert of one token."""
  replay = None if replay is None else jnp.array(replay, jnp.int32)
  gates, experts, _ = _route(
    _params(config, bias), config, jnp.array(logits, jnp.float32), replay
  )
  assert experts.dtype == jnp.int32
  return dict(zip(experts.tolist(), gates.tolist(), strict=True))


def _logit(p):
  return np.log(p) - np.log1p(-np.asarray(p))


# Softmax of their logarithms: they sum to 1.
_P = [0.1, 0.2, 0.3, 0.4]


def test_softmax_gates_are_the_largest_probabilities_normalised():
  gates, experts, record = _route(
    _params(_config(4, 2)), _config(4, 2), jnp.log(jnp.array(_P))
  )
  np.testing.assert_array_equal(experts, [3, 2])
  np.testing.assert_allclose(gates, [4 / 7, 3 / 7], rtol=1e-6)
  np.testing.assert_allclose(record["probabilities"], _P, rtol=1e-6)
  np.testing.assert_allclose(record["logits"], np.log(_P), rtol=1e-6)


def test_gates_are_scaled_and_normalised_only_where_asked():
  config = _config(4, 2, normalise_gates=False, gate_scale=2.5)
  # 2.5 · 0.4 and 2.5 · 0.3.
  assert _chosen(config, np.log(_P)) == pytest.approx({3: 1.0, 2: 0.75})


def test_bias_of_the_router_changes_the_gates():
  config = _config(4, 2, router_bias=True)
  # Probabilities in proportion to 0.8, 0.2, 0.3, 0.4.
  chosen = _chosen(config, np.log(_P), bias=np.log([8.0, 1, 1, 1]))
  assert chosen == pytest.approx({0: 2 / 3, 3: 1 / 3})


def test_bias_of_the_choice_does_not_enter_the_gates():
  config = _sigmoid(4, 2, gate_scale=2.5)
  p, bias = [0.9, 0.8, 0.3, 0.2], [0.0, -0.6, 0.5, 0.0]
  # Scores 0.9, 0.2, 0.8, 0.2 choose 0 and 2; gates 0.9 and 0.3 of 1.2.
  chosen = _chosen(config, _logit(p), bias=bias)
  assert chosen == pytest.approx({0: 2.5 * 0.75, 2: 2.5 * 0.25})
  assert set(_chosen(config, _logit(p))) == {0, 1}


_GROUPED = _sigmoid(8, 3, expert_groups=4, groups_kept=2)
# Two best of each pair: 1.0, 1.1, 1.09, 1.0; the second and third are kept.
_IN_GROUPS = [0.9, 0.1, 0.6, 0.5, 0.55, 0.54, 0.7, 0.3]


def test_experts_come_from_the_groups_whose_two_best_are_largest():
  chosen = _chosen(_GROUPED, _logit(_IN_GROUPS))
  # Not 0 and 6, the most probable of all; 0.6 + 0.55 + 0.54 = 1.69.
  want = {2: 0.6 / 1.69, 4: 0.55 / 1.69, 5: 0.54 / 1.69}
  assert chosen == pytest.approx(want)


def test_groups_are_ranked_by_two_experts_not_by_all():
  config = _sigmoid(6, 2, expert_groups=2, groups_kept=1)
  # 0.8 + 0.3 < 0.6 + 0.52, though 0.8 + 0.3 + 0.3 > 0.6 + 0.52 + 0.1.
  p = [0.8, 0.3, 0.3, 0.6, 0.52, 0.1]
  assert set(_chosen(config, _logit(p))) == {3, 4}
  # The bias takes part in the choice of groups: 0.8 + 0.35 > 1.12.
  bias = [0, 0.05, 0, 0, 0, 0]
  assert set(_chosen(config, _logit(p), bias=bias)) == {0, 1}


def test_recorded_experts_are_taken_with_gates_of_the_router():
  # 0.2 and 0.4 of 0.6; the router's own are 3 and 2.
  chosen = _chosen(_config(4, 2), np.log(_P), [1, 3])
  assert chosen == pytest.approx({1: 1 / 3, 3: 2 / 3})


@pytest.mark.parametrize(
  ("replay", "want"),
  [
    pytest.param([-1, -1], {3, 2}, id="free"),
    pytest.param([1, -1], {1, 3}, id="second_free"),
    pytest.param([-1, 1], {1, 3}, id="first_free"),
    pytest.param([1, 1], {1, 3}, id="twice"),
    pytest.param([4, 1], {1, 3}, id="beyond"),
    pytest.param([-(2**31), 2**31 - 1], {3, 2}, id="far_beyond"),
  ],
)
def test_what_is_not_recorded_the_router_chooses(replay, want):
  assert set(_chosen(_config(4, 2), np.log(_P), replay)) == want


@pytest.mark.parametrize(
  ("replay", "want"),
  [([0, 1], {1, 3}), ([0, 0], {2, 3}), ([2, 0], {2, 3}), ([1, 2], {1, 2})],
)
def test_implausible_expert_gives_way_to_the_best_one_left(replay, want):
  # The router's own are 3 and 2: less than 0.1 · 0.4 is implausible.
  p = [0.02, 0.08, 0.4, 0.5]
  assert set(_chosen(_config(4, 2), np.log(p), replay)) == want


def test_plausibility_is_judged_without_the_bias_of_the_choice():
  p, bias = [0.9, 0.8, 0.3, 0.05], [0.0, 0.0, 0.0, 0.7]
  config = _sigmoid(4, 1)
  # Own is 0 at 0.9: 3 is below 0.09, whatever its score of 0.75; 2 is not.
  assert set(_chosen(config, _logit(p), [3], bias)) == {0}
  assert set(_chosen(config, _logit(p), [2], bias)) == {2}
  # Own are 0 and 3 at 0.05: nothing is below 0.005.
  bias[3] = 0.82
  assert set(_chosen(_sigmoid(4, 2), _logit(p), [1, 2], bias)) == {1, 2}


def test_recorded_expert_may_lie_outside_the_groups_kept():
  chosen = _chosen(_GROUPED, _logit(_IN_GROUPS), [0, 6, -1])
  # 2 is the best in the kept groups; 0.9 + 0.7 + 0.6 = 2.2.
  want = {0: 0.9 / 2.2, 6: 0.7 / 2.2, 2: 0.6 / 2.2}
  assert chosen == pytest.approx(want)


def test_replay_of_nothing_is_no_replay():
  x = jax.random.normal(jax.random.key(0), (2, 9, 8))
  free = jnp.full((2, 9, 3), -1)
  one = _route(_params(_GROUPED), _GROUPED, x)
  two = _route(_params(_GROUPED), _GROUPED, x, free)
  for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_gradient_of_replayed_gates_reaches_the_router():
  config, x = _config(4, 2), jnp.log(jnp.array(_P))

  @jax.jit
  @jax.grad
  def gradient(params):
    gates, experts, _ = router.route(params, config, x, jnp.array([1, 3]))
    return jnp.where(experts == 1, gates, 0).sum()

  # gate_1 = p_1 / (p_1 + p_3) = σ(z_1 − z_3) = 1/3, whose slope is 2/9.
  slope = np.array([0, 2 / 9, 0, -2 / 9])
  got = gradient(_params(config))["router"]
  np.testing.assert_allclose(got, np.outer(np.log(_P), slope), atol=1e-6)


def test_bias_of_the_choice_has_no_gradient():
  config = _sigmoid(4, 2)

  @jax.jit
  @jax.grad
  def gradient(params):
    gates, _, record = router.route(params, config, jnp.array(_logit(_P)))
    return (gates**2).sum() + record["probabilities"].sum()

  got = gradient(_params(config))
  assert not np.asarray(got["choice_bias"]).any()
  assert np.asarray(got["router"]).any()


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_own_choice_replayed_gives_the_same_logits(name, golden, cut):
  model = golden(name)
  config, params = cut(model.config, model.params, 2)
  run = jax.jit(functools.partial(forward, config=config, return_aux=True))
  layers, k = config.moe_layers, config.experts_per_token
  free = np.full((*model.ids.shape, layers, k), -1, np.int32)
  logits, record = run(params, input_ids=model.ids, replay_experts=free)
  own = record["experts"]
  assert own.shape == free.shape
  again, _ = run(params, input_ids=model.ids, replay_experts=own[..., ::-1])
  scale = np.abs(logits).max()
  np.testing.assert_allclose(again, logits, rtol=0, atol=1e-6 * scale)
  # And another choice gives others.
  other, _ = run(
    params, input_ids=model.ids, replay_experts=(own + 1) % config.experts
  )
  assert np.abs(other - logits).max() > 0.01 * scale


def test_balance_of_a_segment_is_derived_by_hand():
  # A, both to expert 0: f = (2, 0), P = (0.625, 0.375), Σ f P = 1.25.
  # B, to expert 1: f = (0, 2), P_1 = 0.8: 1.6. Then padding.
  p = jnp.array([[[0.75, 0.25], [0.5, 0.5], [0.2, 0.8], [0.9, 0.1]]])
  experts = jnp.array([[[0], [0], [1], [0]]])
  segments = jnp.array([[1, 1, 2, 0]])
  got = losses.router_balance(p, experts, segments)
  np.testing.assert_allclose(got, [[1.25, 1.25, 1.6, 0]], rtol=1e-6)
  # Sigmoids needn't sum to one; their shares count.
  got = losses.router_balance(0.7 * p, experts, segments)
  np.testing.assert_allclose(got, [[1.25, 1.25, 1.6, 0]], rtol=1e-6)


def test_even_choices_have_a_balance_of_one():
  # Four tokens, two of four experts each, every expert twice.
  experts = jnp.array([[[0, 1], [2, 3], [1, 2], [3, 0]]])
  p = jax.nn.softmax(jax.random.normal(jax.random.key(0), (1, 4, 4)))
  got = losses.router_balance(p, experts, jnp.ones((1, 4), jnp.int32))
  np.testing.assert_allclose(got, np.ones((1, 4)), rtol=1e-6)


def test_balance_and_its_gradient_do_not_depend_on_packing():
  lengths = (5, 1, 9)
  keys = jax.random.split(jax.random.key(0), 2)
  p = jax.nn.softmax(jax.random.normal(keys[0], (1, 18, 6)))
  experts = jax.lax.top_k(jax.random.normal(keys[1], (1, 18, 6)), 2)[1]
  # Numbers needn't rise.
  packed = jnp.array([[3] * 5 + [1] * 1 + [2] * 9 + [0] * 3])

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def summed(p, experts, segments):
    balance = losses.router_balance(p, experts, segments)
    return balance.sum(), balance

  (_, together), slope = summed(p, experts, packed)
  at = 0
  for n in lengths:
    part = slice(at, at + n)
    ones = jnp.ones((1, n), jnp.int32)
    (_, alone), own = summed(p[:, part], experts[:, part], ones)
    np.testing.assert_allclose(together[:, part], alone, rtol=1e-5)
    np.testing.assert_allclose(slope[:, part], own, rtol=1e-4, atol=1e-6)
    assert np.asarray(own).any()
    at += n
  assert not np.asarray(together)[:, at:].any()
  assert not np.asarray(slope)[:, at:].any()


_CONFIGS = (
  _config(6, 2),
  _config(6, 6, router_bias=True, normalise_gates=False),
  _sigmoid(6, 3, gate_scale=2.5),
  _sigmoid(6, 2, expert_groups=3, groups_kept=1),
)
_numbers = st.integers(-20, 20).map(lambda n: np.float32(n / 2))


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(
  config=st.sampled_from(_CONFIGS),
  logits=draw_arrays.arrays(np.float32, (3, 6), elements=_numbers),
  bias=draw_arrays.arrays(np.float32, (6,), elements=_numbers),
  data=st.data(),
)
def test_always_k_distinct_experts_recorded_ones_first(
  config, logits, bias, data
):
  k = config.experts_per_token
  replay = data.draw(
    draw_arrays.arrays(np.int32, (3, k), elements=st.integers(-2, 8))
  )
  params = _params(config, bias)
  _, own, _ = _route(params, config, logits)
  gates, experts, record = jax.device_get(
    _route(params, config, logits, replay)
  )
  p = record["probabilities"]
  for t in range(3):
    assert len(set(experts[t])) == k
    assert set(experts[t]) <= set(range(6))
    least = np.float32(router.PLAUSIBLE) * p[t, own[t, -1]]
    forced = {e for e in replay[t] if 0 <= e < 6 and p[t, e] >= least}
    assert forced <= set(experts[t])
    # The others are the router's own, as far as they have a place.
    rest = [e for e in own[t].tolist() if e not in forced]
    missing = k - len(forced)
    assert set(rest[:missing]) <= set(experts[t])
    want = p[t, experts[t]]
    if config.normalise_gates:
      want = want / want.sum()
    np.testing.assert_allclose(gates[t], config.gate_scale * want, rtol=1e-5)
