"""Signs of life that a process sends to the run's queue. Imports no jax."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import httpx
from absl import logging

from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.roster import ROLES
from arl_jax.serving.config import read_token

# For a beat's answer; the next one comes anyway.
_ANSWER_SECONDS = 5.0


class Heartbeat:
  """Tells the queue every few seconds that this process is alive.

  A context manager: a thread sends beats as long as it is entered, one at once
  and one at the end, so that the last counters arrive. A queue that is away for
  a while is no failure; one that refuses beats is, and `progress` raises it.
  """

  def __init__(self, cluster: ClusterConfig, role: str, index: int):
    """Sends nothing yet.

    Args:
      cluster: whose queue is told.
      role: one of `ROLES`.
      index: of this process in its role, from 0.

    Raises:
      ValueError: there is no such role, no address of the queue, or the token
        file can't be used.
      OSError: the token can't be read.
    """
    if role not in ROLES:
      raise ValueError(f"role is {role!r}, none of {list(ROLES)}")
    if not cluster.queue:
      raise ValueError("cluster.queue is empty; it must be the queue's address")
    token = read_token(cluster.token_file)
    self._http = httpx.Client(
      base_url=cluster.queue.rstrip("/"),
      headers={"authorization": f"Bearer {token}"} if token else {},
      timeout=_ANSWER_SECONDS,
      # Processes of a run find each other directly.
      trust_env=False,
    )
    self._seconds = cluster.beat_seconds
    self._who = {"role": role, "index": index, "pid": os.getpid()}
    self._lock = threading.Lock()
    self._counters: dict[str, float] = {}
    self._began = self._progress = time.monotonic()
    self._away = False
    self._failure: Exception | None = None
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="heartbeat", daemon=True
    )

  def __enter__(self) -> Heartbeat:
    self._thread.start()
    return self

  def __exit__(self, *_: Any) -> None:
    self._stop.set()
    self._thread.join(2 * _ANSWER_SECONDS)

  def progress(self) -> None:
    """Says that this process got on with its work.

    Raises:
      ConnectionError: beats can't be sent, for a reason that doesn't pass.
    """
    if self._failure is not None:
      raise ConnectionError(
        f"signs of life of {self._who['role']} {self._who['index']} can't be"
        f" sent: {self._failure}"
      ) from self._failure
    self._progress = time.monotonic()

  def count(self, name: str, amount: float = 1.0) -> None:
    """Adds to a counter of this process; "seconds" is its age already."""
    with self._lock:
      self._counters[name] = self._counters.get(name, 0.0) + amount

  def _run(self) -> None:
    try:
      with self._http:
        while not self._stop.is_set():
          self._send()
          self._stop.wait(self._seconds)
        self._send()
    except Exception as error:
      logging.exception("no more signs of life are sent")
      self._failure = error

  def _send(self) -> None:
    with self._lock:
      counters = dict(self._counters)
    now = time.monotonic()
    # What the others can be divided by.
    counters["seconds"] = now - self._began
    idle = now - self._progress
    beat = {**self._who, "idle_seconds": idle, "counters": counters}
    try:
      answer = self._http.post("/beat", json=beat)
    except httpx.TransportError as error:
      self._say_away(f"{type(error).__name__}: {error}")
      return
    if answer.status_code >= 500 or answer.status_code == 429:
      self._say_away(f"status {answer.status_code}")
    elif not answer.is_success:
      raise RuntimeError(
        f"{answer.url}: {answer.status_code}, {answer.text[:200]}"
      )
    else:
      self._away = False

  def _say_away(self, reason: str) -> None:
    if not self._away:
      logging.warning("the queue takes no signs of life: %s", reason)
    self._away = True
