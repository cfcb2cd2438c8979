"""Signs of life: what arrives, how old it is, and queues that are away."""

import time

import httpx
import pytest

from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.heartbeat import Heartbeat
from arl_jax.cluster.roster import Beat, Roster
from arl_jax.queueing.client import LearnerQueue
from tests.queueing.queue_serving import PATIENCE, config_of, serving

BEAT = Beat(role="actor", index=1, pid=7, idle_seconds=0.5, counters={"x": 2.0})


def until(true):
  limit = time.monotonic() + PATIENCE
  while not (found := true()):
    assert time.monotonic() < limit, "waited for too long"
    time.sleep(0.02)
  return found


def test_a_roster_keeps_the_latest_beat_of_each():
  now = [10.0]
  roster = Roster(clock=lambda: now[0])
  assert roster.roles() == []
  roster.beat(BEAT)
  now[0] = 12.0
  roster.beat(Beat(role="actor", index=0, pid=8, idle_seconds=0, counters={}))
  now[0] = 15.0
  first = {
    "role": "actor",
    "index": 0,
    "pid": 8,
    "age": 3.0,
    "idle_seconds": 0,
    "counters": {},
  }
  second = {
    "role": "actor",
    "index": 1,
    "pid": 7,
    "age": 5.0,
    "idle_seconds": 0.5,
    "counters": {"x": 2.0},
  }
  assert roster.roles() == [first, second]
  # A new process of that index takes its place, with its own counters.
  roster.beat(
    Beat(role="actor", index=1, pid=9, idle_seconds=0.0, counters={"x": 1.0})
  )
  assert roster.roles()[1]["counters"] == {"x": 1.0}
  assert roster.roles()[1]["pid"] == 9


def test_a_roster_is_bounded():
  roster = Roster()
  for index in range(4096):
    roster.beat(
      Beat(role="actor", index=index, pid=1, idle_seconds=0.0, counters={})
    )
  known = Beat(role="actor", index=7, pid=2, idle_seconds=0.0, counters={})
  roster.beat(known)
  more = Beat(role="actor", index=4096, pid=1, idle_seconds=0.0, counters={})
  with pytest.raises(ValueError, match="actor 4096 is one process more"):
    roster.beat(more)
  assert len(roster.roles()) == 4096


def test_beats_arrive_with_progress_and_counters():
  with (
    serving(beat_seconds=0.1) as config,
    LearnerQueue(config.cluster) as learner,
  ):

    def actor():
      return next((r for r in learner.roles() if r["role"] == "actor"), None)

    with Heartbeat(config.cluster, "actor", 3) as heartbeat:
      found = until(actor)
      assert found["index"] == 3
      heartbeat.count("tokens", 5)
      heartbeat.count("tokens")
      until(lambda: actor()["counters"].get("tokens") == 6.0)
      # It beats on while nothing gets done, and says so.
      stuck = until(lambda: (r := actor())["idle_seconds"] > 0.6 and r)
      assert stuck["age"] < 0.6
      heartbeat.progress()
      until(lambda: actor()["idle_seconds"] < 0.5)
      heartbeat.count("tokens")
    # What was counted last has arrived, and then nothing more does.
    assert actor()["counters"]["tokens"] == 7.0
    until(lambda: actor()["age"] > 0.5)
    # The queue is alive itself.
    (queue,) = [r for r in learner.roles() if r["role"] == "queue"]
    assert queue["age"] < 0.5


def test_a_queue_may_be_away_for_a_while():
  config = config_of(beat_seconds=0.05)
  with Heartbeat(config.cluster, "server", 0) as heartbeat:
    for _ in range(2):
      time.sleep(0.2)
      heartbeat.progress()
      with serving(config), LearnerQueue(config.cluster) as learner:
        until(lambda q=learner: any(r["role"] == "server" for r in q.roles()))
  heartbeat.progress()


def test_a_queue_that_refuses_beats_is_a_failure(tmp_path):
  (tmp_path / "token").write_text("right")
  (tmp_path / "other").write_text("wrong")
  with serving(token_file=str(tmp_path / "token")) as config:
    cluster = ClusterConfig(
      queue=config.cluster.queue, token_file=str(tmp_path / "other")
    )
    with Heartbeat(cluster, "actor", 2) as heartbeat:
      with pytest.raises(ConnectionError, match=r"actor 2 can't be sent.*401"):
        until(lambda: heartbeat.progress())
      # It isn't hidden by a later call.
      with pytest.raises(ConnectionError, match="can't be sent"):
        heartbeat.progress()


def test_whose_heart_it_is():
  with pytest.raises(ValueError, match="role is 'boss', none of"):
    Heartbeat(ClusterConfig(queue="http://127.0.0.1:1"), "boss", 0)
  with pytest.raises(ValueError, match=r"cluster\.queue is empty"):
    Heartbeat(ClusterConfig(), "actor", 0)


def test_beats_that_are_not_json_are_refused():
  with serving() as config:
    url = config.cluster.queue + "/beat"
    assert httpx.post(url, json=[1]).status_code == 400
    assert httpx.post(url, content=b"{}").status_code == 415
    assert httpx.get(url).status_code == 405
