"""Compiled steps over slots: what a scheduler drives."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from arl_jax import sharding
from arl_jax.model import transformer
from arl_jax.model.config import ModelConfig
from arl_jax.model.fused import for_decoding
from arl_jax.rollout import decode_state, sampling, speculative, steps
from arl_jax.rollout.decode_state import DecodeState
from arl_jax.rollout.engine_config import EngineConfig
from arl_jax.rollout.request import Sampling
from arl_jax.rollout.results import ResultTokens
from arl_jax.rollout.warm_up import warm_up

# Prefill chunks from twice this on have a short form beside the long one.
_SHORT_CHUNK = 32

# Tokens that attention looks at, at least, where caches have no blocks.
_LEAST_SPAN = 128


class Weights(NamedTuple):
  """Parameters as an engine computes with them.

  Attributes:
    params: of the policy, laid out for decoding.
    head: of the drafts; None takes the policy's.
  """

  params: Any
  head: speculative.DraftHead | None


class SlotEngine:
  """Compiled steps of one model; holds neither weights nor decode state.

  A decode state that was given to a method is gone: go on with the one that
  came back.

  Attributes:
    model: the policy's configuration.
    config: static shapes.
    slots: S.
    max_length: tokens a slot can hold, prompt and samples.
    drafts: the draft policy: what was accepted.
  """

  max_stop_ids = sampling.MAX_STOP_IDS
  max_biased = sampling.MAX_BIASED

  def __init__(
    self,
    model: ModelConfig,
    config: EngineConfig,
    *,
    max_length: int,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    params: Any = None,
    tokenizer: Any = None,
    draft_ids: Sequence[int] | None = None,
  ):
    """Makes an engine; compiles nothing yet.

    Args:
      model: the policy's configuration.
      config: static shapes.
      max_length: tokens a slot can hold, prompt and samples.
      dtype: of caches; parameters are used as they are.
      mesh: what parameters and caches are split over.
      params: what `load_params` gives.
      tokenizer: what `get_tokenizer` gives.
      draft_ids: tokens that drafts may be, such as frequent ones; by default
        all. What is accepted stays exact.

    Raises:
      ValueError: names the field that can't be.
    """
    config.validate()
    if not isinstance(max_length, int) or max_length < 2:
      raise ValueError(f"max_length is {max_length!r}, not an integer >= 2")
    self._k = config.draft_tokens
    if self._k and not model.mtp_heads:
      raise ValueError(
        f"engine.draft_tokens is {self._k}, but the model has no MTP module"
        " (model.mtp_heads is 0)"
      )
    self.model, self.config, self.max_length = model, config, max_length
    self.mesh, self._dtype = mesh, dtype
    self._params, self._tokenizer = params, tokenizer
    self.prefill_rows, self.prefill_chunk = (
      config.prefill_rows,
      min(config.prefill_chunk, max_length),
    )
    self._appended = max(self.prefill_chunk, self._k + 1)
    self.slots = self._slots_within_budget()
    self.prefill_rows = min(self.prefill_rows, self.slots)
    self.vocab_size = model.vocab_size
    self.drafts = speculative.DraftPolicy(
      self._k, adaptive=config.draft_adaptive
    )
    self._draft_ids = None
    if draft_ids is not None:
      self._draft_ids = _distinct(draft_ids, model.vocab_size)
    self._called: set[tuple[int, int, int]] = set()
    self._compile()

  def _slots_within_budget(self) -> int:
    config = self.config
    if not config.cache_bytes:
      return config.max_concurrent_decodes
    each = self.bytes_per_slot
    slots = config.cache_bytes // each
    if not slots:
      raise ValueError(
        f"engine.cache_bytes is {config.cache_bytes}; one slot of"
        f" {self.max_length} tokens takes {each} bytes"
      )
    return min(slots, config.max_concurrent_decodes or slots)

  @property
  def bytes_per_slot(self) -> int:
    """Of caches."""
    return decode_state.bytes_per_slot(
      self.model,
      self.max_length,
      self._appended,
      self._dtype,
      drafts=bool(self._k),
    )

  def _compile(self) -> None:
    kept = functools.partial(decode_state.kept, self.mesh)
    self._empty: dict[int, Callable[[], DecodeState]] = {}
    self._extend = jax.jit(
      kept(functools.partial(steps.extend, self.model)),
      static_argnums=0,
      donate_argnums=2,
    )
    self._generate = jax.jit(
      kept(functools.partial(steps.generate, self.model)),
      static_argnums=(0, 1, 2, 3),
      donate_argnums=6,
    )
    self._start = jax.jit(kept(steps.start), donate_argnums=0)
    self._stop = jax.jit(kept(steps.stop), donate_argnums=0)
    self._clear = jax.jit(kept(decode_state.clear), donate_argnums=0)
    self._move = jax.jit(kept(decode_state.move), donate_argnums=0)
    self._move_within = jax.jit(
      kept(lambda state, *at: decode_state.move(state, state, *at)),
      donate_argnums=0,
    )

  def place(self, params: Any) -> Weights:
    """Lays parameters out for decoding; give these to the other methods.

    Arrays that need no change are taken as they are: keep them alive.

    Raises:
      ValueError: they aren't the model's.
    """
    wanted = _shapes(sharding.shapes(transformer.specs(self.model)))
    found = _shapes(params)
    for name in sorted(wanted.keys() | found.keys()):
      if wanted.get(name) != found.get(name):
        raise ValueError(
          f"params[{name!r}] has shape {found.get(name)}, by the model's"
          f" configuration {wanted.get(name)}"
        )
    whole = self.mesh is None or self.mesh.size == 1
    if whole and sharding.platform() == "cpu":
      params = jax.jit(for_decoding)(params)
    head = None
    if self._k:
      head = speculative.draft_head(params, self._draft_ids)
    return Weights(params, head)

  def check_placed(self, weights: Any) -> None:
    """Raises ValueError for what `place` didn't give."""
    if not isinstance(weights, Weights):
      raise ValueError(
        f"weights are {type(weights).__name__}, not what Engine.place gives"
      )

  def init_decode_state(self) -> DecodeState:
    """Empty slots."""
    return self._state_of(self.slots)

  def _state_of(self, slots: int) -> DecodeState:
    if slots not in self._empty:
      self._empty[slots] = self._maker(slots)
    return self._empty[slots]()

  def _maker(self, slots: int) -> Callable[[], DecodeState]:
    make = functools.partial(
      decode_state.empty,
      self.model,
      slots,
      self.max_length,
      self._appended,
      self._dtype,
      drafts=bool(self._k),
    )
    if self.mesh is None:
      return jax.jit(make)
    places = decode_state.placed(jax.eval_shape(make), self.mesh)
    return jax.jit(make, out_shardings=places)

  def _on_mesh(self) -> Any:
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

  def span(self, tokens: int) -> int:
    """How far attention looks if no slot holds more than `tokens`."""
    span = decode_state.block_of(self.max_length) or _LEAST_SPAN
    while span < tokens:
      span *= 2
    return min(span, self.max_length)

  def generate(
    self,
    params: Any,
    state: DecodeState,
    slots: Sequence[int] | None = None,
  ) -> tuple[DecodeState, ResultTokens]:
    """Samples in every active slot, or in those of the named ones.

    Returns:
      The state, and what was sampled: at least a token a slot, at most
      `decode_steps * (draft_tokens + 1)`.
    """
    k = self.drafts.choose()
    return self.burst(params, state, slots, steps=self.config.decode_steps, k=k)

  def free_resource(self, slot: int, state: DecodeState) -> DecodeState:
    """Stops whatever runs in the slot; its cache stays."""
    return self._stop(state, slot)

  def reusable(self, held: int, wanted: int) -> int:
    """Tokens of a slot's cache that a request can go on from.

    Layers with a window forget; drafts need the hidden state before the first
    new token, so one token is computed again.

    Args:
      held: tokens that the slot holds.
      wanted: the first of them that the request begins with.
    """
    if held == wanted:
      return wanted
    windows = [layer.window for s in self.model.stacks() for layer in s.layers]
    forgets = any(0 < w < self.max_length for w in windows)
    kept = wanted - 1 if self._k else wanted
    # Drafts that weren't accepted lie beyond what is held.
    if forgets and held + self._k - kept > self._appended:
      return 0
    return max(kept, 0)

  def extend(
    self,
    params: Any,
    state: DecodeState,
    rows: Mapping[int, tuple[int, Sequence[int]]],
  ) -> DecodeState:
    """Appends tokens to slots that don't sample.

    Args:
      params: from `place`.
      state: of all slots.
      rows: slot -> (tokens of the slot that stay, ids to append), at most
        `prefill_rows` slots and `prefill_chunk` ids each.
    """
    slots = state.length.shape[0]
    shape = self.prefill_shape(
      len(rows), max(len(ids) for _, ids in rows.values()), slots
    )
    ids = np.zeros(shape, np.int32)
    # Out of range: padding rows are dropped when written back.
    targets = np.full(shape[0], slots, np.int32)
    first, count = np.zeros((2, shape[0]), np.int32)
    for row, (slot, (stay, tokens)) in enumerate(rows.items()):
      targets[row], first[row], count[row] = slot, stay, len(tokens)
      ids[row, : len(tokens)] = tokens
    span = self.span(int((first + count).max()))
    with self._on_mesh():
      return self._extend(span, params[0], state, targets, first, ids, count)

  def prefill_shape(
    self, rows: int, tokens: int, slots: int
  ) -> tuple[int, int]:
    """One of few: a single row or many, short chunks or long ones."""
    wide = min(self.prefill_rows, slots)
    short = self.prefill_chunk
    if short >= 2 * _SHORT_CHUNK:
      short = max(_SHORT_CHUNK, short // 8)
    return (
      1 if rows == 1 else wide,
      short if tokens <= short else self.prefill_chunk,
    )

  def start(
    self, state: DecodeState, slot: int, how: Sampling, sampled: int = 0
  ) -> DecodeState:
    """Lets a slot sample from its last token on.

    Args:
      state: of all slots.
      slot: which.
      how: the request samples.
      sampled: tokens it has already; they count against `max_tokens`.
    """
    return self._start(
      state, slot, sampling.of_request(how, self.vocab_size, sampled), True
    )

  def clear(self, state: DecodeState, slot: int) -> DecodeState:
    """Empties a slot: what isn't a number in it would reach other tokens."""
    return self._clear(state, slot)

  def copy_prefix(
    self, state: DecodeState, source: int, target: int, length: int
  ) -> DecodeState:
    """Puts the first tokens' cache of a slot into another, which is idle."""
    return self._move_within(state, source, target, length)

  def burst(
    self,
    params: Any,
    state: DecodeState,
    slots: Sequence[int] | None,
    *,
    steps: int,
    k: int,
  ) -> tuple[DecodeState, ResultTokens]:
    """`generate` with so many steps and drafts."""
    count = state.length.shape[0]
    chosen = np.ones(count, bool)
    if slots is not None:
      chosen = np.zeros(count, bool)
      chosen[list(slots)] = True
    lengths = np.asarray(state.length)
    running = np.asarray(state.active) & chosen
    longest = int(lengths[running].max(initial=0)) + steps * (k + 1)
    began = time.perf_counter()
    with self._on_mesh():
      state, burst = self._generate(
        steps,
        k,
        self.span(longest),
        self.max_length,
        params[0],
        params[1],
        state,
        chosen,
      )
      burst, active, totals = jax.device_get(
        (burst, state.active, state.sampling.sampled)
      )
    program = (steps, k, self.span(longest))
    # A program's first call compiles it, which is no cost of drafts.
    if program in self._called and burst.steps and count == self.slots:
      seconds = (time.perf_counter() - began) / int(burst.steps)
      self.drafts.learn(k, burst.proposed, burst.accepted, seconds)
    self._called.add(program)
    return state, ResultTokens(
      tokens=burst.tokens,
      log_prob=burst.log_prob,
      sampled_logp=burst.sampled_logp,
      experts=burst.experts,
      lengths=burst.lengths,
      totals=totals,
      active=active,
      stopped=burst.stopped,
      finite=burst.finite,
    )

  def warm_up(self, params: Any) -> None:
    """Compiles every program, so that none is compiled later on."""
    warm_up(self, params)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """Shape of each leaf, by its path."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): tuple(x.shape)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _distinct(ids: Any, vocab_size: int) -> np.ndarray:
  """Sorted token ids. Raises ValueError for what isn't one."""
  found = np.asarray(ids)
  right = found.ndim == 1 and found.size and found.dtype.kind in "iu"
  if not right or found.min() < 0 or found.max() >= vocab_size:
    raise ValueError(
      f"draft_ids must be ids of the vocabulary, 0 to {vocab_size - 1}, and at"
      " least one"
    )
  return np.unique(found).astype(np.int32)
