import ctypes
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from arl_jax import records, types
from arl_jax.checkpoints import manifest, state_files
from arl_jax.checkpoints.store import CheckpointStore
from arl_jax.model import ModelConfig, transformer
from tests.checkpoints.commits import (
  NOISY,
  assert_is,
  assert_same_bits,
  names,
  restore,
  save,
  small,
)

CONFIG = ModelConfig(
  vocab_size=64,
  width=32,
  layers=1,
  heads=2,
  head_dim=8,
  expert_width=16,
  mtp_heads=0,
)


def _trained(seed):
  """All that a step changes: parameters, moments, counters; none is zero."""
  draw = np.random.default_rng(seed)
  params = jax.eval_shape(lambda: transformer.init(CONFIG, jax.random.key(0)))
  opt_state = jax.eval_shape(optax.adamw(0.1).init, params)
  state = {"params": params, "opt_state": opt_state}
  return jax.tree.map(
    lambda x: jnp.asarray(draw.integers(1, 99, x.shape), x.dtype), state
  )


def _group(group_id="1/q"):
  task = types.Task(task_id="q", prompt="How many?", truth={"answer": "4"})
  segment = types.Segment(
    ids=np.asarray([5, 6, 7], np.int32),
    roles=np.asarray([0, 1, 1], np.uint8),
    sampled=np.asarray([False, True, True]),
    behaviour_logp=np.asarray([0, -0.1, -1.7], np.float32),
    policy_version=np.asarray([-1, 3, 4], np.int32),
  )
  episode = types.Episode(
    task_id="q",
    rollout_index=0,
    segments=(segment,),
    events=(types.Event(turn=0, kind="final"),),
    stop_reason=types.StopReason.ANSWERED,
    outcome={"answer": "4"},
    turns=1,
    reward=types.Reward(total=1.0),
  )
  return types.Group(group_id=group_id, task=task, episodes=(episode,))


# What a commit holds.


def test_a_commit_holds_state_record_queue_and_lineage(folder):
  """Params, optimizer and counters of a real model, bit by bit."""
  state = _trained(0)
  record = {"position": 5, "seeds": [1, 2], "policy_version": 3, "nan": "x"}
  queue = [_group("1/q"), _group("2/q")]
  store = CheckpointStore(folder, keep=3)
  store.save(5, state, record, queue=queue)
  store.close()

  store = CheckpointStore(folder, keep=3)
  assert store.newest == 5
  assert store.record() == record
  commit = store.restore(_trained(1))
  store.close()
  assert (commit.number, commit.record, commit.skipped) == (5, record, ())
  assert_same_bits(commit.state, state)
  assert [records.to_json(g) for g in commit.queue] == [
    records.to_json(g) for g in queue
  ]


def test_any_pytree_comes_back_as_it_was(folder):
  state = {
    "keys": jax.random.split(jax.random.key(3), 4),
    "empty": jnp.zeros((0, 3), jnp.bfloat16),
    "empty_on_host": np.zeros((2, 0), np.float32),
    "wide": np.asarray([1 << 40, -1]),
    "scalar": np.float64(0.1),
    "tuple": (jnp.float8_e4m3fn(0.5), None, jnp.asarray([True, False])),
    "int4": jnp.arange(-3, 4, dtype=jnp.int4),
    "nothing": {},
  }
  store = CheckpointStore(folder, keep=3)
  store.save(1, state, {})
  commit = store.restore(jax.tree.map(lambda x: x, state))
  store.close()
  assert_same_bits(commit.state, state)
  for a, b in zip(*map(jax.tree.leaves, (commit.state, state)), strict=True):
    assert type(a) is type(b)


def test_lineage_grows_with_every_restore(folder):
  store = CheckpointStore(folder, keep=3)
  (first,) = store.lineage
  store.save(1, small(), {})
  store.close()

  store = CheckpointStore(folder, keep=3)
  commit = store.restore(small())
  assert commit.lineage == (first,)
  assert store.lineage[0] == first
  second = store.lineage[1]
  store.save(2, small(), {})
  # A roll-back within one process is a new run as well.
  store.restore(small(), number=1)
  assert store.lineage[0] == first
  assert len({*store.lineage, second}) == 3
  store.close()
  assert restore(folder).lineage == (first, second)


def test_like_may_depend_on_the_record(folder):
  save(folder, 4)
  seen = []

  def like(record):
    seen.append(record)
    return small()

  assert_is(restore(folder, like), 4)
  assert seen == [{"position": 4}]


def test_numbers_are_ordered_as_numbers(folder):
  save(folder, 9, 10)
  assert_is(restore(folder), 10)
  assert_is(restore(folder, number=9), 9)


def test_folder_without_the_commit_is_named(folder):
  store = CheckpointStore(folder, keep=1)
  assert store.newest is None
  assert store.numbers == []
  for read in (store.record, lambda: store.restore(small())):
    with pytest.raises(ValueError, match=r"checkpoints holds no checkpoint$"):
      read()
  store.save(3, small(), {}, wait=True)
  with pytest.raises(ValueError, match="holds no checkpoint 2, only 3"):
    store.restore(small(), number=2)
  store.close()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"keep": 0}, "keep is 0, must be at least 1"),
    ({"keep": 1, "keep_best": -1}, "keep_best is -1, must be at least 0"),
    ({"keep": 1, "quota_bytes": 0}, "quota_bytes is 0, must be at least 1"),
    ({"keep": 1, "identity": {"x": object()}}, "identity must hold JSON"),
  ],
)
def test_wrong_arguments_are_named(folder, arguments, message):
  with pytest.raises(ValueError, match=message):
    CheckpointStore(folder, **arguments)
  assert not folder.exists()


def test_what_cannot_be_saved_writes_nothing(folder):
  store = CheckpointStore(folder, keep=1)
  with pytest.raises(ValueError, match="record must hold JSON values"):
    store.save(1, small(), {"x": object()})
  with pytest.raises(ValueError, match="score is nan, must be finite"):
    store.save(1, small(), {}, score=float("nan"))
  with pytest.raises(ValueError, match="number is -1, must be at least 0"):
    store.save(-1, small(), {})
  assert names(folder) == []
  store.save(5, small(), {})
  with pytest.raises(ValueError, match="number is 4, must be above 5"):
    store.save(4, small(), {})
  store.close()
  assert names(folder) == ["5"]


# Asynchronous.


@pytest.fixture
def blocked(monkeypatch):
  """Until this event is set, no commit is sealed and published."""
  event = threading.Event()
  seal = manifest.seal

  def late(*args):
    assert event.wait(60)
    seal(*args)

  monkeypatch.setattr(manifest, "seal", late)
  yield event
  event.set()


def test_save_returns_before_it_is_written(folder, blocked):
  store = CheckpointStore(folder, keep=1)
  store.save(1, small(1), {"position": 1})
  assert store.newest is None
  blocked.set()
  store.wait()
  assert store.newest == 1
  store.save(2, small(2), {"position": 2}, wait=True)
  assert store.newest == 2
  store.close()
  assert_is(restore(folder), 2)


def _large(sharded):
  """16 MiB of each: more than is written while `save` returns."""
  x = jnp.arange(1 << 22, dtype=jnp.float32).reshape(2048, 2048)
  if sharded:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
  state = {"x": x, "y": x + 1, "host": np.arange(1 << 21, dtype=np.float64)}
  return jax.block_until_ready(state)


@pytest.fixture
def slow_writers(monkeypatch):
  """Orbax's threads get to the arrays only when this event is set."""
  from orbax.checkpoint._src.serialization import serialization

  event = threading.Event()
  write = serialization.async_serialize_from_host

  async def late(*args, **kwargs):
    assert event.wait(60)
    return await write(*args, **kwargs)

  monkeypatch.setattr(serialization, "async_serialize_from_host", late)
  yield event
  event.set()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_donated_state_is_stored_as_it_was(folder, sharded, slow_writers):
  state, expected = _large(sharded), _large(sharded)
  step = jax.jit(lambda s: jax.tree.map(lambda x: -x, s), donate_argnums=0)
  store = CheckpointStore(folder, keep=1)
  store.save(1, state, {})
  arrays = {k: state[k] for k in ("x", "y")}
  for _ in range(3):
    arrays = jax.block_until_ready(step(arrays))
  assert state["x"].is_deleted()  # Nothing holds on to it: it was donated.
  state["host"][:] = 0
  slow_writers.set()
  commit = store.restore(expected)
  store.close()
  assert_same_bits(commit.state, expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_no_memory_of_the_state_is_shared(folder, sharded, slow_writers):
  """The hard way: what XLA does to donated memory, done by hand."""
  state, expected = _large(sharded), _large(sharded)
  store = CheckpointStore(folder, keep=1)
  store.save(1, state, {})
  for x in (state["x"], state["y"]):
    for shard in x.addressable_shards:
      ctypes.memset(shard.data.unsafe_buffer_pointer(), 0xA5, shard.data.nbytes)
  slow_writers.set()
  commit = store.restore(expected)
  store.close()
  assert_same_bits(commit.state, expected)


def test_one_copy_is_held_and_placed_as_the_state():
  state = _large(sharded=True) | {"key": jax.random.key(1)}
  held = state_files.held(state)
  assert_same_bits(held, state)
  for name in ("x", "y", "key"):
    assert held[name].sharding == state[name].sharding
  # Orbax copies host arrays by itself.
  assert held["host"] is state["host"]


@pytest.mark.parametrize("where", ["save", "wait", "close", "restore"])
def test_an_error_in_the_background_comes_out(folder, where, monkeypatch):
  save(folder, 1)
  store = CheckpointStore(folder, keep=1)
  full = OSError(errno.ENOSPC, "No space left on device")
  with monkeypatch.context() as patch:

    def fail(*_):
      # An old commit outlives the failure of the new one.
      assert names(folder) == ["1", "2.partial"]
      raise full

    patch.setattr(manifest, "seal", fail)
    store.save(2, small(2), {"position": 2})
    calls = {
      "save": lambda: store.save(3, small(), {}),
      "wait": store.wait,
      "close": store.close,
      "restore": lambda: store.restore(small()),
    }
    with pytest.raises(
      OSError, match=r"write checkpoint 2 in .*full"
    ) as caught:
      calls[where]()
  assert caught.value.errno == errno.ENOSPC
  assert str(folder) in str(caught.value)
  assert names(folder) == ["1"]
  if where != "close":
    store.wait()  # It is told once.
    store.save(2, small(2), {"position": 2})
    store.close()
    assert_is(restore(folder), 2)


@NOISY
@pytest.mark.usefixtures("orbax_noise")
def test_what_orbax_cannot_write_is_an_error(folder):
  save(folder, 1)
  store = CheckpointStore(folder, keep=1)
  with pytest.raises(OSError, match=r"write checkpoint 2 .*uint4"):
    store.save(2, {"x": jnp.zeros(3, jnp.uint4)}, {}, wait=True)
  store.close()
  assert names(folder) == ["1"]


# Atomic.

_KILLED = """
import sys, pathlib
import jax.numpy as jnp
from arl_jax.checkpoints.store import CheckpointStore

def state(number):
  return {"x": jnp.full(1 << 16, number, jnp.float32), "n": jnp.int32(number)}

store = CheckpointStore(pathlib.Path(sys.argv[1]), keep=2, keep_best=1)
first = 0 if store.newest is None else store.restore(state(0)).number
for number in range(first + 1, first + 1000):
  store.save(number, state(number), {"n": number}, score=-abs(number - 7))
  print(number, flush=True)
"""


def test_who_only_reads_leaves_what_is_being_written(folder, blocked):
  blocked.set()
  save(folder, 1)
  blocked.clear()
  writer = CheckpointStore(folder, keep=1)
  writer.save(2, small(2), {"position": 2})
  limit = time.monotonic() + 60
  while not (partial := set(names(folder)) - {"1"}):
    assert time.monotonic() < limit
    time.sleep(0.01)
  assert_is(restore(folder, writes=False), 1)
  assert partial <= {*names(folder)}
  blocked.set()
  writer.close()
  assert names(folder) == ["2"]


@pytest.mark.slow
def test_kill_leaves_only_whole_commits(folder):
  draw = random.Random(0)
  last = 0
  for _ in range(3):
    child = subprocess.Popen(
      [sys.executable, "-c", _KILLED, str(folder)],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      env={**os.environ, "XLA_FLAGS": ""},
    )
    try:
      # When the second save has returned, the first is whole.
      assert child.stdout.readline()
      assert child.stdout.readline()
      time.sleep(draw.uniform(0.05, 0.6))
    finally:
      child.send_signal(signal.SIGKILL)
      child.wait()
      child.stdout.close()
    # Opening it sweeps what was being written or deleted.
    store = CheckpointStore(folder, keep=2, keep_best=1)
    assert names(folder) == sorted(map(str, store.numbers))
    # All but the last save had begun to be deleted only after a newer one.
    assert len(store.numbers) >= min(2, store.newest)
    assert store.newest >= last
    last = store.newest
    like = {"x": jnp.zeros(1 << 16, jnp.float32), "n": jnp.int32(0)}
    for number in store.numbers:
      commit = store.restore(like, number=number)
      assert commit.record == {"n": number}
      assert commit.state["n"] == number
      assert (commit.state["x"] == number).all()
    store.close()
  assert last >= 3


def test_leftovers_are_swept_and_other_files_stay(folder):
  save(folder, 1)
  for name in ("2.partial", "3.deleted", "notes", "x.partial"):
    (folder / name / "state").mkdir(parents=True)
  save(folder, 2)
  assert names(folder) == ["1", "2", "notes", "x.partial"]


def test_a_number_is_written_once(folder):
  save(folder, 1)
  store = CheckpointStore(folder, keep=3)
  store.save(1, small(8), {"position": 8})
  store.save(2, small(2), {"position": 2})
  store.save(2, small(9), {"position": 9})  # While that is being written.
  store.close()
  assert_is(restore(folder, number=1), 1)
  assert_is(restore(folder), 2)


# Meshes.


@pytest.mark.parametrize("abstract", [False, True])
def test_a_state_moves_to_another_mesh(folder, abstract):
  draw = np.random.default_rng(0)
  host = {
    "w": draw.normal(size=(16, 24)).astype(np.float32),
    "b": draw.normal(size=(16,)).astype(jnp.bfloat16),
  }

  def placed(shape, specs):
    mesh = jax.make_mesh(shape, ("a", "b"))
    return {
      name: jax.device_put(x, NamedSharding(mesh, specs[name]))
      for name, x in host.items()
    }

  spec = PartitionSpec
  first = placed((4, 2), {"w": spec("a", "b"), "b": spec()})
  store = CheckpointStore(folder, keep=1)
  store.save(1, first, {})
  for shape, specs in (
    ((2, 4), {"w": spec("a", "b"), "b": spec("b")}),
    ((8, 1), {"w": spec(None, "a"), "b": spec("a")}),
    ((1, 1), {"w": spec(), "b": spec()}),
  ):
    wanted = placed(shape, specs)
    like = wanted
    if abstract:
      like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        wanted,
      )
    state = store.restore(like).state
    assert_same_bits(state, wanted)
    for name, x in state.items():
      assert x.sharding == wanted[name].sharding
  store.close()
