"""Another host of a replica, whose folder of weights is slow or away."""

import contextlib
import socket
import threading
import types

import pytest

from arl_jax.rollout import calls
from arl_jax.serving import host_link
from arl_jax.serving.follower import Follower


class Folder:
  """Versions that come once they are let; what was asked for."""

  def __init__(self):
    self.asked, self.open, self.began = [], threading.Event(), threading.Event()

  def fetch(self, number):
    self.asked.append(number)
    self.began.set()
    assert self.open.wait(30)
    return types.SimpleNamespace(
      params=f"v{number}", version=(number, "run", "sum")
    )

  def verify(self, params):
    pass


class Host:
  """A follower in a thread, and the first host's end of its connection."""

  def __init__(self):
    self.link, theirs = socket.socketpair()
    self.folder, self.failed = Folder(), []
    self.renewed = threading.Event()
    engine = types.SimpleNamespace(
      slots=2,
      place=lambda params: params,
      init_decode_state=self.renewed.set,
    )
    self.follower = Follower(
      engine, self.folder, theirs, on_lost=self.failed.append
    )
    self.thread = threading.Thread(target=self._run, daemon=True)
    self.thread.start()

  def _run(self):
    try:
      self.follower.run()
    except ValueError as error:
      self.failed.append(error)

  def tell(self, *said):
    for call in said:
      self.link.sendall(host_link.frame(call))


@pytest.fixture
def host():
  found = Host()
  with contextlib.closing(found.link):
    yield found
    found.folder.open.set()
    found.thread.join(30)


def test_versions_that_nobody_needs_any_more_are_not_fetched(host):
  host.tell(calls.Fetch(1, 11))
  assert host.folder.began.wait(30)
  for number in (2, 3, 4):
    host.tell(calls.Fetch(number, 10 + number), calls.Drop(number))
  host.tell(calls.Fetch(5, 15))
  host.tell(calls.Renew())
  assert host.renewed.wait(30)
  host.folder.open.set()
  for number in (1, 5):
    taken = calls.Taken(number, 10 + number, "run", "sum")
    assert host_link.receive(host.link) == taken
  assert host.folder.asked == [11, 15]
  host.tell(calls.End())
  host.thread.join(30)
  assert not host.thread.is_alive()
  assert not host.follower.busy
  assert not host.failed


def test_a_folder_that_is_away_holds_up_no_failure(host):
  host.tell(calls.Fetch(1, 11))
  assert host.folder.began.wait(30)
  host.tell(calls.CopyPrefix(0, 4, 1))
  host.thread.join(30)
  assert not host.thread.is_alive()
  assert "slot 4 was named" in str(host.failed[0])
  assert host.follower.busy
