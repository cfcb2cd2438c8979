"""A real engine, driven slot by slot, and what the learner says of it."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from arl_jax.model import ModelConfig, init, token_logprobs
from arl_jax.rollout.engine import Engine, EngineConfig
from arl_jax.rollout.request import Sampling

# Everything at once: experts, grouped queries, a layer that sees all and one
# with a window, whose kind the MTP module has too.
CONFIG = ModelConfig(
  vocab_size=64,
  width=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  expert_width=16,
  windows=(0, 5),
)
LENGTH = 48

# Programs run a few times: optimising them takes longer than it saves.
_fast = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
_score = _fast(
  functools.partial(token_logprobs, return_aux=True), static_argnums=1
)


@functools.cache
def policy(seed=0, config=CONFIG):
  return _fast(functools.partial(init, config))(jax.random.key(seed))


def engine_of(
  config=CONFIG, *, max_length=LENGTH, given=None, make=Engine, **shapes
):
  """An engine whose programs are compiled fast."""
  shapes = {
    "max_concurrent_decodes": 4,
    "prefill_rows": 2,
    "prefill_chunk": 24,
    "decode_steps": 3,
    **shapes,
  }
  with mock.patch.object(jax, "jit", _fast):
    return make(
      config, EngineConfig(**shapes), max_length=max_length, **(given or {})
    )


@dataclasses.dataclass
class Sampled:
  """Tokens of one slot, put together from calls."""

  ids: list = dataclasses.field(default_factory=list)
  logp: list = dataclasses.field(default_factory=list)
  sampled_logp: list = dataclasses.field(default_factory=list)
  experts: list = dataclasses.field(default_factory=list)
  stopped: bool = False
  finite: bool = True

  def absorb(self, result, slot):
    n = result.lengths[slot]
    self.ids += result.tokens[slot, :n].tolist()
    self.logp += result.log_prob[slot, :n].tolist()
    self.sampled_logp += result.sampled_logp[slot, :n].tolist()
    if result.experts is not None:
      self.experts += list(result.experts[slot, :n])
    self.stopped |= bool(result.stopped[slot])
    self.finite &= bool(result.finite[slot])


class Driver:
  """An engine, its parameters and its state."""

  def __init__(self, engine, params):
    self.engine = engine
    self.params = engine.place(params)
    self.state = engine.init_decode_state()

  def fill(self, slot, ids, stay=0, size=None):
    """Puts `ids` into a slot, of which the first `stay` are there already."""
    size = size or self.engine.prefill_chunk
    for first in range(stay, len(ids), size):
      rows = {slot: (first, ids[first : first + size])}
      self.state = self.engine.extend(self.params, self.state, rows)

  def start(self, slot, **how):
    how = Sampling(**{"max_tokens": 12, "seed": 1, **how})
    self.state = self.engine.start(self.state, slot, how)

  def step(self, slots=None):
    self.state, result = self.engine.generate(self.params, self.state, slots)
    return result

  def run(self, slots):
    """What the slots sample until all of them have ended."""
    found = {slot: Sampled() for slot in slots}
    while True:
      result = self.step()
      for slot, sampled in found.items():
        sampled.absorb(result, slot)
      if not result.active[list(slots)].any():
        return found

  def sample(self, slot, prompt, stay=0, size=None, **how):
    self.fill(slot, prompt, stay, size)
    self.start(slot, **how)
    return self.run([slot])[slot]


def prompt(length, seed=0, vocab_size=CONFIG.vocab_size):
  random = np.random.default_rng(seed)
  return random.integers(0, vocab_size, length).tolist()


def scores(params, ids, temperature=1.0, config=CONFIG, length=LENGTH):
  """What the learner says: log-probs of `ids`, and the experts [T, L, K]."""
  row = np.zeros((1, length), np.int32)
  row[0, : len(ids)] = ids
  logp, _, record = _score(
    params,
    config,
    jnp.asarray(row),
    segment_ids=jnp.asarray(np.arange(length)[None] < len(ids)).astype(int),
    temperature=jnp.float32(temperature),
  )
  experts = record.get("experts")
  return (
    np.asarray(logp)[0, : len(ids)],
    None if experts is None else np.asarray(experts)[0, : len(ids)],
  )


def assert_replayed(params, ids, sampled, temperature=1.0, **model):
  """Log-probs and experts are those that a whole row gives the tokens."""
  assert sampled.ids
  logp, experts = scores(params, [*ids, *sampled.ids], temperature, **model)
  # float32 on both sides; found are up to 2e-5.
  np.testing.assert_allclose(sampled.logp, logp[len(ids) :], atol=2e-4, rtol=0)
  if experts is not None:
    # Their order is that of their gates on both sides.
    np.testing.assert_array_equal(sampled.experts, experts[len(ids) :])


def assert_same(a, b):
  """The same tokens; log-probs but for rounding."""
  assert a.ids == b.ids
  assert (a.stopped, a.finite) == (b.stopped, b.finite)
  np.testing.assert_allclose(a.logp, b.logp, atol=1e-4, rtol=0)
  np.testing.assert_allclose(a.sampled_logp, b.sampled_logp, atol=1e-4, rtol=0)
