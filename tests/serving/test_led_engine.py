"""Two engines in step: what one is asked to do, the other does as well."""

import dataclasses
import functools
import socket
import threading
import time

import jax
import numpy as np
import pytest

from arl_jax.model import specs
from arl_jax.rollout import calls
from arl_jax.rollout.request import Sampling
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.rollout.slot_engine import SlotEngine
from arl_jax.serving.follower import Follower
from arl_jax.serving.followers import Followers
from arl_jax.serving.led_engine import LedEngine, LedSubscriber
from arl_jax.sharding import shapes
from arl_jax.weights import Publisher, Subscriber
from tests.rollout import driver
from tests.rollout.driver import prompt

CONFIG = dataclasses.replace(
  driver.CONFIG,
  layers=1,
  windows=(0,),
  experts=0,
  dense_width=16,
  mtp_heads=0,
)


def policy(scale=1.0):
  return jax.tree.map(lambda x: scale * x, driver.policy(config=CONFIG))


def like():
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    shapes(specs(CONFIG)),
  )


@pytest.fixture(scope="module")
def engines():
  """The first host's, without anybody to lead yet, and another one's."""
  made = functools.partial(LedEngine, followers=None)
  return (
    driver.engine_of(CONFIG, make=made),
    driver.engine_of(CONFIG, make=SlotEngine),
  )


class Replica:
  """Two hosts in one process, connected as in two.

  Attributes:
    lost: what either said when it had lost the other.
    failed: what ended the other host.
  """

  def __init__(self, engines, folder, other_folder=None):
    ours, theirs = socket.socketpair()
    self.lost, self.failed, self.idle = [], [], 0.0
    self.followers = Followers([ours], self.lost.append)
    self.engine, engine = engines
    self.engine._followers = self.followers
    self.subscriber = LedSubscriber(folder, like(), self.followers, patience=30)
    self.follower = Follower(
      engine,
      Subscriber(other_folder or folder, like()),
      theirs,
      on_lost=self.lost.append,
      on_idle=self._wait,
    )
    self.thread = threading.Thread(target=self._follow, daemon=True)
    self.thread.start()

  def _wait(self, seconds):
    self.idle += seconds

  def _follow(self):
    try:
      self.follower.run()
    except Exception as error:
      self.failed.append(error)

  def scheduler(self):
    fetched = self.subscriber.fetch()
    self.subscriber.verify(fetched.params)
    placed = self.engine.place(fetched.params)
    return Scheduler(self.engine, placed, fetched.version.number)

  def end(self):
    self.followers.end()
    self.thread.join(30)
    assert not self.thread.is_alive()


@pytest.fixture
def published(tmp_path):
  """A folder with version 1, and what publishes more there."""
  publisher = Publisher(tmp_path / "weights", ("run",), dtype="float32")
  publisher.publish(policy(), 1)
  publisher.wait()
  yield tmp_path / "weights", publisher
  publisher.close()


def submit(scheduler, session, ids, **how):
  how = {"max_tokens": 12, "seed": 1, **how}
  return scheduler.submit(session, ids, Sampling(**how))


def run(scheduler, weights):
  """Sharing, turns, a cancelled request and new weights; what was sampled."""
  # Both begin with 20 tokens, which the second copies.
  ids = prompt(20)
  requests = [
    submit(scheduler, "a", [*ids, 3], seed=5, stop_ids=(7,)),
    submit(scheduler, "b", [*ids, 4, 5], seed=6, temperature=0.7),
    submit(scheduler, "c", prompt(9, seed=2), seed=7),
  ]
  for _ in range(3):
    scheduler.step()
  gone = submit(scheduler, "d", prompt(4, seed=3))
  scheduler.step()
  scheduler.cancel(gone)
  scheduler.step()
  scheduler.update_weights(weights, 2)
  while scheduler.busy:
    scheduler.step()
  turn = [*requests[2].context, 1, 2]
  requests.append(submit(scheduler, "c", turn, seed=8, max_tokens=6))
  while scheduler.busy:
    scheduler.step()
  return [
    (r.result.ids.tolist(), r.result.versions.tolist(), r.result.logp)
    for r in requests
  ]


@pytest.mark.slow
def test_both_come_to_the_same_and_to_what_one_alone_does(engines, published):
  folder, publisher = published
  replica = Replica(engines, folder)
  scheduler = replica.scheduler()
  newer = policy(0.9)
  publisher.publish(newer, 2)
  publisher.wait()
  weights = replica.engine.place(replica.subscriber.fetch(2).params)
  found = run(scheduler, weights)
  assert {v for _, versions, _ in found for v in versions} == {1, 2}
  replica.end()
  assert replica.lost == replica.failed == []
  # The first version's weights went with their last use.
  assert list(replica.follower._weights) == [2]
  ours = jax.tree.leaves(scheduler._engine._state)
  theirs = jax.tree.leaves(replica.follower._state)
  assert len(ours) == len(theirs) > 10
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(a, b)

  alone = engines[1]
  expected = run(Scheduler(alone, alone.place(policy()), 1), alone.place(newer))
  for (ids, versions, logp), (ids2, versions2, logp2) in zip(
    found, expected, strict=True
  ):
    assert (ids, versions) == (ids2, versions2)
    np.testing.assert_array_equal(logp, logp2)


def test_weights_that_another_host_cannot_have_change_nothing(
  engines, published, tmp_path
):
  folder, publisher = published
  # Another run's, under the same number.
  other = Publisher(tmp_path / "other", ("other",), dtype="float32")
  other.publish(policy(0.8), 2)
  other.close()
  replica = Replica(engines, folder)
  scheduler = replica.scheduler()
  publisher.publish(policy(0.9), 2)
  publisher.wait()
  right = replica.follower._subscriber
  replica.follower._subscriber = Subscriber(tmp_path / "other", like())
  with pytest.raises(OSError, match="host 1 found version 2 of lineage"):
    replica.subscriber.fetch(2)
  replica.follower._subscriber = Subscriber(tmp_path / "nothing", like())
  with pytest.raises(OSError, match="host 1 can't take version 2: Missing"):
    replica.subscriber.fetch(2)
  # What it has goes on.
  request = submit(scheduler, "a", prompt(5))
  while scheduler.busy:
    scheduler.step()
  assert request.result.versions.tolist() == [1] * 12
  # And the next try succeeds.
  replica.follower._subscriber = right
  fetched = replica.subscriber.fetch(2)
  scheduler.update_weights(replica.engine.place(fetched.params), 2)
  request = submit(scheduler, "a", prompt(5))
  while scheduler.busy:
    scheduler.step()
  assert request.result.versions.tolist() == [2] * 12
  replica.end()
  assert replica.lost == replica.failed == []
  assert len(replica.follower._weights) == 1


def test_who_cannot_read_a_version_has_the_others_forget_it(engines, published):
  folder, _ = published
  replica = Replica(engines, folder)
  with pytest.raises(ValueError, match="holds no version 9"):
    replica.subscriber.fetch(9)
  replica.scheduler()
  replica.end()
  assert len(replica.follower._weights) == 1


def test_an_idle_host_waits(engines, published):
  replica = Replica(engines, published[0])
  limit = time.monotonic() + 10
  while replica.idle < 1.0:
    assert time.monotonic() < limit
    time.sleep(0.05)
  replica.end()
  assert replica.lost == replica.failed == []


def test_a_call_that_fails_ends_the_replica(engines, published):
  replica = Replica(engines, published[0])
  engine = replica.engine
  state = engine.init_decode_state()
  with pytest.raises(Exception, match="out of bounds"):
    engine.burst(weights_of(replica), state, [99], steps=1, k=0)
  (why, *_) = replica.lost
  assert why.startswith("Generate failed here: index 99")
  replica.thread.join(10)
  (error,) = replica.failed
  assert "slot 99 was named; this host has 4" in str(error)


def weights_of(replica):
  return replica.engine.place(replica.subscriber.fetch().params)


@pytest.mark.parametrize(
  ("call", "says"),
  [
    (calls.Clear(0), "before there are slots"),
    (calls.Extend(5, {0: (0, [1])}), "this host has no weights 5"),
    (calls.CopyPrefix(0, 4, 1), "slot 4 was named"),
  ],
)
def test_a_host_refuses_what_cannot_be(engines, published, call, says):
  replica = Replica(engines, published[0])
  replica.followers.announce(call)
  replica.thread.join(10)
  (error,) = replica.failed
  assert says in str(error)


def test_only_weights_of_all_hosts_are_taken(engines, published):
  with pytest.raises(ValueError, match="not what LedEngine"):
    engines[0].check_placed(policy())
