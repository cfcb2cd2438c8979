"""The first host and the others: who is let in, what is heard, who is lost."""

import contextlib
import gc
import socket
import struct
import threading
import time
import weakref

import pytest

from arl_jax.rollout import calls
from arl_jax.serving import host_link
from arl_jax.serving.followers import Followers
from arl_jax.serving.listening import listen

KEY = b"a key"


@pytest.fixture
def listener():
  with contextlib.closing(listen("127.0.0.1", 0, "port")) as found:
    yield found


def in_background(work):
  """Gives what waits for the result."""
  found = []
  thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
  thread.start()

  def result():
    thread.join(10)
    assert found
    return found[0]

  return result


def accepted(listener, count, seconds=10.0):
  return in_background(
    lambda: host_link.accept(listener, count, KEY, seconds=seconds)
  )


def connected(listener, index, key=KEY):
  address = listener.getsockname()
  return host_link.connect(address, index, key, seconds=5.0)


def test_hosts_are_let_in_by_their_index(listener):
  found = accepted(listener, 3)
  others = [connected(listener, 2), connected(listener, 1)]
  first, second = found()
  first.sendall(host_link.frame(calls.Clear(1)))
  second.sendall(host_link.frame(calls.Clear(2)))
  assert host_link.receive(others[0]) == calls.Clear(2)
  assert host_link.receive(others[1]) == calls.Clear(1)
  for link in (first, second, *others):
    link.close()


def test_strangers_are_left_out_and_hold_nobody_up(listener, monkeypatch):
  monkeypatch.setattr(host_link, "_HANDSHAKE_SECONDS", 0.2)
  found = accepted(listener, 2)
  address = listener.getsockname()
  # One says nothing, one says anything, one has another key, one comes as a
  # host that there isn't.
  silent = socket.create_connection(address)
  noisy = socket.create_connection(address)
  noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
  with pytest.raises(ConnectionError):
    connected(listener, 1, b"another key")
  other = connected(listener, 9)
  with pytest.raises(ConnectionError):
    host_link.receive(other)
  ours = connected(listener, 1)
  (theirs,) = found()
  theirs.sendall(host_link.frame(calls.Renew()))
  assert host_link.receive(ours) == calls.Renew()
  for link in (silent, noisy, other, ours, theirs):
    link.close()


def test_a_stranger_that_trickles_is_sent_away_in_time(listener, monkeypatch):
  monkeypatch.setattr(host_link, "_HANDSHAKE_SECONDS", 0.3)
  found = accepted(listener, 2)
  stranger = socket.create_connection(listener.getsockname())
  sent = 0
  # A hello has 66 bytes: 13 seconds of this.
  with stranger, contextlib.suppress(OSError):
    for _ in range(66):
      stranger.sendall(b"x")
      sent += 1
      time.sleep(0.2)
  assert sent < 66
  ours = connected(listener, 1)
  for link in (ours, *found()):
    link.close()


def test_who_is_not_let_in_is_told_what_may_be_wrong(listener):
  found = accepted(listener, 2)
  with pytest.raises(ConnectionRefusedError, match=r"cluster\.token_file"):
    connected(listener, 1, b"another key")
  ours = connected(listener, 1)
  for link in (ours, *found()):
    link.close()


def test_a_host_obeys_nobody_without_the_key(listener):
  def answer():
    link, _ = listener.accept()
    with link:
      link.sendall(bytes(32))
      host_link._exactly(link, 66)
      link.sendall(bytes(32))

  done = in_background(answer)
  with pytest.raises(ConnectionRefusedError, match="it has another key"):
    connected(listener, 1)
  done()


def test_hosts_that_do_not_come_are_named(listener):
  address = listener.getsockname()
  link = in_background(lambda: host_link.connect(address, 2, KEY, seconds=5.0))
  with pytest.raises(TimeoutError, match=r"hosts \[1\] of the replica"):
    host_link.accept(listener, 3, KEY, seconds=0.5)
  link().close()


@pytest.mark.parametrize(
  ("sent", "says"),
  [
    (struct.pack("!I", calls.MAX_BYTES + 1), "a frame of 16777217 bytes"),
    (struct.pack("!I", 0), "has 0 bytes"),
    (struct.pack("!I", 3) + b"abc", "kind 97"),
    (struct.pack("!I", 3) + b"ab", "closed"),
    (b"\0\0", "closed"),
    (b"", "closed"),
  ],
)
def test_what_is_no_frame_is_refused(sent, says):
  ours, theirs = socket.socketpair()
  theirs.sendall(sent)
  theirs.close()
  with ours, pytest.raises((ValueError, ConnectionError), match=says):
    host_link.receive(ours)


class Pair:
  """The first host, and what one other one gets and says."""

  def __init__(self):
    ours, self.other = socket.socketpair()
    self.lost = []
    self.followers = Followers([ours], self.lost.append)

  def say(self, message):
    self.other.sendall(host_link.frame(message))

  def next(self):
    return host_link.receive(self.other)

  def wait_until_lost(self):
    limit = time.monotonic() + 5
    while not self.lost:
      assert time.monotonic() < limit
      time.sleep(0.005)


@pytest.fixture
def pair():
  found = Pair()
  yield found
  found.other.close()
  found.followers.end()


def test_unneeded_weights_go_before_the_next_call(pair):
  class Held:
    pass

  held = Held()
  weakref.finalize(held, pair.followers.unneeded, 4)
  pair.followers.announce(calls.Clear(1))
  del held
  gc.collect()
  pair.followers.announce(calls.Clear(2))
  found = [pair.next() for _ in range(3)]
  assert found == [calls.Clear(1), calls.Drop(4), calls.Clear(2)]


def test_answers_to_earlier_questions_do_not_count(pair):
  first, second = pair.followers.fetch(7), pair.followers.fetch(8)
  assert pair.next() == calls.Fetch(first, 7)
  assert pair.next() == calls.Fetch(second, 8)
  pair.say(calls.Refused(first, "damaged"))
  pair.say(calls.Taken(second, 8, "x", "c"))
  found = pair.followers.await_taken(second, 5.0)
  assert found == {1: calls.Taken(second, 8, "x", "c")}
  third = pair.followers.fetch(9)
  with pytest.raises(TimeoutError, match=r"0 s for hosts \[1\]"):
    pair.followers.await_taken(third, 0.05)
  assert not pair.lost


def test_a_replica_that_stops_waits_for_nobody(pair):
  number = pair.followers.fetch(1)

  def wait():
    with pytest.raises(ConnectionError, match="the replica stops"):
      pair.followers.await_taken(number, 60.0)
    return True

  waited = in_background(wait)
  pair.followers.stop_waiting()
  assert waited()
  assert not pair.lost


@pytest.mark.parametrize(
  ("last", "says"),
  [
    (None, "host 1 is gone: the connection was closed"),
    (calls.Renew(), "host 1 is gone: a Renew is no answer"),
  ],
)
def test_a_host_that_ends_or_strays_is_lost(pair, last, says):
  number = pair.followers.fetch(1)
  if last is None:
    pair.other.shutdown(socket.SHUT_RDWR)
  else:
    pair.say(last)
  # Who waits for it is told.
  with pytest.raises(ConnectionError, match="has lost a host"):
    pair.followers.await_taken(number, 10.0)
  pair.wait_until_lost()
  pair.followers.give_up("said once")
  assert pair.lost == [says]


def test_the_end_is_no_loss(pair):
  done = in_background(pair.followers.end)
  assert pair.next() == calls.End()
  with pytest.raises(ConnectionError, match="closed"):
    pair.next()
  pair.other.close()
  done()
  assert not pair.lost
