"""The rollout engine: slots with caches, chunked prefill, batched decoding."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from arl_jax.model import decoding, transformer
from arl_jax.model.config import ModelConfig
from arl_jax.rollout.sampling import sample


@dataclasses.dataclass(kw_only=True, slots=True)
class EngineConfig:
  """Static shapes of an engine.

  Attributes:
    max_concurrent_decodes: S, slots.
    prefill_rows: slots that one prefill call extends.
    prefill_chunk: tokens a slot that one prefill call appends.
    decode_steps: tokens a slot that one generate call samples at most.
  """

  max_concurrent_decodes: int = 64
  prefill_rows: int = 16
  prefill_chunk: int = 32
  decode_steps: int = 8

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    for field in dataclasses.fields(self):
      if getattr(self, field.name) < 1:
        raise ValueError(
          f"engine.{field.name} is {getattr(self, field.name)}, not >= 1"
        )


class DecodeState(struct.PyTreeNode):
  """What lives on the device between calls.

  Attributes:
    cache: keys and values of each layer, [S, G, max_length, head_dim].
    length: [S] int32, tokens in the cache.
    hidden: [S, D], trunk output at the last token.
    active: [S] bool, slots that sample.
    sampled: [S] int32, tokens the running request has sampled.
    limit: [S] int32, tokens it may sample.
    seed: [S] int32.
    temperature: [S].
    stop: [S, 4] int32, stop ids, padded with -1.
  """

  cache: Any
  length: jax.Array
  hidden: jax.Array
  active: jax.Array
  sampled: jax.Array
  limit: jax.Array
  seed: jax.Array
  temperature: jax.Array
  stop: jax.Array


# Stop ids a request may have.
MAX_STOP_IDS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ResultTokens:
  """What one generate call sampled.

  Attributes:
    tokens: [S, decode_steps] int32.
    log_prob: [S, decode_steps] float32, nats, behaviour log-probs.
    lengths: [S] int32, valid entries of each row.
    active: [S] bool, requests that go on.
    stopped: [S] bool, requests that ended on a stop id.
    version: policy version of every token here.
  """

  tokens: np.ndarray
  log_prob: np.ndarray
  lengths: np.ndarray
  active: np.ndarray
  stopped: np.ndarray
  version: int


class Engine:
  """Holds weights and decode state; not thread-safe, one owner drives it."""

  def __init__(
    self,
    model: ModelConfig,
    params: Any,
    config: EngineConfig,
    *,
    max_length: int,
    version: int = 0,
  ):
    """Args: max_length: tokens a slot can hold, prompt and samples."""
    config.validate()
    self.max_stop_ids = MAX_STOP_IDS
    self.model, self.config, self.max_length = model, config, max_length
    self.params, self.version = params, version
    self.state = self._empty()
    self._prefill = jax.jit(
      functools.partial(_prefill, model), donate_argnums=1
    )
    self._generate = jax.jit(
      functools.partial(generate_step, model, config.decode_steps),
      donate_argnums=1,
    )

  def _empty(self) -> DecodeState:
    slots = self.config.max_concurrent_decodes
    integers = jnp.zeros(slots, jnp.int32)
    return DecodeState(
      cache=decoding.init_cache(
        self.model, slots, self.max_length, self.params["embed"].dtype
      ),
      length=integers,
      hidden=jnp.zeros((slots, self.model.width), self.params["embed"].dtype),
      active=jnp.zeros(slots, bool),
      sampled=jnp.copy(integers),
      limit=jnp.copy(integers),
      seed=jnp.copy(integers),
      temperature=jnp.ones(slots),
      stop=jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32),
    )

  def update_weights(self, params: Any, version: int) -> None:
    """Takes in new weights. Callers re-prefill what they had cached."""
    self.params, self.version = params, version

  def prefill(self, rows: Mapping[int, tuple[int, Sequence[int]]]) -> None:
    """Writes tokens into slots.

    Args:
      rows: slot -> (tokens of the slot that stay, ids to append), at most
        `prefill_rows` slots and `prefill_chunk` ids each.
    """
    config = self.config
    ids = np.zeros((config.prefill_rows, config.prefill_chunk), np.int32)
    # Out of range: padding rows are dropped when written back.
    slots = np.full(config.prefill_rows, config.max_concurrent_decodes)
    start = np.zeros(config.prefill_rows, np.int32)
    count = np.zeros(config.prefill_rows, np.int32)
    for row, (slot, (first, tokens)) in enumerate(rows.items()):
      slots[row], start[row], count[row] = slot, first, len(tokens)
      ids[row, : len(tokens)] = tokens
    self.state = self._prefill(
      self.params, self.state, slots, start, ids, count
    )

  def insert(
    self,
    slot: int,
    *,
    limit: int,
    stop_ids: Sequence[int],
    seed: int,
    temperature: float,
  ) -> None:
    """Lets a prefilled slot sample from its last token on."""
    stop = np.full(MAX_STOP_IDS, -1, np.int32)
    stop[: len(stop_ids)] = stop_ids
    self.state = _insert(
      self.state, slot, limit, stop, seed, np.float32(temperature)
    )

  def generate(self) -> ResultTokens:
    """Samples up to `decode_steps` tokens in every active slot."""
    self.state, out = self._generate(self.params, self.state)
    tokens, logp, lengths, stopped = jax.device_get(out)
    active = np.asarray(self.state.active)
    return ResultTokens(tokens, logp, lengths, active, stopped, self.version)

  def free_resource(self, slot: int) -> None:
    """Stops whatever runs in the slot."""
    self.state = self.state.replace(
      active=self.state.active.at[slot].set(False)
    )


@functools.partial(jax.jit, donate_argnums=0)
def _insert(state, slot, limit, stop, seed, temperature):
  return state.replace(
    active=state.active.at[slot].set(True),
    sampled=state.sampled.at[slot].set(0),
    limit=state.limit.at[slot].set(limit),
    stop=state.stop.at[slot].set(stop),
    seed=state.seed.at[slot].set(seed),
    temperature=state.temperature.at[slot].set(temperature),
  )


def _prefill(model, params, state, slots, start, ids, count):
  """Extends the named slots; the others are untouched."""
  part = jax.tree.map(
    lambda x: x.at[slots].get(mode="fill", fill_value=0), state.cache
  )
  part, hidden = decoding.extend(params, model, part, ids, start, count)
  last = jnp.take_along_axis(
    hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1
  )[:, 0]

  def put(whole, rows):
    return whole.at[slots].set(rows, mode="drop")

  return state.replace(
    cache=jax.tree.map(put, state.cache, part),
    length=put(state.length, start + count),
    hidden=put(state.hidden, last),
  )


def generate_step(model, steps, params, state):
  """Samples up to `steps` tokens in every active slot."""
  slots = state.length.shape[0]
  tokens = jnp.zeros((slots, steps), jnp.int32)
  logps = jnp.zeros((slots, steps), jnp.float32)
  lengths = jnp.zeros(slots, jnp.int32)
  stopped = jnp.zeros(slots, bool)

  def go_on(carry):
    step, state, *_ = carry
    return (step < steps) & state.active.any()

  def step_once(carry):
    step, state, tokens, logps, lengths, stopped = carry
    logits = transformer.unembed(params, state.hidden)
    ids, logp = sample(logits, state.temperature, state.seed, state.sampled)
    on = state.active
    tokens = tokens.at[:, step].set(jnp.where(on, ids, 0))
    logps = logps.at[:, step].set(jnp.where(on, logp, 0.0))
    cache, hidden = decoding.extend(
      params,
      model,
      state.cache,
      ids[:, None],
      state.length,
      on.astype(jnp.int32),
    )
    stops = on & (ids[:, None] == state.stop).any(-1)
    sampled = state.sampled + on
    state = state.replace(
      cache=cache,
      hidden=jnp.where(on[:, None], hidden[:, 0], state.hidden),
      length=state.length + on,
      sampled=sampled,
      active=on & ~stops & (sampled < state.limit),
    )
    return step + 1, state, tokens, logps, lengths + on, stopped | stops

  carry = (0, state, tokens, logps, lengths, stopped)
  _, state, *out = jax.lax.while_loop(go_on, step_once, carry)
  return state, tuple(out)
