"""Mixtures of data sets that resume exactly."""

import itertools
import json
import multiprocessing
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from arl_jax.data.mixture import Mixture
from tests.data.files import chats, opened

ROOT = pathlib.Path(__file__).parents[2]
CHATS = ROOT / "examples" / "data" / "chats.jsonl"


class Numbers:
  """`size` examples that say what they are; counts reads."""

  def __init__(self, name, size):
    self.name, self.size, self.reads = name, size, 0
    self.digest = f"{name}{size}"

  def __len__(self):
    return self.size

  def __getitem__(self, index):
    self.reads += 1
    return {"source": self.name, "index": index}


def take(mixture, count):
  return [(e["source"], e["index"]) for e in itertools.islice(mixture, count)]


def pair():
  return [Numbers("a", 50), Numbers("b", 20)]


class TestMixture:
  def test_each_source_gives_each_example_once_an_epoch(self):
    drawn = take(Mixture(pair(), [1, 1], seed=0), 400)
    orders = {}
    for name, size in (("a", 50), ("b", 20)):
      stream = [i for n, i in drawn if n == name]
      assert len(stream) == 200
      epochs = [stream[k : k + size] for k in range(0, 200, size)]
      assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
      assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
      orders[name] = epochs
    assert orders["a"][0] != sorted(orders["a"][0])

  def test_shares_follow_the_weights(self):
    sources = [*pair(), Numbers("c", 90)]
    drawn = [n for n, _ in take(Mixture(sources, [3, 0.5, 1.5], seed=0), 500)]
    assert [drawn.count(n) for n in "abc"] == [300, 50, 150]
    # Evenly: any 50 in a row are as the whole, to one of each.
    for k in range(0, 450, 7):
      part = drawn[k : k + 50]
      counts = np.array([part.count(n) for n in "abc"])
      assert abs(counts - [30, 5, 15]).max() <= 1

  def test_follows_the_seed(self):
    first = take(Mixture(pair(), [1, 1], seed=3), 100)
    assert take(Mixture(pair(), [1, 1], seed=3), 100) == first
    assert take(Mixture(pair(), [1, 1], seed=4), 100) != first

  def test_sources_and_seeds_have_orders_of_their_own(self):
    # Not those of a neighbour an epoch later.
    orders = set()
    for seed in range(5):
      twins = [Numbers("a", 30), Numbers("b", 30)]
      drawn = take(Mixture(twins, [1, 1], seed=seed), 180)
      for name in "ab":
        stream = [i for n, i in drawn if n == name]
        orders |= {tuple(stream[k : k + 30]) for k in (0, 30, 60)}
    assert len(orders) == 5 * 2 * 3

  @pytest.mark.parametrize("size", [1, 2])
  def test_smallest_sources(self, size):
    drawn = take(Mixture([Numbers("a", size)], [1], seed=0), 4)
    assert sorted(i for _, i in drawn) == sorted([*range(size)] * (4 // size))

  @pytest.mark.parametrize("done", [0, 1, 39, 40, 41, 100, 101, 250])
  def test_resumes_exactly(self, done):
    # Source b's epoch ends after 40, source a's after 100.
    whole = take(Mixture(pair(), [1, 1], seed=7), done + 100)
    first = Mixture(pair(), [1, 1], seed=7)
    assert take(first, done) == whole[:done]
    state = json.loads(json.dumps(first.get_state()))
    resumed = Mixture(pair(), [1, 1], seed=7)
    # Whatever it did before.
    take(resumed, 13)
    resumed.set_state(state)
    assert take(resumed, 100) == whole[done:]

  def test_resumes_in_another_process(self, tmp_path):
    paths = [chats(tmp_path / "a", map(str, range(30))), CHATS]
    code = (
      "import json, sys, itertools\n"
      "from arl_jax.data.sources import SourceConfig, open_source\n"
      "from arl_jax.data.mixture import Mixture\n"
      "sources = [open_source(SourceConfig(path=p)) for p in sys.argv[2:]]\n"
      "mixture = Mixture(sources, [1, 2], seed=5)\n"
      "mixture.set_state(json.loads(sys.argv[1]))\n"
      "print(json.dumps(list(itertools.islice(mixture, 100))))\n"
    )
    mixture = Mixture([opened(p) for p in paths], [1, 2], seed=5)
    for _ in range(95):
      next(mixture)
    state = json.dumps(mixture.get_state())
    done = subprocess.run(
      [sys.executable, "-W", "error", "-c", code, state, *map(str, paths)],
      cwd=ROOT,
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(itertools.islice(mixture, 100))

  def test_resuming_reads_nothing_again(self):
    sources = [Numbers("a", 10**9), Numbers("b", 10**8)]
    mixture = Mixture(sources, [1, 1], seed=0)
    state = mixture.get_state() | {"next": 10**12}
    mixture.set_state(state)
    take(mixture, 10)
    assert [s.reads for s in sources] == [5, 5]
    assert mixture.get_state()["next"] == 10**12 + 10
    assert len(json.dumps(state)) < 200

  def test_leaves_no_threads_or_processes(self):
    before = threading.active_count()
    take(Mixture(pair(), [1, 1], seed=0), 100)
    assert threading.active_count() == before
    assert not multiprocessing.active_children()

  def test_a_failed_read_isn_t_skipped(self):
    source = Numbers("a", 30)
    mixture = Mixture([source], [1], seed=0)
    whole = take(Mixture([Numbers("a", 30)], [1], seed=0), 3)
    take(mixture, 1)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(Numbers, "__getitem__", lambda *_: 1 / 0)
      with pytest.raises(ZeroDivisionError):
        next(mixture)
    assert take(mixture, 2) == whole[1:]

  @pytest.mark.parametrize(
    ("change", "problem"),
    [
      ({"sources": ["a50", "b21"]}, r"of sources \['a50', 'b21'\], this run"),
      ({"sources": ["b20", "a50"]}, "of sources"),
      ({"weights": [1, 2]}, r"of weights \[1, 2\], this run has \[1\.0, 1\.0"),
      ({"seed": 1}, "of seed 1, this run has 0"),
      ({"next": -1}, "has next -1"),
      ({"next": 1.0}, r"has next 1\.0"),
      ({"next": True}, "has next True"),
      ({"next": 10**30}, "has next 1000"),
      ({"more": 1}, "must have the fields next, seed, weights, sources"),
    ],
  )
  def test_positions_at_fault(self, change, problem):
    mixture = Mixture(pair(), [1, 1], seed=0)
    take(mixture, 5)
    with pytest.raises(ValueError, match=problem):
      mixture.set_state(mixture.get_state() | change)
    assert mixture.get_state()["next"] == 5
    with pytest.raises(ValueError, match="must have the fields"):
      mixture.set_state({"next": 3})
    with pytest.raises(ValueError, match="must have the fields"):
      mixture.set_state(None)

  @pytest.mark.parametrize(
    ("sources", "weights", "seed", "problem"),
    [
      ([], [], 0, "0 sources with 0 weights"),
      (pair(), [1], 0, "2 sources with 1 weights"),
      (pair(), [1, 0], 0, r"weights\[1\] is 0, not > 0"),
      (pair(), [1, float("nan")], 0, r"weights\[1\] is nan"),
      ([Numbers("a", 0)], [1], 0, r"sources\[0\] holds no example"),
      (pair(), [1, 1], -1, "seed is -1, not >= 0"),
    ],
  )
  def test_arguments_at_fault(self, sources, weights, seed, problem):
    with pytest.raises(ValueError, match=problem):
      Mixture(sources, weights, seed=seed)
