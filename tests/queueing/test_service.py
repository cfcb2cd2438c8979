"""The queue over HTTP: what arrives, who is refused, and what a kill costs."""

import asyncio
import dataclasses
import json
import re
import signal
import threading
import time

import httpx
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax import records
from arl_jax.cluster.config import ClusterConfig
from arl_jax.queueing import messages
from arl_jax.queueing import service as queue_service
from arl_jax.queueing.client import ActorQueue, LearnerQueue, Superseded
from arl_jax.queueing.group_queue import GroupQueue, NotBegun
from arl_jax.queueing.service import address
from arl_jax.serving.body import Malformed
from tests.queueing.leased_groups import a_lease, group, start
from tests.queueing.queue_serving import (
  PATIENCE,
  config_of,
  program,
  serving,
)

LEASE = a_lease()


# Making one takes a while.
CLIENT = httpx.Client(timeout=PATIENCE, trust_env=False)


def post(config, path, body):
  return CLIENT.post(config.cluster.queue + path, json=body)


def packed(config, path, *lines):
  body = b"".join(messages.pack(line) for line in lines)
  return send(config, path, body)


def send(config, path, body):
  return CLIENT.post(
    config.cluster.queue + path,
    content=body,
    headers={"content-type": messages.LINES},
  )


def act(config, *, count, patience=None, **changes):
  """One actor that leases, and delivers groups with `changes`."""

  async def run():
    async with ActorQueue(config.cluster, 0, patience=patience) as queue:
      leases = await queue.lease(count)
      fates = [await queue.deliver(x, group(x, **changes)) for x in leases]
      return leases, fates

  return asyncio.run(run())


def json_of(groups):
  return [records.to_json(g) for g in groups]


def test_groups_arrive_as_they_were():
  with serving() as config, LearnerQueue(config.cluster) as learner:
    learner.begin(start())
    began = time.monotonic()
    assert learner.take(0, 0, timeout=0.3) is None
    assert 0.3 <= time.monotonic() - began < 5
    leases, fates = act(config, count=9)
    assert fates == ["ready"] * 4
    batch = learner.take(0, 0, timeout=5)
    assert json_of(batch.groups) == json_of(group(x) for x in leases[:2])
    assert batch.ledger["open"] == [
      [2, leases[2].task_id, 0, 1],
      [3, leases[3].task_id, 0, 1],
    ]
    assert (batch.ended, batch.waiting, dict(batch.drops)) == (False, 2, {})
    assert json_of(learner.waiting()) == json_of(group(x) for x in leases[2:])
    # The same step again, as if the answer had been lost.
    again = learner.take(0, 0, timeout=5)
    assert json_of(again.groups) == json_of(batch.groups)
    status = learner.status()
    assert (status["ready"], status["training"]) == (2, 2)
    # What it has may go on in another queue, or in this one once more.
    rest = learner.waiting()
    learner.begin(start(lineage="next", ledger=batch.ledger, groups=rest))
    assert json_of(learner.waiting()) == json_of(rest)
    with serving() as other, LearnerQueue(other.cluster) as second:
      second.begin(start(lineage="next", ledger=batch.ledger, groups=rest))
      assert json_of(second.take(1, 1, 5).groups) == json_of(rest)


def test_who_waits_is_told_at_once():
  with serving() as config, LearnerQueue(config.cluster) as learner:
    learner.begin(start(groups_per_step=1, max_staleness=0))
    leases, _ = act(config, count=1)

    async def run():
      # Nothing to lease until the learner is at the next version.
      async with ActorQueue(config.cluster, 1) as queue:
        began = time.monotonic()
        found = []
        while not found:
          found = await queue.lease(1)
        return found, time.monotonic() - began

    answers = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(run())))
    assert learner.take(0, 0, 5).groups[0].group_id == leases[0].group_id
    thread.start()
    time.sleep(0.7)
    waited = learner.take(1, 1, timeout=0)
    thread.join(PATIENCE)
    assert waited is None
    ((lease,), seconds) = answers[0]
    assert (lease.number, lease.version) == (1, 1)
    # Neither the end of the queue's patience (3 s) nor its next look.
    assert seconds < 2


def test_a_take_ends_when_the_last_group_comes():
  with serving() as config, LearnerQueue(config.cluster) as learner:
    learner.begin(start())
    thread = threading.Timer(0.5, act, [config], {"count": 2})
    thread.start()
    began = time.monotonic()
    batch = learner.take(0, 0, timeout=PATIENCE)
    thread.join()
    assert len(batch.groups) == 2
    assert time.monotonic() - began < 8


def test_actors_fates_leases_and_failures():
  with serving() as config, LearnerQueue(config.cluster) as learner:
    learner.begin(start(version=5))

    async def run():
      async with (
        ActorQueue(config.cluster, 0) as queue,
        ActorQueue(config.cluster, 0) as other,
      ):
        assert queue.name != other.name
        one, two = await queue.lease(2)
        assert await queue.renew([one, two]) == []
        # Another process of the same index holds nothing of it.
        assert await other.renew([one]) == [one]
        assert await queue.deliver(one, None) == "infrastructure"
        assert await queue.deliver(two, group(two, versions=3)) == "stale"
        again = await other.lease(2)
        assert [(x.number, x.attempt) for x in again] == [(0, 2), (1, 2)]
        await other.give_back(again)
        assert await queue.lease(2) == again
        with pytest.raises(ValueError, match=r"400, .*has 1 rollouts"):
          await queue.deliver(again[0], group(again[0], rewards=(1.0,)))

    asyncio.run(run())


def test_a_learner_that_was_superseded_is_told():
  with (
    serving() as config,
    LearnerQueue(config.cluster) as old,
    LearnerQueue(config.cluster) as new,
  ):
    with pytest.raises(NotBegun, match="hasn't begun"):
      old.take(0, 0, 1)
    old.begin(start())
    threading.Timer(0.3, new.begin, [start(lineage="second")]).start()
    with pytest.raises(Superseded, match=r"'second'.*'first' was superseded"):
      old.take(0, 0, timeout=PATIENCE)
    with pytest.raises(Superseded):
      old.waiting()
    assert new.take(0, 0, timeout=0) is None


def test_only_those_with_the_token(tmp_path):
  (tmp_path / "token").write_text("s3cret\n")
  (tmp_path / "other").write_text("guess")
  with serving(token_file=str(tmp_path / "token")) as config:
    with LearnerQueue(config.cluster) as learner:
      learner.begin(start())
    wrong = dataclasses.replace(
      config.cluster, token_file=str(tmp_path / "other")
    )
    with (
      LearnerQueue(wrong) as learner,
      pytest.raises(ValueError, match=r"401, the header .authorization"),
    ):
      learner.begin(start())
    for method, path in (
      *(("GET", p) for p in ("/status", "/roles")),
      *(("POST", p) for p in ("/begin", "/take", "/waiting", "/lease")),
      *(("POST", p) for p in ("/renew", "/give_back", "/deliver", "/beat")),
    ):
      answer = CLIENT.request(method, config.cluster.queue + path, json={})
      assert answer.status_code == 401, path


GOOD = {
  "/take": {"lineage": "first", "step": 0, "version": 0, "wait": 0},
  "/waiting": {"lineage": "first"},
  "/lease": {"actor": "a", "most": 1},
  "/renew": {"actor": "a", "leases": [dataclasses.asdict(LEASE)]},
  "/give_back": {"actor": "a", "leases": []},
  "/beat": {
    "role": "actor",
    "index": 0,
    "pid": 1,
    "idle_seconds": 0.0,
    "counters": {"episodes": 1},
  },
}


@pytest.mark.parametrize(
  ("path", "change", "reason"),
  [
    ("/take", {"step": -1}, "step: -1 isn't an integer in"),
    ("/take", {"step": True}, "step: True isn't an integer"),
    ("/take", {"wait": "1"}, "wait: "),
    ("/take", {"more": 1}, "more: no such field"),
    ("/take", {"version": None}, "version: is missing"),
    ("/waiting", {"lineage": 3}, "lineage: 3 isn't a text"),
    ("/lease", {"most": 0}, "most: 0 isn't"),
    ("/lease", {"most": 1 << 40}, "most: "),
    ("/lease", {"actor": "a" * 257}, "actor: "),
    ("/renew", {"leases": [3]}, "lease: it is a number, not an object"),
    ("/renew", {"leases": [{}]}, "lease.lineage: is missing"),
    ("/renew", {"leases": [{}] * 4097}, "leases: .* at most 4096"),
    (
      "/renew",
      {"leases": [{**dataclasses.asdict(LEASE), "number": 0.5}]},
      "number: 0.5 isn't",
    ),
    ("/give_back", {"leases": {}}, "leases: "),
    ("/beat", {"role": "boss"}, "role: 'boss' is none of"),
    ("/beat", {"index": 10000}, "index: "),
    ("/beat", {"counters": {"x": "1"}}, "counters: they must be"),
    ("/beat", {"counters": {"x": 10**400}}, "counters: they must be"),
    ("/beat", {"counters": {str(i): 0 for i in range(257)}}, "counters: "),
    ("/beat", {"idle_seconds": -1}, "idle_seconds: -1 isn't"),
  ],
)
def test_messages_that_cannot_be(queue, path, change, reason):
  answer = post(queue, path, {**GOOD[path], **change})
  assert answer.status_code == 400
  assert re.match(reason, answer.json()["error"]["message"])


@pytest.fixture(scope="module")
def queue():
  with serving() as config:
    with LearnerQueue(config.cluster) as learner:
      learner.begin(start())
    yield config


@pytest.mark.parametrize("path", GOOD)
def test_these_messages_can_be(queue, path):
  assert post(queue, path, GOOD[path]).is_success


def header(**changes):
  values = {"actor": "a", "lease": dataclasses.asdict(LEASE), "groups": 1}
  return json.dumps({**values, **changes}).encode()


def record(**changes):
  return {**records.to_json(group(LEASE)), **changes}


def line(value):
  return json.dumps(value).encode()


def with_episode(**changes):
  found = record()
  found["episodes"][0].update(changes)
  return found


@pytest.mark.parametrize(
  ("lines", "reason"),
  [
    ([], "the body isn't JSON"),
    ([b"[]"], "the body is a list"),
    ([header()], "groups: the header says 1, but there are 0"),
    ([header(groups=0), line(record())], "groups: .* 0, but there are more"),
    ([header(groups=2)], "groups: 2 isn't"),
    ([header(), line(record()), line(record())], "groups: .*more"),
    ([header(), b"{}"], "record has schema_version None"),
    (
      [header(), line(records.to_json(group(LEASE).task))],
      "kind: 'Task' isn't",
    ),
    ([header(), line(record(surplus=1))], "malformed Group record"),
    ([header(), line(record(group_id=7))], "Group.group_id: it is a number"),
    ([header(), line(with_episode(rollout_index=[0]))], "Episode.rollout_ind"),
    ([header(), line(with_episode(outcome=[]))], "Episode.outcome: it is a l"),
    (
      [header(), line(with_episode(reward={"total": True, "parts": {}}))],
      "Reward.total: it is a truth value",
    ),
    (
      [header(), line(with_episode(reward={"total": 1, "parts": {"a": ""}}))],
      "Reward.parts.a: it is a text",
    ),
    ([header(), b'{"a":' * 70 + b"1" + b"}" * 70], "the body is nested deeper"),
    ([header(), b'{"a":NaN}'], "the body isn't JSON: NaN"),
    ([header(), b'{"a":1,"a":2}'], "a: the name stands twice"),
    ([b"\xff"], "the body isn't UTF-8"),
  ],
)
def test_deliveries_that_cannot_be(queue, lines, reason):
  answer = packed(queue, "/deliver", *lines)
  assert answer.status_code == 400, answer.text
  assert re.match(reason, answer.json()["error"]["message"])


def test_bodies_that_are_no_frames(queue):
  whole = messages.pack(header()) + messages.pack(line(record()))
  for body, reason in (
    (b"{}", "isn't zstd"),
    (whole[:-5], "amid a line|isn't zstd|but there are 0"),
    (whole + b"more", "isn't zstd"),
    (zstandard.compress(header()), "amid a line"),
  ):
    answer = send(queue, "/deliver", body)
    assert answer.status_code == 400
    assert re.search(reason, answer.json()["error"]["message"]), body
  # A page in a browser can't send these.
  answer = CLIENT.post(
    queue.cluster.queue + "/deliver",
    content=whole,
    headers={"content-type": "text/plain"},
  )
  assert answer.status_code == 415


def test_a_small_body_holds_no_large_one():
  bomb = messages.pack(b"[" + b"[]," * (8 << 20) + b"[]]")
  with pytest.raises(Malformed, match="more than"):
    list(messages.unpack(bomb, messages.MAX_GROUP[1]))


def test_bombs_are_cut(monkeypatch):
  bomb = messages.pack(b" " * (8 << 20))
  assert len(bomb) < 2000
  with pytest.raises(Malformed, match="more than 1048576 bytes"):
    list(messages.unpack(bomb * 10, 1 << 20))
  # Frames that ask for more memory than ours do.
  wide = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters(window_log=27)
  ).compress(b"x" * (32 << 20))
  with pytest.raises(Malformed, match="isn't zstd"):
    list(messages.unpack(wide, 1 << 30))
  monkeypatch.setattr(messages, "MAX_PLAIN", 1000)
  with serving() as config:
    answer = post(config, "/lease", {"actor": "a" * 2000, "most": 1})
    assert answer.status_code == 413


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_deliveries_are_refused_or_still_groups(data):
  """Whatever bytes are changed; anything but ValueError would be a 500."""
  queue = GroupQueue(lease_seconds=10)
  queue.begin(start())
  (lease,) = queue.lease("a", 1)
  text = bytearray(line(records.to_json(group(lease))))
  for _ in range(data.draw(st.integers(1, 3))):
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.sampled_from(b'{}[]",:0919-.eE\\tnx \xc3'))
  head = json.dumps(
    {"actor": "a", "lease": dataclasses.asdict(lease), "groups": 1}
  )
  body = messages.pack(head.encode()) + messages.pack(bytes(text))
  try:
    actor, found, read, frame = messages.read_delivery(
      messages.unpack(body, 1 << 20)
    )
    fate = queue.deliver(actor, found, read)
  except ValueError:
    assert queue.waiting() == ()
    return
  # What was taken, the learner can read.
  (again,) = messages.unpack(frame, 1 << 20)
  assert records.to_json(messages.read_group(again)) == records.to_json(read)
  assert fate in ("ready", "stale", "foreign_version")


@given(st.lists(st.binary().map(lambda x: x.replace(b"\n", b"")), max_size=9))
def test_lines_are_unpacked_as_they_were_packed(lines):
  together = zstandard.compress(b"".join(x + b"\n" for x in lines))
  assert list(messages.unpack(together, 1 << 20)) == lines
  apart = b"".join(map(messages.pack, lines))
  assert list(messages.unpack(apart, 1 << 20)) == lines


def test_starts_arrive_as_they_were():
  given_start = start(
    skip_below=0.25, groups=(group(LEASE),), ledger={"source": {}, "open": []}
  )
  (source,) = given_start.sources
  levels = tuple(n % 3 for n in range(len(source.task_ids)))
  given_start = dataclasses.replace(
    given_start, sources=(dataclasses.replace(source, levels=levels),)
  )
  body = messages.pack_json(messages.start_to_json(given_start))
  body += messages.pack_group(given_start.groups[0])
  found, frames = messages.read_start(messages.unpack(body, 1 << 20))
  assert json_of(found.groups) == json_of(given_start.groups)
  assert dataclasses.replace(found, groups=()) == dataclasses.replace(
    given_start, groups=()
  )
  assert list(messages.unpack(frames[0], 1 << 20)) == [
    line(records.to_json(given_start.groups[0]))
    .replace(b", ", b",")
    .replace(b": ", b":")
  ]


def test_addresses_to_listen_on():
  def of(queue, host="0.0.0.0"):
    return address(ClusterConfig(queue=queue, host=host, token_file="t"))

  assert of("http://127.0.0.1:7000") == ("127.0.0.1", 7000)
  assert of("http://localhost:7000") == ("127.0.0.1", 7000)
  assert of("http://[::1]:7000") == ("::1", 7000)
  # What others reach it by may be a name of a gateway.
  assert of("http://queue.run:7000") == ("0.0.0.0", 7000)
  for bad in ("", "http://queue", "http://queue:x", "http://queue:0"):
    with pytest.raises(ValueError, match=r"cluster\.queue is .*7000"):
      of(bad)


def test_a_taken_port_names_the_field():
  with serving() as config, pytest.raises(OSError, match=r"cluster\.queue"):
    queue_service.run(config, 0, lambda: False)
  with pytest.raises(ValueError, match="index is 1"):
    queue_service.run(config, 1, lambda: False)


def test_nobody_waits_forever_for_a_queue():
  config = config_of()
  began = time.monotonic()
  with LearnerQueue(config.cluster, patience=0.5) as learner:
    with pytest.raises(TimeoutError, match=r"didn't begin in 0\.5 s: Connect"):
      learner.begin(start())
    with pytest.raises(TimeoutError, match="didn't say its status"):
      learner.status()

  async def lease():
    async with ActorQueue(config.cluster, 0, patience=0.5) as actor:
      await actor.lease(1)

  with pytest.raises(TimeoutError, match=r"didn't lease tasks in 0\.5 s"):
    asyncio.run(lease())
  assert time.monotonic() - began < 10


def test_long_groups_do_not_hold_up_others():
  with serving() as config, LearnerQueue(config.cluster) as learner:
    learner.begin(start(groups_per_step=1))
    stop, gaps = threading.Event(), []

    def probe():
      with httpx.Client(base_url=config.cluster.queue) as client:
        while not stop.is_set():
          began = time.monotonic()
          assert client.get("/health", timeout=PATIENCE).is_success
          gaps.append(time.monotonic() - began)
          time.sleep(0.01)

    thread = threading.Thread(target=probe)
    thread.start()
    leases, fates = act(config, count=1, tokens=50_000)
    batch = learner.take(0, 0, timeout=PATIENCE)
    stop.set()
    thread.join()
    assert fates == ["ready"]
    expected = group(leases[0], tokens=50_000)
    for one, two in zip(
      batch.groups[0].episodes, expected.episodes, strict=True
    ):
      for x, y in zip(one.segments, two.segments, strict=True):
        np.testing.assert_array_equal(x.behaviour_logp, y.behaviour_logp)
        np.testing.assert_array_equal(x.ids, y.ids)
    # They took seconds in all.
    assert max(gaps) < 1


def test_a_killed_queue_costs_groups_but_no_task(tmp_path):
  """The learner begins again from its last step; the actor notices little."""
  config = config_of(lost_seconds=5.0, beat_seconds=0.5)
  with (
    program(config, tmp_path) as queue,
    LearnerQueue(config.cluster) as learner,
  ):
    learner.begin(start(epochs=1, tasks=6))
    act(config, count=4)
    first = learner.take(0, 0, timeout=10)

    async def carry_on(rounds):
      async with ActorQueue(config.cluster, 1) as actor:
        fates = []
        while len(fates) < rounds:
          leases = await actor.lease(1)
          for lease in leases:
            fates.append(await actor.deliver(lease, group(lease)))
        return fates

    queue.kill()
    # Nobody is there: the actor waits, and so does the learner, not for long.
    answers = []
    actor = threading.Thread(
      target=lambda: answers.extend(asyncio.run(carry_on(4)))
    )
    actor.start()
    assert learner.take(1, 1, timeout=0.2) is None
    queue.start()
    began = time.monotonic()
    with pytest.raises(NotBegun, match="409, no learner has begun"):
      learner.take(1, 1, timeout=PATIENCE)
    assert time.monotonic() - began < 5
    learner.begin(start(version=1, ledger=first.ledger, epochs=1, tasks=6))
    trained = [g.group_id for g in first.groups]
    step, ended = 1, False
    while not ended:
      batch = learner.take(step, step, timeout=PATIENCE)
      trained += [g.group_id for g in batch.groups]
      step, ended = step + 1, batch.ended
    actor.join(PATIENCE)
    assert answers == ["ready"] * 4
    # All six tasks, each once.
    assert sorted(x.partition("/")[2] for x in trained) == [
      f"t{i}" for i in range(6)
    ]
    # It ends in order when asked to, also amid somebody's wait.
    waiting = threading.Thread(target=learner.take, args=(step, step, 1.0))
    waiting.start()
    queue.process.send_signal(signal.SIGTERM)
    assert queue.process.wait(PATIENCE) == 0
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_a_delivery_waits_for_the_learner_that_begins_again():
  config = config_of()
  learner = LearnerQueue(config.cluster)
  actor = ActorQueue(config.cluster, 1)

  async def lease():
    return await actor.lease(1)

  async def deliver(lease):
    # Not lost yet: it may be wanted.
    assert await actor.renew([lease]) == []
    assert await actor.give_back([]) is None
    delivery = asyncio.create_task(actor.deliver(lease, group(lease)))
    assert await actor.lease(1) == []
    assert not delivery.done()
    # The queue doesn't know yet that the task was drawn.
    ledger = {
      "source": {"drawn": 1, "places": {"": [0, 1, 1]}, "measured": {}},
      "open": [[0, lease.task_id, 0, 1]],
    }
    await asyncio.to_thread(learner.begin, start(ledger=ledger))
    return await delivery

  with asyncio.Runner() as runner, learner:
    with serving(config):
      learner.begin(start())
      (held,) = runner.run(lease())
    with serving(config):
      assert runner.run(deliver(held)) == "ready"
    runner.run(actor.__aexit__())
