"""One run publishes to a folder; who has been given up is refused."""

import errno
import os
import pathlib
import random
import subprocess
import sys
import time

import pytest

from arl_jax.weights import Publisher
from arl_jax.weights.storage import Place, Storage
from tests.weights.published import (
  assert_is,
  numbers,
  publish,
  publishing,
  subscribed,
  weights,
)

_ROOT = pathlib.Path(__file__).parents[2]


def test_two_learners_at_one_place(tmp_path):
  with publishing(tmp_path, 0, lineage=("a",), lease_s=0.4) as publisher:
    with pytest.raises(OSError, match=r"lineage a .* publishes to") as caught:
      Publisher(tmp_path, ("b",), lease_s=20)
    assert caught.value.errno == errno.EBUSY
    publish(publisher, 1)
  # It has closed: no need to wait.
  began = time.monotonic()
  with publishing(tmp_path, 5, lineage=("b",), lease_s=60) as publisher:
    assert time.monotonic() - began < 30
    assert publisher.newest.lineage == "b"


def test_a_lineage_publishes_once(tmp_path):
  with publishing(tmp_path, 0, lineage=("a",)):
    pass
  with pytest.raises(OSError, match=r"lineage a published to .* before"):
    Publisher(tmp_path, ("a",))


def test_two_that_claim_at_once(tmp_path, monkeypatch):
  create = Storage.create

  def overtaken(self, path, text):
    monkeypatch.undo()
    create(self, path, '{"lineage": "other"}')
    return create(self, path, text)

  monkeypatch.setattr(Storage, "create", overtaken)
  with pytest.raises(OSError, match=r"lineage other \(term 1\) publishes"):
    Publisher(tmp_path, ("a",))


def test_a_successor_takes_over_at_once_and_the_old_one_is_refused(tmp_path):
  with (
    publishing(tmp_path, 0, 1, 2, lineage=("a",), lease_s=60) as abandoned,
    subscribed(tmp_path) as reader,
  ):
    assert_is(reader.fetch(), 2)
    # Restored from a commit of version 1: it publishes that as a base.
    with publishing(tmp_path, lineage=("a", "b"), lease_s=60) as publisher:
      # Until then, what is held is served on.
      assert reader.newest() == reader.held
      publish(publisher, 1)
      assert numbers(tmp_path) == [1]
      fetched = reader.fetch()
      assert_is(fetched, 1)
      assert fetched.version.lineage == "b"
      abandoned.publish(weights(3), 3)
      with pytest.raises(OSError, match=r"lineage a was given up: lineage b"):
        abandoned.wait()
      assert numbers(tmp_path) == [1]
      assert reader.newest() == reader.held == publisher.newest
      publish(publisher, 2)
      assert_is(reader.fetch(), 2)


def test_a_late_writer_of_an_abandoned_lineage_misleads_nobody(
  tmp_path, monkeypatch
):
  with (
    publishing(tmp_path, 0, lineage=("a",)) as abandoned,
    subscribed(tmp_path) as reader,
  ):
    reader.fetch()
    check = abandoned._owner.check
    with publishing(tmp_path, lineage=("a", "b")) as publisher:
      # It looked before the successor came, and writes after.
      monkeypatch.setattr(abandoned._owner, "check", lambda: None)
      publish(abandoned, 9)
      assert reader.newest().number == 0
      publish(publisher, 1)
      assert reader.fetch().version.lineage == "b"
      assert numbers(tmp_path) == [1]
    monkeypatch.setattr(abandoned._owner, "check", check)


def test_what_a_killed_run_left_half_written_is_unseen_and_swept(tmp_path):
  with publishing(tmp_path, 0, 1, lineage=("a",)):
    pass
  torn = Storage(tmp_path).version(Place(1, 2))
  torn.mkdir()
  (torn / "shard-00000.bin").write_bytes(b"half")
  with subscribed(tmp_path) as reader:
    assert_is(reader.fetch(), 1)
  with publishing(tmp_path, lineage=("a", "b")):
    assert numbers(tmp_path) == [0, 1]


_PUBLISH = """
import sys
from tests.weights.published import publishing, publish
folder, lineage = sys.argv[1], sys.argv[2].split(",")
with publishing(folder, lineage=lineage, base_every=3, lease_s=1) as publisher:
  print("open", flush=True)
  for number in range(int(sys.argv[3]), 1000):
    publish(publisher, number)
"""


def start(folder, lineage, number):
  process = subprocess.Popen(
    [sys.executable, "-c", _PUBLISH, str(folder), lineage, str(number)],
    cwd=_ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "open\n", process.communicate()
  return process


@pytest.mark.slow
def test_killed_at_random_moments_every_version_is_whole(tmp_path):
  draw = random.Random(0)
  lineage = "run"
  with subscribed(tmp_path) as reader:
    for kill in range(4):
      began = 0 if reader.held is None else reader.held.number
      process = start(tmp_path, lineage, began)
      until = time.monotonic() + 30
      while reader.newest() is None and time.monotonic() < until:
        time.sleep(0.01)
      time.sleep(draw.uniform(0, 1.5))
      process.kill()
      process.communicate()
      fetched = reader.fetch()
      assert_is(fetched, fetched.version.number)
      # The next goes on from a commit of this one, or waits out its lease.
      lineage = f"{lineage},next{kill}" if kill % 2 else f"other{kill}"
    with publishing(
      tmp_path, 0, lineage=(*lineage.split(","), "last"), lease_s=1
    ):
      assert numbers(tmp_path) == [0]
      assert_is(reader.fetch(), 0)
      assert reader.held.lineage == "last"
