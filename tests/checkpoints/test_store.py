import errno
import gc
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.checkpoints.store import CheckpointStore
from arl_jax.learner.state import OptimizerConfig, create, optimizer
from arl_jax.model import ModelConfig

CONFIG = ModelConfig(
  vocab_size=64,
  width=32,
  layers=1,
  heads=2,
  head_dim=8,
  expert_width=16,
  mtp_heads=0,
)


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


def _state(seed=0, model=CONFIG):
  """A state whose every array, the optimizer's included, holds some values."""
  tx = optimizer(OptimizerConfig())
  state = create(model, tx, jax.random.key(seed))
  draw = np.random.default_rng(seed)

  def fill(x):
    if x.dtype == jnp.int32:
      return x + jnp.int32(seed + 3)
    return jnp.asarray(draw.normal(size=x.shape), x.dtype)

  return jax.tree.map(fill, state)


@pytest.fixture(scope="module")
def states():
  return [_state(seed) for seed in range(2)]


@pytest.fixture
def folder(tmp_path):
  return tmp_path / "checkpoints"


def _save(folder, commits, keep=3):
  store = CheckpointStore(folder, keep=keep)
  for number, state in commits:
    store.save(number, state, {"position": number, "seeds": [1, 2]})
  store.close()


def _restore(folder, like):
  store = CheckpointStore(folder, keep=3)
  try:
    return store.newest, store.restore(like), store.record()
  finally:
    store.close()


def _assert_same_bits(one, two):
  assert jax.tree.structure(one) == jax.tree.structure(two)
  for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_restored_state_has_the_bits_that_were_saved(folder, states):
  _save(folder, [(5, states[0])])
  newest, state, record = _restore(folder, states[1])
  assert newest == 5
  assert record == {"position": 5, "seeds": [1, 2]}
  _assert_same_bits(state, states[0])
  # Optimizer and counters are part of it.
  assert len(jax.tree.leaves(state.opt_state)) > 2
  assert (state.step, state.version, state.skipped) == (3, 3, 3)


def test_newest_commits_are_kept_and_the_newest_is_restored(folder, states):
  _save(folder, [(n, states[n % 2]) for n in range(1, 5)], keep=2)
  assert {p.name for p in folder.iterdir() if p.name.isdigit()} == {"3", "4"}
  newest, state, record = _restore(folder, states[0])
  assert (newest, record["position"]) == (4, 4)
  _assert_same_bits(state, states[0])


def test_numbers_are_ordered_as_numbers(folder, states):
  _save(folder, [(9, states[0]), (10, states[1])])
  newest, state, _ = _restore(folder, states[0])
  assert newest == 10
  _assert_same_bits(state, states[1])


def test_saving_goes_on_after_a_restore(folder, states):
  _save(folder, [(1, states[0])])
  _save(folder, [(1, states[1]), (2, states[1])])
  assert _restore(folder, states[0])[0] == 2
  shutil.rmtree(folder / "2")
  # The first commit is what it was: a number is written once.
  _, state, _ = _restore(folder, states[1])
  _assert_same_bits(state, states[0])


def test_folder_without_a_commit_is_named(folder, states):
  store = CheckpointStore(folder, keep=1)
  assert store.newest is None
  with pytest.raises(ValueError, match="checkpoints holds no checkpoint"):
    store.restore(states[0])
  store.close()


def _problem(folder, states):
  """What a restore complains about; None if it gives the second commit."""
  try:
    newest, state, record = _restore(folder, states[1])
  except ValueError as error:
    return str(error)
  assert (newest, record["position"]) == (2, 2)
  _assert_same_bits(state, states[0])
  return None


@_NOISY
@pytest.mark.usefixtures("orbax_noise")
def test_torn_commit_is_refused_by_name_or_whole(folder, states, tmp_path):
  """Whichever file is missing, no other values are ever handed out."""
  _save(folder, [(1, states[1]), (2, states[0])])
  files = [p for p in (folder / "2").rglob("*") if p.is_file()]
  assert len(files) > 4
  refused = []
  for number, file in enumerate(files):
    copy = tmp_path / f"copy{number}"
    shutil.copytree(folder, copy)
    (copy / file.relative_to(folder)).unlink()
    problem = _problem(copy, states)
    if problem:
      refused.append(file)
      assert problem.startswith(f"checkpoint 2 in {copy} can't be restored")
  # The arrays themselves are indispensable.
  largest = max(files, key=lambda p: p.stat().st_size)
  assert largest in refused


@_NOISY
@pytest.mark.usefixtures("orbax_noise")
def test_state_of_another_shape_is_refused(folder, states):
  _save(folder, [(1, states[0])])
  wider = ModelConfig(
    vocab_size=64,
    width=16,
    layers=1,
    heads=2,
    head_dim=8,
    expert_width=16,
    mtp_heads=0,
  )
  deeper = ModelConfig(
    vocab_size=64,
    width=32,
    layers=2,
    heads=2,
    head_dim=8,
    expert_width=16,
    mtp_heads=0,
  )
  for model in (wider, deeper):
    with pytest.raises(
      ValueError, match=r"checkpoint 1 in .* can't be restored"
    ):
      _restore(folder, _state(0, model))


@pytest.mark.parametrize("where", ["before", "while writing"])
def test_full_disk_is_an_error_and_leaves_the_last_commit(
  folder, states, where, monkeypatch
):
  _save(folder, [(1, states[0])])
  store = CheckpointStore(folder, keep=1)
  with monkeypatch.context() as patch:
    if where == "before":
      usage = shutil.disk_usage(folder)._replace(free=1000)
      patch.setattr(shutil, "disk_usage", lambda _: usage)
    else:
      full = OSError(errno.ENOSPC, "No space left on device")

      def fail(*_, **__):
        (folder / "2.orbax-checkpoint-tmp").mkdir()
        raise full

      patch.setattr(store._manager, "save", fail)
    with pytest.raises(OSError, match="disk full") as caught:
      store.save(2, states[1], {})
  assert caught.value.errno == errno.ENOSPC
  assert store.newest == 1
  assert not list(folder.glob("*tmp*"))
  store.save(2, states[1], {"position": 2})
  store.close()
  newest, state, _ = _restore(folder, states[0])
  assert newest == 2
  _assert_same_bits(state, states[1])
