"""The rollout engine: JetStream's Engine interface over the policy model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from arl_jax.rollout.decode_state import DecodeState
from arl_jax.rollout.engine_config import EngineConfig
from arl_jax.rollout.request import Sampling
from arl_jax.rollout.results import ResultTokens
from arl_jax.rollout.slot_engine import SlotEngine

__all__ = ["Engine", "EngineConfig", "ExistingPrefix", "Prefix"]


class Prefix(struct.PyTreeNode):
  """The cache of one prompt, from `Engine.prefill` (a state of one slot)."""

  state: DecodeState


@dataclasses.dataclass(frozen=True, slots=True)
class ExistingPrefix:
  """A cache to go on from, under JetStream's names.

  Attributes:
    cache: from `Engine.prefill`.
    common_prefix_tokens: its tokens that count.
  """

  cache: Prefix
  common_prefix_tokens: Sequence[int]


class Engine(SlotEngine):
  """`SlotEngine` with JetStream's methods, under its names.

  `load_params`, `init_decode_state`, `prefill`, `prefill_multisampling`,
  `insert`, `bulk_insert`, `generate`, `free_resource`: one prompt is computed
  apart and then put into a slot.
  """

  samples_per_slot = 1
  use_chunked_prefill = True
  colocated_cpus = None

  @property
  def max_concurrent_decodes(self) -> int:
    return self.slots

  @property
  def max_prefill_length(self) -> int:
    return self.max_length - 1

  @property
  def prefill_chunk_size(self) -> int:
    return self.prefill_chunk

  def get_tokenizer(self) -> Any:
    """What the constructor was given."""
    return self._tokenizer

  def build_tokenizer(self, metadata: Any = None) -> Any:
    """The same: a tokenizer is built by whoever makes the engine."""
    del metadata
    return self._tokenizer

  def get_prefix_destination_sharding(self) -> Any:
    """Where prefixes lie: with the slots; None without a mesh."""
    return self.mesh

  def load_params(self) -> Any:
    """Parameters as the engine computes with them (see `place`)."""
    if self._params is None:
      raise ValueError("the engine was made without params")
    return self.place(self._params)

  def prefill(
    self,
    *,
    params: Any,
    padded_tokens: Any,
    true_length: int,
    existing_prefix: ExistingPrefix | None = None,
    sampling: Sampling | None = None,
    **_: Any,
  ) -> tuple[Prefix, ResultTokens]:
    """Computes a prompt in chunks and samples its first token.

    Args:
      params: from `load_params` or `place`.
      padded_tokens: [n] int32, of which `true_length` count.
      true_length: tokens of the prompt.
      existing_prefix: goes on from its cache.
      sampling: how the request samples; by default at temperature 1 as long as
        there is room.

    Raises:
      ValueError: an empty prompt, or one that leaves no room for a token.
    """
    ids = self._prompt(padded_tokens, true_length)
    state, held = self._state_of(1), 0
    if existing_prefix is not None:
      common = self._prompt(existing_prefix.common_prefix_tokens)
      whole = int(existing_prefix.cache.state.length[0])
      if len(common) > whole:
        raise ValueError(
          f"common_prefix_tokens has {len(common)} tokens, the cache {whole}"
        )
      held = self.reusable(whole, len(common))
      state = self._move(state, existing_prefix.cache.state, 0, 0, held)
      ids = np.concatenate([common[held:], ids])
    if held + len(ids) >= self.max_length:
      raise ValueError(
        f"a prompt of {held + len(ids)} tokens leaves no room for another one:"
        f" a slot holds {self.max_length}"
      )
    for first in range(0, len(ids), self.prefill_chunk):
      part = ids[first : first + self.prefill_chunk].tolist()
      state = self.extend(params, state, {0: (held + first, part)})
    room = self.max_length - held - len(ids)
    state = self.start(state, 0, sampling or Sampling(max_tokens=room))
    state, result = self.burst(params, state, [0], steps=1, k=0)
    return Prefix(state=state), result

  def _prompt(self, tokens: Any, length: int | None = None) -> np.ndarray:
    """[n] int32, checked."""
    ids = np.asarray(tokens).reshape(-1)
    length = len(ids) if length is None else length
    if not 1 <= length <= len(ids):
      raise ValueError(
        f"true_length is {length}, not in 1..{len(ids)}, the tokens given"
      )
    ids = ids[:length].astype(np.int32)
    if ids.min() < 0 or ids.max() >= self.vocab_size:
      raise ValueError(
        f"tokens are {ids.min()} to {ids.max()}; the model knows 0 to"
        f" {self.vocab_size - 1}"
      )
    return ids

  def prefill_multisampling(
    self, *, num_samples: int, sampling: Sampling | None = None, **given: Any
  ) -> list[tuple[Prefix, ResultTokens]]:
    """`prefill` for each of several samples, with consecutive seeds."""
    how = sampling or Sampling(max_tokens=self.max_length)
    return [
      self.prefill(
        sampling=dataclasses.replace(how, seed=(how.seed + i) % 2**31),
        **given,
      )
      for i in range(num_samples)
    ]

  def insert(
    self, prefix: Prefix, state: DecodeState, slot: int
  ) -> DecodeState:
    """Lets a slot go on from a prefix, which stays as it is."""
    if not 0 <= slot < state.length.shape[0]:
      raise ValueError(f"slot is {slot}, not in 0..{state.length.shape[0] - 1}")
    one = prefix.state
    state = self._move(state, one, 0, slot, one.length[0])
    # Its first token may have been its last.
    return self._start(state, slot, one.sampling, one.active[0])

  def bulk_insert(
    self, prefix: Prefix, state: DecodeState, slots: Sequence[int]
  ) -> DecodeState:
    """`insert` into each of the slots."""
    for slot in slots:
      state = self.insert(prefix, state, slot)
    return state
