"""The other hosts of a replica, as its first one sees them. Imports no jax."""

from __future__ import annotations

import collections
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence

from arl_jax.rollout import calls
from arl_jax.serving import host_link

# That the others get to close their connections in.
_END_SECONDS = 2.0


class Followers:
  """Tells them what to do next, and hears which weights they could take.

  Calls reach all in one order, which is that of `announce`. Any thread may
  announce; those whose order matters come from one.
  """

  def __init__(
    self, links: Sequence[socket.socket], on_lost: Callable[[str], None]
  ):
    """Takes over connections to hosts 1, 2, ...

    Args:
      links: to them.
      on_lost: called once, on any thread, when one of them is gone or can't
        be kept in step. The replica can't go on then, and nobody can be
        waited for: it should end the process.
    """
    self._links, self._on_lost = tuple(links), on_lost
    # Orders the frames. Nothing that is called under it may let go of weights.
    self._sending = threading.Lock()
    self._numbers = itertools.count(1)
    # Weights to be dropped. What appends may run amid anything, as finalizers
    # do, so that it may take no lock.
    self._unneeded: collections.deque[int] = collections.deque()
    self._answers: dict[tuple[int, int], calls.Answer] = {}
    self._awaited: int | None = None
    self._changed = threading.Condition()
    self._lost = self._ended = self._stopping = False
    self._listening = [
      threading.Thread(
        target=self._listen, args=(host, link), name="follower", daemon=True
      )
      for host, link in enumerate(self._links, 1)
    ]
    for thread in self._listening:
      thread.start()

  def announce(self, call: calls.Call) -> None:
    """Has all do this after what was announced before.

    Raises:
      ValueError: it can't be sent.
      ConnectionError: the replica has lost a host.
    """
    try:
      with self._sending:
        while self._unneeded:
          self._send(calls.Drop(self._unneeded.popleft()))
        self._send(call)
    except OSError as error:
      self.give_up(f"a host can't be told what to do: {error}")
      raise ConnectionError(f"the replica has lost a host: {error}") from error

  def fetch(self, version: int) -> int:
    """Has all fetch a published version; one at a time. Returns its number."""
    number = next(self._numbers)
    with self._changed:
      self._awaited = number
      self._answers.clear()
    self.announce(calls.Fetch(number, version))
    return number

  def unneeded(self, weights: int) -> None:
    """Has all drop weights, before they next do anything else."""
    self._unneeded.append(weights)

  def await_taken(
    self, weights: int, seconds: float
  ) -> dict[int, calls.Answer]:
    """What each host says of the weights that were fetched last.

    Args:
      weights: their number.
      seconds: to wait at most.

    Raises:
      TimeoutError: names the hosts that said nothing.
      ConnectionError: the replica has lost a host, or stops.
    """
    hosts = range(1, len(self._links) + 1)
    limit = time.monotonic() + seconds
    with self._changed:
      while not (self._lost or self._stopping):
        found = {
          host: self._answers[host, weights]
          for host in hosts
          if (host, weights) in self._answers
        }
        if len(found) == len(hosts):
          return found
        left = limit - time.monotonic()
        if left <= 0:
          silent = [host for host in hosts if host not in found]
          raise TimeoutError(
            f"waited {seconds:.0f} s for hosts {silent} of the replica to take"
            " new weights"
          )
        self._changed.wait(left)
    raise ConnectionError(
      "the replica has lost a host" if self._lost else "the replica stops"
    )

  def stop_waiting(self) -> None:
    """Nobody needs new weights any more."""
    with self._changed:
      self._stopping = True
      self._changed.notify_all()

  def give_up(self, why: str) -> None:
    """The hosts can't be kept in step any more."""
    with self._changed:
      if self._lost or self._ended:
        return
      self._lost = True
      self._changed.notify_all()
    self._on_lost(why)

  def end(self) -> None:
    """Lets all others end, which closes the connections."""
    with self._changed:
      if self._ended:
        return
      self._ended = True
    for link in self._links:
      # It may have ended already.
      with contextlib.suppress(OSError), self._sending:
        link.sendall(host_link.frame(calls.End()))
        link.shutdown(socket.SHUT_WR)
    for thread in self._listening:
      thread.join(_END_SECONDS)

  def _send(self, call: calls.Call) -> None:
    frame = host_link.frame(call)
    for link in self._links:
      link.sendall(frame)

  def _listen(self, host: int, link: socket.socket) -> None:
    try:
      while True:
        answer = host_link.receive(link)
        if not isinstance(answer, calls.Taken | calls.Refused):
          raise ValueError(f"a {type(answer).__name__} is no answer")
        with self._changed:
          # An answer that came too late is of no use.
          if answer.weights == self._awaited:
            self._answers[host, answer.weights] = answer
            self._changed.notify_all()
    except (OSError, ValueError) as error:
      self.give_up(f"host {host} is gone: {error}")
    finally:
      link.close()
