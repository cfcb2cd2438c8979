"""The same in a bucket: nothing is renamed, linked or locked there."""

from typing import ClassVar

import fsspec.implementations.memory
import pytest
from etils.epath import backend

from arl_jax.weights import Publisher
from arl_jax.weights.storage import Storage
from tests.weights.published import (
  assert_is,
  numbers,
  publish,
  publishing,
  subscribed,
  weights,
)


class Bucket(fsspec.implementations.memory.MemoryFileSystem):
  """Objects under s3://, without what buckets can't do."""

  protocol = "s3"
  store: ClassVar[dict] = {}
  pseudo_dirs: ClassVar[list] = [""]

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(str(path).removeprefix("s3://"))

  def _refuse(self, *args, **kwargs):
    raise NotImplementedError("a bucket can't")

  mv = rename = move = link = created = _refuse


@pytest.fixture
def bucket(monkeypatch):
  Bucket.store, Bucket.pseudo_dirs = {}, [""]
  there = Bucket(skip_instance_cache=True)
  monkeypatch.setattr(
    type(backend.fsspec_backend), "fs", lambda self, path: there
  )
  monkeypatch.setattr(fsspec, "filesystem", lambda scheme: there)
  monkeypatch.setattr("arl_jax.weights.storage._SETTLE_S", 0.01)
  return "s3://bucket/run"


def test_versions_arrive_and_old_ones_go(bucket):
  with (
    publishing(bucket, 0, base_every=3) as publisher,
    subscribed(bucket) as reader,
  ):
    assert not Storage(bucket).local
    assert_is(reader.fetch(), 0)
    publish(publisher, 1, 2)
    assert_is(reader.fetch(), 2)
    publish(publisher, 3)
    assert numbers(bucket) == [3]
    assert_is(reader.fetch(), 3)
    assert all(key.startswith("/bucket/run/") for key in Bucket.store)


def test_one_owner_at_a_time(bucket):
  with publishing(bucket, 0, lineage=("a",), lease_s=0.2) as abandoned:
    with pytest.raises(OSError, match="lineage a"):
      Publisher(bucket, ("b",), lease_s=20)
    with publishing(bucket, 0, lineage=("a", "c")):
      abandoned.publish(weights(1), 1)
      with pytest.raises(OSError, match="was given up"):
        abandoned.wait()
      assert numbers(bucket) == [0]


def test_of_two_that_write_a_claim_at_once_one_has_it(bucket, monkeypatch):
  storage = Storage(bucket)
  path = storage.note("writers", "000001.json")
  assert storage.create(path, "one")
  assert not storage.create(path, "two")
  assert storage.read(path) == "one"

  def overtaken(seconds):
    path.write_bytes(b"other")

  path.unlink()
  monkeypatch.setattr("time.sleep", overtaken)
  assert not storage.create(path, "late")
