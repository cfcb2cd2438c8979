"""Whatever goes wrong on the way, what is held stays, and is what was held."""

import json
import os
import shutil
import subprocess
import threading

import jax
import numpy as np
import pytest

from arl_jax.checkpoints import sealed
from arl_jax.checkpoints.failure import DamagedError
from arl_jax.weights import MissingError, manifest
from arl_jax.weights.readers import Readers
from arl_jax.weights.storage import Storage
from tests.weights.published import (
  assert_is,
  file_of,
  is_full,
  numbers,
  publish,
  publishing,
  rounded,
  subscribed,
  weights,
)


def cut(path):
  os.truncate(path, path.stat().st_size - 1)


def emptied(path):
  os.truncate(path, 0)


def flip(path, place=None):
  data = bytearray(path.read_bytes())
  data[len(data) // 2 if place is None else place] ^= 4
  path.write_bytes(data)


@pytest.fixture
def reader(tmp_path):
  with subscribed(tmp_path, lease_s=0.4) as found:
    yield found


def assert_holds(reader, number):
  assert reader.held.number == number
  reader.verify(rounded(weights(number)))


@pytest.mark.parametrize("harm", [cut, emptied, flip, os.unlink])
@pytest.mark.parametrize("name", ["shard-00000.bin", manifest.NAME])
@pytest.mark.parametrize("number", [1, 2])
def test_damage_leaves_the_old_version_and_a_base_heals(
  tmp_path, reader, harm, name, number
):
  with publishing(tmp_path, 0, lease_s=0.4) as publisher:
    reader.fetch()
    publish(publisher, 1, 2)
    harm(file_of(tmp_path, number, name))
    if (harm, name, number) == (os.unlink, manifest.NAME, 2):
      # Then there is no version 2.
      assert_is(reader.fetch(), 1)
      return
    with pytest.raises((DamagedError, MissingError)) as caught:
      reader.fetch()
    assert str(tmp_path) in str(caught.value) or "version" in str(caught.value)
    assert_holds(reader, 0)
    number = 3
    # The publisher hears of it, and begins anew.
    while reader.held.number == 0:
      publish(publisher, number)
      try:
        assert_is(reader.fetch(), number)
      except (DamagedError, MissingError):
        assert_holds(reader, 0)
        number += 1
        threading.Event().wait(0.1)
    place = Storage(tmp_path).places()[-1]
    assert Storage(tmp_path).manifest(place).base is None
    assert not list((tmp_path / "readers").iterdir())


def test_every_flipped_byte_of_a_difference_is_noticed(tmp_path, reader):
  with publishing(tmp_path, 0) as publisher:
    reader.fetch()
    publish(publisher, 1)
    path = file_of(tmp_path, 1)
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(whole), 20):
      flip(path, place)
      with pytest.raises(DamagedError):
        reader.fetch()
      path.write_bytes(whole)
    assert_holds(reader, 0)
    assert_is(reader.fetch(), 1)


def test_a_missing_base_is_refused_by_name(tmp_path, reader):
  with publishing(tmp_path, 0, 1):
    shutil.rmtree(file_of(tmp_path, 0).parent)
    with pytest.raises(MissingError, match=r"version 1 of .* needs 0 of"):
      reader.fetch()
    assert reader.held is None


@pytest.mark.parametrize("other", ["number", "lineage", "checksum"])
def test_a_difference_from_what_is_not_held_falls_back_to_the_base(
  tmp_path, reader, other
):
  with publishing(tmp_path, 0) as publisher:
    reader.fetch()
    publish(publisher, 1)
    change = {"number": 5, "lineage": "b", "checksum": "0" * 32}[other]
    held = reader._held
    version = held.manifest.version._replace(**{other: change})
    wrong = manifest.Manifest(
      version=version,
      base=None,
      files=held.manifest.files,
      tensors=held.manifest.tensors,
    )
    reader._held = held._replace(manifest=wrong)
    fetched = reader.fetch()
    assert_is(fetched, 1)
    # The base and the difference, not the difference alone.
    assert fetched.applied == 2


def test_another_version_in_the_place_of_the_base(tmp_path, reader):
  with publishing(tmp_path / "other", 0, 2), publishing(tmp_path, 0, 1):
    found = file_of(tmp_path / "other", 0).parent
    shutil.rmtree(file_of(tmp_path, 0).parent)
    text = (found / manifest.NAME).read_text()
    body = json.loads(text)["arl_jax_weights"]
    body["version"]["lineage"] = "z"
    target = file_of(tmp_path, 1).parent.with_name(found.name)
    shutil.copytree(found, target)
    sealed_text = sealed.seal("arl_jax_weights", body)
    (target / manifest.NAME).write_text(sealed_text)
    with pytest.raises(MissingError, match=r"needs 0 of .* but there is 0 of"):
      reader.fetch()


def test_what_is_held_was_corrupted_in_memory(tmp_path, reader):
  with publishing(tmp_path, 0) as publisher:
    reader.fetch()
    held = reader._held
    (key, *_) = held.words
    spoilt = held.words[key].copy()
    spoilt[0] ^= 1
    reader._held = held._replace(words={**held.words, key: spoilt})
    with pytest.raises(DamagedError, match="was published"):
      reader.verify(rounded(weights(0)))
    publish(publisher, 1)
    fetched = reader.fetch()
    assert_is(fetched, 1)
    assert fetched.applied == 2


def test_versions_that_go_while_they_are_read(tmp_path, reader, monkeypatch):
  with publishing(tmp_path, 0, base_every=1) as publisher:
    load, published = reader._loader.load, []

    def overtaken(chain, start):
      if not published:
        published.append(1)
        publish(publisher, 1)
        # As by a publisher that didn't see the reader's note.
        shutil.rmtree(file_of(tmp_path, 0).parent, ignore_errors=True)
      return load(chain, start)

    monkeypatch.setattr(reader._loader, "load", overtaken)
    assert_is(reader.fetch(), 1)


def test_what_is_being_read_stays(tmp_path, reader, monkeypatch):
  with publishing(tmp_path, 0, base_every=1) as publisher:
    load = reader._loader.load

    def slow(chain, start):
      publish(publisher, 1, 2)
      assert numbers(tmp_path) == [0, 2]
      return load(chain, start)

    monkeypatch.setattr(reader._loader, "load", slow)
    assert_is(reader.fetch(), 0)
    monkeypatch.undo()
    publish(publisher, 3)
    assert numbers(tmp_path) == [3]
    assert_is(reader.fetch(), 3)


def test_a_dead_readers_note_ends(tmp_path):
  now = [0.0]
  storage = Storage(tmp_path)
  readers = Readers(storage, clock=lambda: now[0])
  note = {"needs": ["000001-0000000000"], "damaged": "", "lease_s": 5}
  path = storage.note("readers", "x.json")
  storage.write(path, json.dumps({**note, "count": 1}))
  assert readers.notes()[0].needs == ("000001-0000000000",)
  now[0] = 4.0
  storage.write(path, json.dumps({**note, "count": 2}))
  assert len(readers.notes()) == 1
  now[0] = 8.0
  assert len(readers.notes()) == 1
  now[0] = 10.0
  assert not readers.notes()
  assert not path.exists()


@pytest.mark.parametrize(
  "text",
  ["", "[]", "{}", '{"needs": 3}', "[" * 50000, '{"needs":[1],"damaged":""}'],
)
def test_notes_that_say_nothing(tmp_path, text):
  storage = Storage(tmp_path)
  storage.write(storage.note("readers", "x.json"), text)
  (note,) = Readers(storage).notes()
  assert note[:2] == ((), "")


class TestNoRoom:
  def test_the_quota_takes_the_oldest_and_never_the_newest_chain(
    self, tmp_path, reader
  ):
    with publishing(tmp_path, 0) as publisher:
      size = Storage(tmp_path).size(Storage(tmp_path).places()[0])
    with publishing(
      tmp_path, lineage=("b",), quota_bytes=int(2.5 * size), base_every=2
    ) as publisher:
      publish(publisher, 1, 2, 3)
      assert_is(reader.fetch(), 3)
      publish(publisher, 4, 5, 6)
      assert_is(reader.fetch(), 6)
    with publishing(
      tmp_path, lineage=("c",), quota_bytes=int(1.5 * size), base_every=2
    ) as publisher:
      # Versions of the run before may go, none that the run has made.
      publish(publisher, 7, 8)
      assert numbers(tmp_path) == [7, 8]
      reader.fetch()
      publisher.publish(weights(9), 9)
      with pytest.raises(OSError, match=r"the quota is .* bytes") as caught:
        publisher.publish(weights(10), 10)
      assert is_full(caught)
      assert numbers(tmp_path) == [7, 8]
      assert_holds(reader, 8)

  def test_a_full_disk_leaves_earlier_versions_and_then_a_base(self, tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs"]
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run([*command, str(disk)], capture_output=True, text=True)
    if done.returncode:
      pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
      with (
        publishing(disk, 0, 1) as publisher,
        subscribed(disk) as reader,
      ):
        reader.fetch()
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(bytes(free - 4096))
        for number in (2, 3):
          # Random bits: no difference is small.
          publisher.publish(noise(number), number)
          with pytest.raises(OSError, match="disk full") as caught:
            publisher.wait()
          assert is_full(caught)
        assert numbers(disk) == [0, 1]
        assert reader.newest().number == 1
        assert not list((disk / "versions").rglob(".*"))
        (disk / "filler").unlink()
        publish(publisher, 4)
        assert Storage(disk).manifest(Storage(disk).places()[-1]).base is None
        assert_is(reader.fetch(), 4)
    finally:
      subprocess.run(["umount", str(disk)], check=True)


def noise(seed):
  draw = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: draw.normal(size=np.shape(x)).astype(np.float32), weights()
  )
