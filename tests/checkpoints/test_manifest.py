"""Commits that are damaged, or of something else, as the store finds them."""

import gc
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


@pytest.fixture
def orbax_noise():
  """Orbax's tasks end with exceptions that nobody collects; here they do."""
  yield
  gc.collect()


# For tests in which what orbax reads or writes isn't right.
_NOISY = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning",
  "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


@pytest.fixture
def folder(tmp_path):
  return tmp_path / "checkpoints"


def _small(seed=0):
  draw = np.random.default_rng(seed)
  return {
    "w": jnp.asarray(draw.normal(size=(16, 8)), jnp.float32),
    "m": jnp.asarray(draw.normal(size=(16, 8)), jnp.bfloat16),
    "step": jnp.int32(seed),
  }


def _save(folder, *numbers, keep=3, scores=(), **options):
  """Commits whose state and record tell their number."""
  store = CheckpointStore(folder, keep=keep, **options)
  for i, number in enumerate(numbers):
    score = scores[i] if scores else None
    store.save(number, _small(number), {"position": number}, score=score)
  store.close()


def _restore(folder, like=None, *, number=None, fall_back=False, **options):
  store = CheckpointStore(folder, keep=3, **options)
  like = _small() if like is None else like
  try:
    return store.restore(like, number=number, fall_back=fall_back)
  finally:
    store.close()


def _assert_same_bits(one, two):
  assert jax.tree.structure(one) == jax.tree.structure(two)
  for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = map(jax.random.key_data, (a, b))
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _assert_is(commit, number):
  assert commit.number == number
  assert commit.record == {"position": number}
  _assert_same_bits(commit.state, _small(number))


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
  store.save(1, _small(1), {"position": 1})
  task = types.Task(task_id="q", prompt="How many?", truth={"answer": "4"})
  group = types.Group(group_id="1/q", task=task, episodes=())
  store.save(2, _small(2), {"position": 2}, queue=[group], wait=True)
  files = _files(folder / "2")
  assert len(files) >= 9
  for file in files:
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    named = rf"^checkpoint 2 in {folder} can't be restored: it is damaged"
    with pytest.raises(ValueError, match=named) as caught:
      store.restore(_small())
    assert file.name in str(caught.value)
    with pytest.raises(ValueError, match=named):
      store.record()
    commit = store.restore(_small(), fall_back=True)
    _assert_is(commit, 1)
    assert commit.skipped == (str(caught.value),)
    file.write_bytes(whole)
  _assert_is(store.restore(_small(), fall_back=True), 2)
  store.close()


def test_missing_files_are_refused(folder):
  _save(folder, 1, 2)
  for file in _files(folder / "2"):
    whole = file.read_bytes()
    file.unlink()
    with pytest.raises(ValueError, match=r"checkpoint 2 in .* can't be") as no:
      _restore(folder)
    assert file.name in str(no.value)
    file.write_bytes(whole)


@_NOISY
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
  _assert_same_bits(store.restore(state).state, state)
  store.close()


def test_values_that_orbax_takes_for_good_are_refused(folder):
  """One bit of one array differs; every file is whole, as orbax sees it."""
  store = CheckpointStore(folder, keep=3)
  store.save(1, _small(1), {"position": 1})
  store.save(2, _small(2), {"position": 2}, wait=True)
  wrong = _small(2)
  wrong["m"] = wrong["m"].at[3, 4].multiply(-1)
  shutil.rmtree(folder / "2" / "state")
  with ocp.StandardCheckpointer() as writer:
    writer.save(folder / "2" / "state", wrong)
  body = manifest.read(folder / "2")
  (folder / "2" / manifest.NAME).unlink()
  manifest.seal(folder / "2", body)
  with pytest.raises(ValueError, match=r"checkpoint 2 .* its leaf .'m'. has d"):
    store.restore(_small())
  _assert_is(store.restore(_small(), fall_back=True), 1)
  # The run goes on from 1, so the damaged one makes way.
  store.save(2, _small(2), {"position": 2})
  _assert_is(store.restore(_small()), 2)
  store.close()


def test_no_whole_commit_is_an_error_that_names_all(folder):
  _save(folder, 1, 2)
  for number in ("1", "2"):
    (folder / number / "queue.json").write_bytes(b"[")
  with pytest.raises(ValueError, match=r"no .* whole: .*t 2 in .*t 1 in"):
    _restore(folder, fall_back=True)


# Commits of something else. Only another program's is passed over, when asked.


def _foreign(folder, message, like=None, **options):
  for fall_back in (False, True):
    with pytest.raises(
      ValueError, match=f"checkpoint 2 in {folder} .*{message}"
    ):
      _restore(folder, like, fall_back=fall_back, **options)


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
  _save(folder, 1, 2)
  _foreign(folder, message, _small() | change)


def test_an_impossible_sharding_is_named(folder):
  _save(folder, 1, 2)
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:3]), ("a",))
  place = NamedSharding(mesh, PartitionSpec("a"))
  thirds = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=place)
  _foreign(
    folder, r"leaf \['w'\] .* can't be placed: .*divi", _small() | {"w": thirds}
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
  _save(folder, 1)
  with ocp.StandardCheckpointer() as other:
    other.save(folder / "2", _small())
  if text is not None:
    (folder / "2" / manifest.NAME).write_text(text)
  with pytest.raises(ValueError, match=f"checkpoint 2 .*{message}"):
    _restore(folder)
  commit = _restore(folder, fall_back=True)
  _assert_is(commit, 1)
  assert "checkpoint 2" in commit.skipped[0]


def test_another_programs_checkpoint_is_never_deleted(folder):
  with ocp.StandardCheckpointer() as other:
    other.save(folder / "2", _small())
  store = CheckpointStore(folder, keep=1)
  with pytest.raises(OSError, match="2 exists, and isn't a checkpoint of this"):
    store.save(2, _small(), {})
  for number in (3, 4):
    store.save(number, _small(), {})
  store.close()
  assert sorted(os.listdir(folder)) == ["2", "4"]


@pytest.mark.parametrize(
  ("module", "name"),
  [(manifest, "schema_version"), (types, "types_schema_version")],
)
def test_another_schema_version_is_refused(folder, module, name, monkeypatch):
  monkeypatch.setattr(module, "SCHEMA_VERSION", 7)
  _save(folder, 1, 2)
  monkeypatch.undo()
  _foreign(folder, f"it has {name} 7; this program reads 1")


def test_another_identity_is_refused(folder):
  ours = {"data": "questions-3", "loss": {"name": "cispo"}}
  _save(folder, 1, 2, identity=ours)
  _assert_is(_restore(folder, identity=ours), 2)
  _assert_is(_restore(folder), 2)
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
  _save(folder, 1)
  os.rename(folder / "1", folder / "2")
  _foreign(folder, "it is checkpoint 1 under another number")
