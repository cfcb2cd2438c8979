"""A replica goes on whatever a version does, and keeps what was chosen."""

import asyncio
import contextlib
import threading
import types

import pytest

from arl_jax.serving.metrics import Metrics
from arl_jax.serving.replica import Replica, first_version
from arl_jax.serving.service import Load
from arl_jax.weights import MissingError, Version


class Published:
  """Versions by number; `fetch` waits for `go` and may raise."""

  def __init__(self):
    self.last, self.held, self.error = 1, version(1), None
    self.looks, self.go = 0, threading.Event()

  def newest(self):
    self.looks += 1
    return version(self.last)

  def fetch(self, number):
    self.go.wait()
    if self.error is not None:
      raise self.error
    self.held = version(number)
    return types.SimpleNamespace(version=self.held, params=number)

  def verify(self, params):
    assert params == self.held.number


class Taking:
  """A service that notes what it takes in."""

  engine = types.SimpleNamespace(place=lambda params: params)

  def __init__(self):
    self.taken = []

  def load(self):
    return Load(state="serving", version=1)

  async def update_weights(self, params, number, *, abandon, lineage):
    self.taken.append(number)


def version(number):
  return Version(number, "a", f"{number:032x}")


@contextlib.asynccontextmanager
async def following(published, service):
  replica = Replica(published, service, Metrics(service), poll_seconds=0.001)
  task = asyncio.create_task(replica.follow())
  yield replica
  assert not task.done()
  task.cancel()


async def until(true):
  async with asyncio.timeout(60):
    while not true():
      await asyncio.sleep(0.001)


def test_a_first_version_that_is_not_there_yet_is_looked_for_again():
  published = Published()
  failures = [MissingError("no version 1"), OSError("no such host")]

  def fetch():
    if failures:
      raise failures.pop()
    return "fetched"

  published.fetch, published.newest = fetch, lambda: version(1)
  assert first_version(published, 60.0, 0.0) == "fetched"
  failures[:] = [OSError("gone")] * 1000
  with pytest.raises(TimeoutError, match="the last one failed: gone"):
    first_version(published, 0.01, 0.0001)
  # What no time mends.
  failures[:] = [ValueError("another model")]
  with pytest.raises(ValueError, match="another model"):
    first_version(published, 60.0, 0.0)


def test_a_chosen_version_stays():
  async def run():
    published, service = Published(), Taking()
    async with following(published, service) as replica:
      await until(lambda: published.looks > 1)
      choosing = asyncio.create_task(replica.load(5))
      await asyncio.sleep(0.05)
      published.last = 9  # While 5 is on its way.
      await asyncio.sleep(0.05)
      published.go.set()
      await choosing
      await asyncio.sleep(0.05)
      assert (service.taken, replica.serving) == ([5], version(5))
      await replica.load(None)
      assert service.taken == [5, 9]

  asyncio.run(run())


def test_an_error_that_nobody_expects():
  async def run():
    published, service = Published(), Taking()
    published.go.set()
    published.error = MemoryError("no room for the arrays")
    async with following(published, service):
      published.last = 2
      looks = published.looks
      await until(lambda: published.looks > looks + 3)
      published.error = None
      await until(lambda: service.taken == [2])

  asyncio.run(run())
