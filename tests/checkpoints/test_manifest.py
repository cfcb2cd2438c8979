"""Commits that are damaged, or of something else, as the store finds them."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from arl_jax import types
from arl_jax.checkpoints import manifest
from arl_jax.checkpoints.store import CheckpointStore
from tests.checkpoints.commits import (
  NOISY,
  assert_is,
  assert_same_bits,
  restore,
  save,
  small,
)

# Damage.


def _files(commit):
  return [p for p in sorted(commit.rglob("*")) if p.is_file()]


def _cut(data):
  return data[:-1]


def _emptied(data):
  return b""


def _flipped(data):
  middle = len(data) // 2
  return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [_cut, _emptied, _flipped])
def test_damage_to_any_file_is_refused_by_name(folder, damage):
  store = CheckpointStore(folder, keep=3)
  store.save(1, small(1), {"position": 1})
  task = types.Task(task_id="q", prompt="How many?", truth={"answer": "4"})
  group = types.Group(group_id="1/q", task=task, episodes=())
  store.save(2, small(2), {"position": 2}, queue=[group], wait=True)
  files = _files(folder / "2")
  assert len(files) >= 9
  for file in files:
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    named = rf"^checkpoint 2 in {folder} can't be restored: it is damaged"
    with pytest.raises(ValueError, match=named) as caught:
      store.restore(small())
    assert file.name in str(caught.value)
    with pytest.raises(ValueError, match=named):
      store.record()
    commit = store.restore(small(), fall_back=True)
    assert_is(commit, 1)
    assert commit.skipped == (str(caught.value),)
    file.write_bytes(whole)
  assert_is(store.restore(small(), fall_back=True), 2)
  store.close()


def test_missing_files_are_refused(folder):
  save(folder, 1, 2)
  for file in _files(folder / "2"):
    whole = file.read_bytes()
    file.unlink()
    with pytest.raises(ValueError, match=r"checkpoint 2 in .* can't be") as no:
      restore(folder)
    assert file.name in str(no.value)
    file.write_bytes(whole)


@NOISY
@pytest.mark.usefixtures("orbax_noise")
def test_damage_within_large_files_is_refused(folder):
  """Their bytes have no checksum of their own, but the arrays have."""
  state = {
    "x": jnp.asarray(np.random.default_rng(0).normal(size=1 << 20), "float32")
  }
  store = CheckpointStore(folder, keep=3)
  store.save(1, state, {})
  store.wait()
  large = max(_files(folder / "1"), key=lambda p: p.stat().st_size)
  whole = large.read_bytes()
  assert len(whole) > manifest._SMALL_BYTES
  for part in (0.1, 0.5, 0.9):
    at = int(len(whole) * part)
    data = bytearray(whole)
    data[at] ^= 1
    large.write_bytes(data)
    with pytest.raises(ValueError, match=r"checkpoint 1 in .* it is damaged"):
      store.restore(state)
  large.write_bytes(whole)
  assert_same_bits(store.restore(state).state, state)
  store.close()


def test_values_that_orbax_takes_for_good_are_refused(folder):
  """One bit of one array differs; every file is whole, as orbax sees it."""
  store = CheckpointStore(folder, keep=3)
  store.save(1, small(1), {"position": 1})
  store.save(2, small(2), {"position": 2}, wait=True)
  wrong = small(2)
  wrong["m"] = wrong["m"].at[3, 4].multiply(-1)
  shutil.rmtree(folder / "2" / "state")
  with ocp.StandardCheckpointer() as writer:
    writer.save(folder / "2" / "state", wrong)
  body = manifest.read(folder / "2")
  (folder / "2" / manifest.NAME).unlink()
  manifest.seal(folder / "2", body)
  with pytest.raises(ValueError, match=r"checkpoint 2 .* its leaf .'m'. has d"):
    store.restore(small())
  assert_is(store.restore(small(), fall_back=True), 1)
  # The run goes on from 1, so the damaged one makes way.
  store.save(2, small(2), {"position": 2})
  assert_is(store.restore(small()), 2)
  store.close()


def test_no_whole_commit_is_an_error_that_names_all(folder):
  save(folder, 1, 2)
  for number in ("1", "2"):
    (folder / number / "queue.json").write_bytes(b"[")
  with pytest.raises(ValueError, match=r"no .* whole: .*t 2 in .*t 1 in"):
    restore(folder, fall_back=True)


# Commits of something else. Only another program's is passed over, when asked.


def _foreign(folder, message, like=None, **options):
  for fall_back in (False, True):
    with pytest.raises(
      ValueError, match=f"checkpoint 2 in {folder} .*{message}"
    ):
      restore(folder, like, fall_back=fall_back, **options)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      {"w": jnp.zeros((16, 4))},
      r"leaf \['w'\] is float32\[16, 8\], but float32\[16, 4\]",
    ),
    (
      {"w": jnp.zeros((16, 8), jnp.bfloat16)},
      r"leaf \['w'\] is float32\[16, 8\], but bfloat16\[16, 8\]",
    ),
    ({"x": jnp.zeros(3)}, r"no leaf \['x'\], which is float32\[3\] in this"),
    ({"w": None}, r"leaf \['w'\], float32\[16, 8\], is absent"),
    (
      {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)},
      r"leaf \['w'\] of this run has no sharding",
    ),
  ],
)
def test_another_structure_is_refused(folder, change, message):
  save(folder, 1, 2)
  _foreign(folder, message, small() | change)


def test_an_impossible_sharding_is_named(folder):
  save(folder, 1, 2)
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:3]), ("a",))
  place = NamedSharding(mesh, PartitionSpec("a"))
  thirds = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=place)
  _foreign(
    folder, r"leaf \['w'\] .* can't be placed: .*divi", small() | {"w": thirds}
  )


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (None, "no file commit.json, so it wasn't written by this program"),
    (
      '{"author": "someone"}',
      "no field 'arl_jax_commit', so it wasn't written by this",
    ),
  ],
)
def test_another_programs_checkpoint_is_passed_over_only_when_asked(
  folder, text, message
):
  save(folder, 1)
  with ocp.StandardCheckpointer() as other:
    other.save(folder / "2", small())
  if text is not None:
    (folder / "2" / manifest.NAME).write_text(text)
  with pytest.raises(ValueError, match=f"checkpoint 2 .*{message}"):
    restore(folder)
  commit = restore(folder, fall_back=True)
  assert_is(commit, 1)
  assert "checkpoint 2" in commit.skipped[0]


def test_another_programs_checkpoint_is_never_deleted(folder):
  with ocp.StandardCheckpointer() as other:
    other.save(folder / "2", small())
  store = CheckpointStore(folder, keep=1)
  with pytest.raises(OSError, match="2 exists, and isn't a checkpoint of this"):
    store.save(2, small(), {})
  for number in (3, 4):
    store.save(number, small(), {})
  store.close()
  assert sorted(os.listdir(folder)) == ["2", "4"]


@pytest.mark.parametrize(
  ("module", "name"),
  [(manifest, "schema_version"), (types, "types_schema_version")],
)
def test_another_schema_version_is_refused(folder, module, name, monkeypatch):
  monkeypatch.setattr(module, "SCHEMA_VERSION", 7)
  save(folder, 1, 2)
  monkeypatch.undo()
  _foreign(folder, f"it has {name} 7; this program reads 1")


def test_another_identity_is_refused(folder):
  ours = {"data": "questions-3", "loss": {"name": "cispo"}}
  save(folder, 1, 2, identity=ours)
  assert_is(restore(folder, identity=ours), 2)
  assert_is(restore(folder), 2)
  _foreign(
    folder,
    "its identity has 'data' 'questions-3', but this run has 'questions-4'",
    identity=ours | {"data": "questions-4"},
  )
  _foreign(
    folder, "has 'seed' absent, but .* has 1", identity=ours | {"seed": 1}
  )
  _foreign(folder, "has 'loss' .* has absent", identity={"data": "questions-3"})
  store = CheckpointStore(folder, keep=3, identity={})
  with pytest.raises(ValueError, match="its identity has 'data'"):
    store.record()
  store.close()


def test_a_commit_under_another_number_is_refused(folder):
  save(folder, 1)
  os.rename(folder / "1", folder / "2")
  _foreign(folder, "it is checkpoint 1 under another number")
