import errno
import json
import os
import socket
import subprocess
import sys

import pytest

from arl_jax.checkpoints.failure import DamagedError
from arl_jax.checkpoints.first_process import from_first


def test_alone_a_call_is_a_call():
  assert from_first(lambda: 3) == 3
  with pytest.raises(DamagedError, match="cut"):
    from_first(lambda: _fail(DamagedError("cut")))


def _fail(error):
  raise error


_TOGETHER = """
import json, pathlib, sys
import jax, numpy as np
rank, port, path = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from arl_jax.checkpoints.store import CheckpointStore

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
whole = np.arange(32, dtype=np.float32).reshape(8, 4)

def state(number):
  place = NamedSharding(mesh, PartitionSpec("a", "b"))
  x = jax.make_array_from_callback((8, 4), place, lambda i: whole[i] + number)
  return {"x": x, "n": np.int64(number)}

def good(commit):
  parts = commit.state["x"].addressable_shards
  assert len(parts) == 2
  for part in parts:
    assert (np.asarray(part.data) == whole[part.index] + commit.number).all()
  return commit.number == commit.state["n"] == commit.record["n"]

store = CheckpointStore(path, keep=2, keep_best=1, quota_bytes=1 << 28)
seen = [store.lineage]
for number in range(1, 5):
  store.save(number, state(number), {"n": number}, score=-number)
store.wait()
seen.append(store.numbers)
assert good(store.restore(state(0)))
seen.append(store.lineage)
if rank == 0:
  (path / "4" / "queue.json").write_text("")
multihost_utils.sync_global_devices("damaged")
commit = store.restore(state(0), fall_back=True)
assert good(commit)
seen += [commit.number, commit.skipped]
store.save(4, state(4), {"n": 4}, wait=True)
assert good(store.restore(state(0)))
small = CheckpointStore(path, keep=2, quota_bytes=100)
try:
  small.save(9, state(9), {})
except OSError as error:
  seen.append([error.errno, str(error)])
small.close()
store.close()
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_processes_of_one_job_agree(tmp_path):
  folder = tmp_path / "checkpoints"
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
  flags = "--xla_force_host_platform_device_count=2"
  jobs = [
    subprocess.Popen(
      [sys.executable, "-c", _TOGETHER, str(rank), str(port), str(folder)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env={**os.environ, "XLA_FLAGS": flags},
    )
    for rank in range(2)
  ]
  try:
    ends = [job.communicate(timeout=120) for job in jobs]
  finally:
    for job in jobs:
      job.kill()
  assert [job.returncode for job in jobs] == [0, 0], ends
  seen = [json.loads(out.splitlines()[-1]) for out, _ in ends]
  assert seen[0] == seen[1]
  lineage, numbers, grown, number, skipped, (code, _) = seen[0]
  assert (len(lineage), len(grown), grown[:1]) == (1, 2, lineage)
  # The newest two, and the best.
  assert (numbers, number, code) == ([1, 3, 4], 3, errno.EDQUOT)
  assert "queue.json has 0 bytes, 2 were written" in skipped[0]
