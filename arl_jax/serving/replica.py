"""Keeps a service at the newest published weights."""

from __future__ import annotations

import asyncio
import time

from absl import logging

from arl_jax.serving.metrics import Metrics
from arl_jax.serving.service import Service
from arl_jax.serving.stream import Unavailable
from arl_jax.weights import Fetched, MissingError, Subscriber, Version


class Replica:
  """Takes published versions in, in the background.

  Whatever goes wrong on the way leaves the old version serving.

  Attributes:
    serving: the version that the service has, None before the first. That one
      is fetched by whoever makes the service's scheduler (`first_version`).
  """

  def __init__(
    self,
    subscriber: Subscriber,
    service: Service,
    metrics: Metrics,
    *,
    poll_seconds: float,
  ):
    self._subscriber, self._service = subscriber, service
    self._metrics, self._poll_seconds = metrics, poll_seconds
    # A version that was asked for by number; no newer one is taken then.
    self._chosen: int | None = None
    self._one_at_a_time = asyncio.Lock()
    self.serving: Version | None = None

  async def follow(self) -> None:
    """Runs until it is cancelled."""
    while True:
      await asyncio.sleep(self._poll_seconds)
      if self._chosen is not None or self._service.load().state == "starting":
        continue
      try:
        async with self._one_at_a_time:
          # One may have been chosen meanwhile.
          if self._chosen is None:
            await self._take_newest()
      # Also memory that runs out, and whatever a runtime raises.
      except Exception as error:
        self._metrics.syncs.labels("failed").inc()
        logging.warning("no new weights: %s", error)

  async def load(self, number: int | None) -> Version:
    """Serves a version, and follows no other.

    Args:
      number: of it; None takes the newest and follows again.

    Raises:
      ValueError: it isn't there (any more), or is damaged.
      OSError: it can't be read.
      Unavailable: the service isn't running.
    """
    async with self._one_at_a_time:
      if number is None:
        await self._take_newest()
      else:
        await self._take(number)
      self._chosen = number
    if self.serving is None:
      raise MissingError("no version is published yet")
    return self.serving

  def _check_started(self) -> None:
    if self._service.load().state == "starting":
      raise Unavailable("the server is starting; try again in a while")
    if self.serving is None:
      self.serving = self._subscriber.held

  async def _take_newest(self) -> None:
    self._check_started()
    newest = await asyncio.to_thread(self._subscriber.newest)
    if newest is not None and newest != self.serving:
      await self._take(newest.number)

  async def _take(self, number: int) -> None:
    self._check_started()
    began = time.monotonic()
    fetched = await asyncio.to_thread(self._subscriber.fetch, number)
    old, new = self.serving, fetched.version
    if new == old:
      return
    # What is on the devices, bit for bit what was published.
    await asyncio.to_thread(self._subscriber.verify, fetched.params)
    placed = await asyncio.to_thread(self._service.engine.place, fetched.params)
    # Numbers of two lineages, or one that went back, say nothing of caches.
    follows = old is not None and old.lineage == new.lineage
    abandon = not follows or (old is not None and new.number < old.number)
    await self._service.update_weights(
      placed, new.number, abandon=abandon, lineage=new.lineage
    )
    self.serving = new
    self._metrics.syncs.labels("taken").inc()
    self._metrics.sync_seconds.observe(time.monotonic() - began)
    logging.info("serving version %s", new)


def first_version(
  subscriber: Subscriber, seconds: float, poll_seconds: float
) -> Fetched:
  """Waits for a first version that can be had.

  What isn't there yet wherever it is read, or no longer, is looked for again.

  Args:
    subscriber: where from.
    seconds: to wait at most.
    poll_seconds: between two looks.

  Raises:
    TimeoutError: there was none.
    ValueError: it is damaged, or of another model.
  """
  limit, failed = time.monotonic() + seconds, ""
  while True:
    try:
      if subscriber.newest() is not None:
        return subscriber.fetch()
    except (MissingError, OSError) as error:
      failed = f"; the last one failed: {error}"
      logging.log_every_n_seconds(
        logging.WARNING, "weights can't be taken yet: %s", 10, error
      )
    logging.log_every_n_seconds(
      logging.INFO,
      "waiting up to %s s for weights to be published",
      30,
      seconds,
    )
    if time.monotonic() > limit:
      raise TimeoutError(
        f"no weights were published within {seconds} s{failed}"
      )
    time.sleep(poll_seconds)
