"""A host of a replica other than its first: it does as it is told."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from absl import logging

from arl_jax.rollout import calls
from arl_jax.rollout.slot_engine import SlotEngine, Weights
from arl_jax.serving import host_link
from arl_jax.weights import Subscriber

# Calls that are read ahead; the first host waits for results anyway.
_MOST_AHEAD = 64
_IDLE_SECONDS = 0.5


class Follower:
  """Makes the calls that the first host announces, in their order.

  Weights are fetched beside that: decoding goes on meanwhile, here as there.

  Attributes:
    busy: whether a version is being fetched, which may take any time.
  """

  def __init__(
    self,
    engine: SlotEngine,
    subscriber: Subscriber,
    link: socket.socket,
    *,
    on_lost: Callable[[str], None],
    on_idle: Callable[[float], None] = lambda seconds: None,
    on_call: Callable[[], None] = lambda: None,
  ):
    """Does nothing yet.

    Args:
      engine: on the mesh of all hosts.
      subscriber: of the same folder and parameters as the first host's.
      link: to the first host.
      on_lost: called on any thread once that is gone; this host may wait in a
        call for ever then, and it should end the process.
      on_idle: called with seconds in which nothing was to be done, at least
        once in as many.
      on_call: called after each call.
    """
    self._engine, self._subscriber, self._link = engine, subscriber, link
    self._on_lost, self._on_idle, self._on_call = on_lost, on_idle, on_call
    self._calls: queue.Queue[calls.Call] = queue.Queue(_MOST_AHEAD)
    self._weights: dict[int, Weights] = {}
    self._fetches: dict[int, Future[None]] = {}
    # One thread, so that nothing is dropped before it has come.
    self._fetching = ThreadPoolExecutor(1, "weights")
    self.busy = False
    self._state: Any = None

  def run(self) -> None:
    """Until the first host says that this is the end.

    Raises:
      ValueError: it asks for what can't be.
    """
    threading.Thread(
      target=self._listen, name="first-host", daemon=True
    ).start()
    try:
      while True:
        try:
          call = self._calls.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
          self._on_idle(_IDLE_SECONDS)
          continue
        if isinstance(call, calls.End):
          return
        self._obey(call)
        self._on_call()
    finally:
      # Whoever waits for this host can't wait for a folder, too.
      self._fetching.shutdown(wait=False, cancel_futures=True)
      self._link.close()

  def _listen(self) -> None:
    try:
      while True:
        message = host_link.receive(self._link)
        if isinstance(message, calls.Answer):
          raise ValueError(f"a {type(message).__name__} is no call")
        self._calls.put(message)
        if isinstance(message, calls.End):
          return
    except (OSError, ValueError) as error:
      self._on_lost(f"the replica's first host is gone: {error}")

  def _obey(self, call: calls.Call) -> None:
    engine = self._engine
    if isinstance(call, calls.Fetch):
      self._fetches[call.weights] = self._fetching.submit(self._fetch, call)
    elif isinstance(call, calls.Drop):
      fetch = self._fetches.pop(call.weights, None)
      # One that didn't begin leaves nothing, and isn't worth the time.
      if fetch is None or not fetch.cancel():
        self._fetching.submit(self._weights.pop, call.weights, None)
    elif isinstance(call, calls.Renew):
      # Two states may not fit.
      self._state = None
      self._state = engine.init_decode_state()
    elif isinstance(call, calls.Extend):
      self._check(*call.rows)
      weights = self._weights_of(call.weights)
      self._state = engine.extend(weights, self._take(), call.rows)
    elif isinstance(call, calls.CopyPrefix):
      self._check(call.source, call.target)
      self._state = engine.copy_prefix(
        self._take(), call.source, call.target, call.length
      )
    elif isinstance(call, calls.Clear):
      self._check(call.slot)
      self._state = engine.clear(self._take(), call.slot)
    elif isinstance(call, calls.Start):
      self._check(call.slot)
      self._state = engine.start(
        self._take(), call.slot, call.how, call.sampled
      )
    elif isinstance(call, calls.Stop):
      self._check(call.slot)
      self._state = engine.free_resource(call.slot, self._take())
    elif isinstance(call, calls.Generate):
      self._check(*call.slots)
      weights = self._weights_of(call.weights)
      # What was sampled is the first host's business.
      self._state, _ = engine.burst(
        weights, self._take(), call.slots, steps=call.steps, k=call.drafts
      )

  def _take(self) -> Any:
    """The state, for a call that gives it back."""
    state, self._state = self._state, None
    if state is None:
      raise ValueError("a call came before there are slots")
    return state

  def _check(self, *slots: int) -> None:
    for slot in slots:
      if slot >= self._engine.slots:
        raise ValueError(
          f"slot {slot} was named; this host has {self._engine.slots}"
        )

  def _weights_of(self, number: int) -> Weights:
    if number not in self._weights:
      raise ValueError(f"this host has no weights {number}")
    return self._weights[number]

  def _fetch(self, call: calls.Fetch) -> None:
    answer: calls.Answer
    self.busy = True
    try:
      fetched = self._subscriber.fetch(call.version)
      self._subscriber.verify(fetched.params)
      self._weights[call.weights] = self._engine.place(fetched.params)
      answer = calls.Taken(call.weights, *fetched.version)
    # Also memory that runs out, and whatever a runtime raises.
    except Exception as error:
      logging.warning("version %d can't be taken: %s", call.version, error)
      answer = calls.Refused(call.weights, f"{type(error).__name__}: {error}")
    finally:
      self.busy = False
    try:
      self._link.sendall(host_link.frame(answer))
    except OSError as error:
      logging.warning("the first host can't be told: %s", error)
