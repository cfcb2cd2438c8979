"""Requests whose prompts are being computed, and who waits for whose."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from arl_jax.rollout.request import Request
from arl_jax.rollout.slots import Slot, Slots, common_prefix


class PrefillQueue:
  """Requests in order of their turn.

  A request whose prefix another one (its leader) is about to compute waits for
  that, and copies it.
  """

  def __init__(self, engine: Any, slots: Slots):
    self._engine, self._slots = engine, slots
    self._requests: deque[Request] = deque()

  def __iter__(self) -> Iterator[Request]:
    return iter(tuple(self._requests))

  def __len__(self) -> int:
    return len(self._requests)

  def add(self, request: Request) -> None:
    self._requests.append(request)

  def remove(self, request: Request) -> None:
    self._requests.remove(request)

  @property
  def ready(self) -> list[Request]:
    """Requests that a prefill call can take."""
    return [r for r in self._requests if r.placed and r.leader is None]

  def orphan(self, leader: Request) -> None:
    """Has those who wait for this request look for another prefix."""
    for follower in self._followers(leader):
      follower.restart()

  def place(self, request: Request) -> tuple[Slot, int] | None:
    """Finds the prefix that a request needn't compute.

    Returns:
      A slot and how many of its tokens to copy, None if the request goes on
      from its own slot or waits for a leader.
    """
    slot, version = self._slots[request.slot], request.version
    own = self._slots.usable(slot, request.context, version)
    source, copied = self._slots.longest(request.context, version)
    leader, wanted = self._leader(request)
    request.placed, request.cached, request.oldest = True, own, version
    slot.keep(own, version)
    least = min(self._calls(request, own), self._calls(request, copied))
    if self._calls(request, wanted) < least:
      request.leader, request.wanted = leader, wanted
    elif source is not None and least < self._calls(request, own):
      return source, copied
    return None

  def batch(self) -> list[Request]:
    """Requests whose turn it is, of one version; they go to the back."""
    ready = self.ready
    same = [r for r in ready if r.version == ready[0].version]
    batch = same[: self._engine.prefill_rows]
    for request in batch:
      self._requests.remove(request)
      self._requests.append(request)
    return batch

  def next_chunk(self, request: Request) -> list[int]:
    """Tokens to compute next."""
    end = request.cached + self._engine.prefill_chunk
    return request.context[request.cached : end]

  def served(self) -> list[tuple[Request, Slot, int]]:
    """Followers whose prefix is there: to copy from which slot, how much."""
    copies = []
    for request in self._requests:
      leader = request.leader
      if leader is not None and leader.cached >= request.wanted:
        request.leader = None
        source = self._slots[leader.slot]
        n = self._engine.reusable(source.written, request.wanted)
        copies.append((request, source, n))
    return copies

  def _followers(self, leader: Request) -> list[Request]:
    return [r for r in self._requests if r.leader is leader]

  def _leader(self, request: Request) -> tuple[Request | None, int]:
    """Who is about to compute the longest prefix of a request."""
    found, most = None, 0
    for other in self.ready:
      # A cache of several versions is of use to nobody else.
      pure = self._slots[other.slot].version == request.version
      if pure and other is not request:
        n = common_prefix(other.context, request.context[:-1])
        if n > max(most, other.cached):
          found, most = other, n
    return found, most

  def _calls(self, request: Request, cached: int) -> int:
    """Calls that its prefill takes: fewer tokens in as many are no gain."""
    left = len(request.context) - cached
    return -(-left // self._engine.prefill_chunk)
