"""Tiny policies, episodes to train them on, and steps that compile quickly."""

import functools
import types

import jax
import numpy as np
import optax
import pytest

from arl_jax.learner import (
  Experience,
  Learner,
  LearnerConfig,
  StepConfig,
  state,
  step,
)
from arl_jax.model import ModelConfig, init
from arl_jax.types import NO_VERSION, Role, Segment

# Each step runs a few times: optimising it takes longer than it saves.
_UNOPTIMISED = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_use_fusion_emitters": False,
}

_MODELS = {
  # Every kind of term: routers, and the MTP module.
  "moe": ModelConfig(
    vocab_size=64, width=16, layers=1, head_dim=8, expert_width=16
  ),
  # Where no such terms matter.
  "dense": ModelConfig(
    vocab_size=64,
    width=16,
    layers=1,
    head_dim=8,
    experts=0,
    dense_width=16,
    mtp_heads=0,
  ),
}


@pytest.fixture(autouse=True, scope="module")
def _quickly_compiled():
  """Steps that are made in a module of tests."""
  quick = types.SimpleNamespace(**vars(jax))
  quick.jit = functools.partial(jax.jit, compiler_options=_UNOPTIMISED)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(step, "jax", quick)
    yield


@pytest.fixture(scope="session")
def models():
  return _MODELS


@functools.cache
def _params(model):
  fresh = jax.jit(init, static_argnums=0, compiler_options=_UNOPTIMISED)
  return jax.device_get(fresh(model, jax.random.key(0)))


@pytest.fixture(scope="session")
def params_of():
  """Parameters of a model, numpy."""
  return _params


def _segment(length, seed, *, trained=True, experts=None):
  """Random ids, 60 % of them sampled, the last one among them."""
  draw = np.random.default_rng(seed)
  sampled = draw.random(length) < 0.6
  sampled[0], sampled[-1] = False, True
  sampled &= trained
  logp = draw.uniform(-6, -2, length)
  return Segment(
    ids=draw.integers(0, 64, length, np.int32),
    roles=np.where(sampled, Role.SAMPLED, Role.TOOL).astype(np.uint8),
    sampled=sampled,
    behaviour_logp=np.where(sampled, logp, 0).astype(np.float32),
    policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
    temperature=0.7 if seed % 2 else 1.0,
    experts=experts,
  )


@pytest.fixture(scope="session")
def segment():
  return _segment


# Lengths of the segments of each episode, and its advantage.
_EPISODES = (
  ((9, 5, 7), 1.0),
  ((12,), -0.5),
  ((3, 11), 0.3),
  ((10,), 2.0),
)


@pytest.fixture(scope="session")
def experiences():
  """Four episodes that fill four rows of 16, and one with nothing trained."""
  numbers = iter(range(100))
  made = [
    Experience(
      segments=tuple(_segment(n, next(numbers)) for n in lengths),
      advantage=advantage,
    )
    for lengths, advantage in _EPISODES
  ]
  silent = Experience(segments=(_segment(6, 99, trained=False),), advantage=9.0)
  return (*made[:2], silent, *made[2:])


# The change of the parameters is the gradient, so large that it is not lost in
# the rounding of what it is added to.
RATE = 100.0


@pytest.fixture(scope="session")
def sgd():
  return optax.sgd(RATE)


@pytest.fixture(scope="session")
def state_of():
  """A state of its own, since a step takes its buffers away."""

  def make(params, tx):
    return state.with_optimizer(jax.tree.map(jax.numpy.array, params), tx)

  return make


@pytest.fixture(scope="session")
def learner_of(sgd):
  """A learner of rows of 16, all in one microbatch unless told otherwise."""

  def make(
    model,
    *,
    loss="cispo",
    tx=sgd,
    own=None,
    row_length=16,
    rows=4,
    microbatches=1,
    reference=None,
    mesh=None,
    params=None,
    **terms,
  ):
    terms = {"mtp_share": 1.0, "clip_norm": 1e9, **terms}
    config = LearnerConfig(
      loss=loss,
      row_length=row_length,
      microbatch_tokens=rows * row_length,
      microbatches=microbatches,
      step=StepConfig(**terms),
    )
    return Learner(
      model,
      _params(model) if params is None else params,
      config,
      tx,
      loss=own,
      reference=reference,
      mesh=mesh,
    )

  return make


def _assert_close(one, two, tolerance):
  """Every array within a share of its largest entry."""
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(jax.device_get(one)),
    jax.tree.leaves(jax.device_get(two)),
    strict=True,
  ):
    atol = tolerance * np.abs(b).max()
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)


@pytest.fixture(scope="session")
def assert_close():
  return functools.partial(_assert_close, tolerance=1e-5)


@pytest.fixture(scope="session")
def assert_same_update():
  """(params, metrics) of two steps agree, in every metric of the batch."""

  def check(one, two, ignored=()):
    _assert_close(one[0], two[0], 1e-5)
    assert set(one[1]) == set(two[1])
    for name in set(two[1]) - set(ignored):
      np.testing.assert_allclose(
        one[1][name], two[1][name], rtol=1e-5, atol=1e-6, err_msg=name
      )

  return check


@pytest.fixture(scope="module")
def model(models):
  return models["dense"]


@pytest.fixture(scope="module")
def params(model, params_of):
  return params_of(model)
