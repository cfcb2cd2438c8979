"""The engine and the weights of a replica that spans several hosts.

Its first host has these in place of `SlotEngine` and `Subscriber`: what it is
asked to do it announces, and then does it as the others do.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from arl_jax.model.config import ModelConfig
from arl_jax.rollout import calls
from arl_jax.rollout.decode_state import DecodeState
from arl_jax.rollout.engine_config import EngineConfig
from arl_jax.rollout.request import Sampling
from arl_jax.rollout.results import ResultTokens
from arl_jax.rollout.slot_engine import SlotEngine, Weights
from arl_jax.serving.followers import Followers
from arl_jax.weights import Fetched, MissingError, Subscriber


class SharedWeights:
  """Weights of which each host of the replica has its part.

  The other hosts keep theirs until this object is gone.

  Attributes:
    number: that announcements call them by.
    params: this host's part, as fetched.
    placed: the same as the engine computes with it, None before `place`.
  """

  def __init__(self, number: int, followers: Followers):
    self.number = number
    self.params: Any = None
    self.placed: Weights | None = None
    # At the end of the process the others are told so.
    weakref.finalize(self, followers.unneeded, number).atexit = False


class LedEngine(SlotEngine):
  """A `SlotEngine` whose calls the replica's other hosts make, too.

  There is one decode state, that of `init_decode_state`. Whatever fails in a
  call ends the replica: what the others came to isn't known.
  """

  def __init__(
    self,
    model: ModelConfig,
    config: EngineConfig,
    followers: Followers,
    **given: Any,
  ):
    """See `SlotEngine`, which takes what is `given`."""
    super().__init__(model, config, **given)
    self._followers = followers

  def place(self, params: Any) -> Any:
    """See `SlotEngine`; takes what `LedSubscriber` has fetched."""
    params.placed = super().place(params.params)
    params.params = None
    return params

  def check_placed(self, weights: Any) -> None:
    placed = isinstance(weights, SharedWeights) and weights.placed is not None
    if not placed:
      raise ValueError(
        f"weights are {type(weights).__name__}, not what LedEngine.place gives"
      )

  def init_decode_state(self) -> DecodeState:
    with self._announced(calls.Renew()):
      return super().init_decode_state()

  def extend(
    self,
    params: Any,
    state: DecodeState,
    rows: Mapping[int, tuple[int, Sequence[int]]],
  ) -> DecodeState:
    with self._announced(calls.Extend(params.number, rows)):
      return super().extend(params.placed, state, rows)

  def copy_prefix(
    self, state: DecodeState, source: int, target: int, length: int
  ) -> DecodeState:
    with self._announced(calls.CopyPrefix(source, target, length)):
      return super().copy_prefix(state, source, target, length)

  def clear(self, state: DecodeState, slot: int) -> DecodeState:
    with self._announced(calls.Clear(slot)):
      return super().clear(state, slot)

  def start(
    self, state: DecodeState, slot: int, how: Sampling, sampled: int = 0
  ) -> DecodeState:
    with self._announced(calls.Start(slot, sampled, how)):
      return super().start(state, slot, how, sampled)

  def free_resource(self, slot: int, state: DecodeState) -> DecodeState:
    with self._announced(calls.Stop(slot)):
      return super().free_resource(slot, state)

  def burst(
    self,
    params: Any,
    state: DecodeState,
    slots: Sequence[int] | None,
    *,
    steps: int,
    k: int,
  ) -> tuple[DecodeState, ResultTokens]:
    named = list(range(self.slots) if slots is None else slots)
    # How many drafts pay is measured here; elsewhere clocks say other things.
    with self._announced(calls.Generate(params.number, steps, k, named)):
      return super().burst(params.placed, state, named, steps=steps, k=k)

  @contextlib.contextmanager
  def _announced(self, call: calls.Call) -> Iterator[None]:
    try:
      self._followers.announce(call)
      yield
    except BaseException as error:
      logging.exception("%s failed", type(call).__name__)
      self._followers.give_up(f"{type(call).__name__} failed here: {error}")
      raise


class LedSubscriber(Subscriber):
  """A `Subscriber` that has the replica's other hosts fetch the same.

  What it fetches counts once all of them have it, verified and placed; if one
  can't, all go on with what they have.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    like: Any,
    followers: Followers,
    *,
    patience: float,
  ):
    """Reads nothing yet.

    Args:
      folder: as `Subscriber`, as seen by every host.
      like: likewise.
      followers: the other hosts.
      patience: seconds that they may take after this one.
    """
    super().__init__(folder, like)
    self._followers, self._patience = followers, patience

  def fetch(self, number: int | None = None) -> Fetched:
    """See `Subscriber`; params are `SharedWeights`.

    Raises:
      OSError: another host can't have that version.
    """
    if number is None:
      newest = self.newest()
      if newest is None:
        raise MissingError("no version is published yet")
      number = newest.number
    shared = SharedWeights(self._followers.fetch(number), self._followers)
    fetched = super().fetch(number)
    shared.params = fetched.params
    answers = self._followers.await_taken(shared.number, self._patience)
    for host, answer in answers.items():
      if isinstance(answer, calls.Refused):
        raise OSError(f"host {host} can't take version {number}: {answer.why}")
      theirs = (answer.version, answer.lineage, answer.checksum)
      if theirs != tuple(fetched.version):
        raise OSError(
          f"host {host} found version {answer.version} of lineage"
          f" {answer.lineage} where this one found {fetched.version}"
        )
    return fetched._replace(params=shared)

  def verify(self, params: Any) -> None:
    super().verify(params.params)
