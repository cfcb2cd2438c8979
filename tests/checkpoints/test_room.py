"""Which commits stay, and what goes to make room for the next."""

import errno
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.checkpoints.store import CheckpointStore
from tests.checkpoints.commits import assert_is, names, restore, save, small


def test_newest_commits_stay(folder):
  save(folder, 1, 2, 3, 4, keep=2)
  assert names(folder) == ["3", "4"]


def test_best_commits_stay_besides(folder):
  scores = [None, 5.0, 1.0, 7.0, None, 6.0, -1.0, None]
  save(folder, *range(1, 9), keep=2, keep_best=2, scores=scores)
  # The newest two, and those with 7 and 6.
  assert names(folder) == ["4", "6", "7", "8"]
  assert_is(restore(folder, number=4), 4)


def test_of_equal_scores_the_later_is_better(folder):
  save(folder, 1, 2, 3, 4, keep=1, keep_best=1, scores=[2, 2, 1, 0])
  assert names(folder) == ["2", "4"]


def test_no_score_is_never_best(folder):
  save(folder, 1, 2, 3, keep=1, keep_best=2, scores=[-9.0, None, None])
  assert names(folder) == ["1", "3"]


def test_commits_given_up_by_a_restore_make_way(folder):
  save(folder, 1, 2, 3)
  store = CheckpointStore(folder, keep=3)
  store.restore(small(), number=1)
  store.save(1, small(9), {"position": 9})  # There already, nothing changes.
  store.close()
  assert names(folder) == ["1", "2", "3"]

  store = CheckpointStore(folder, keep=3)
  store.restore(small(), number=1)
  store.save(2, small(20), {"position": 20})
  store.close()
  assert names(folder) == ["1", "2"]
  assert restore(folder).record == {"position": 20}


def test_a_quota_takes_the_oldest_first(folder):
  draw = np.random.default_rng(0)
  state = {"x": jnp.asarray(draw.normal(size=1 << 18), jnp.float32)}
  # A commit takes 1 MiB, and may take 2: three of them fit, and one to come.
  store = CheckpointStore(folder, keep=9, keep_best=1, quota_bytes=9 << 19)
  for number, score in ((1, 0.0), (2, 9.0), (3, None), (4, None)):
    store.save(number, state, {"position": number}, score=score)
  store.wait()
  assert store.numbers == [2, 3, 4]
  store.save(5, state, {}, wait=True)
  assert store.numbers == [2, 4, 5]
  store.close()
  taken = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
  assert taken <= 9 << 19

  # Now the new one doesn't fit beside what must stay: the best and the newest.
  store = CheckpointStore(folder, keep=9, keep_best=1, quota_bytes=7 << 19)
  with pytest.raises(
    OSError, match=r"write checkpoint 6 in .* needs up to \d+ .* 3670016 bytes"
  ) as caught:
    store.save(6, state, {})
  assert caught.value.errno == errno.EDQUOT
  assert names(folder) == ["2", "4", "5"]
  # Were the newest damaged, the one before would have to stay.
  (folder / "5" / "queue.json").write_bytes(b"")
  store.close()
  store = CheckpointStore(folder, keep=9, quota_bytes=7 << 19)
  store.save(6, state, {}, wait=True)
  assert store.numbers == [4, 6]
  store.close()


def test_a_full_disk_is_found_beforehand(folder, monkeypatch):
  save(folder, 1)
  store = CheckpointStore(folder, keep=1)
  with monkeypatch.context() as patch:
    usage = shutil.disk_usage(folder)._replace(free=1000)
    patch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"disk full \(1000 bytes free") as caught:
      store.save(2, small(2), {})
  assert caught.value.errno == errno.ENOSPC
  assert names(folder) == ["1"]
  store.save(2, small(2), {"position": 2})
  store.close()
  assert_is(restore(folder), 2)
