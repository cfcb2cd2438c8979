"""The processes of one learner publish one version."""

import errno
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

from arl_jax.weights.storage import Place, Storage
from arl_jax.weights.together import Together

_ROOT = pathlib.Path(__file__).parents[2]


def pair(folder, timeout_s=60.0, attempt=1):
  storage = Storage(folder)
  return [
    Together(
      storage,
      storage.version(Place(1, 0)),
      process=k,
      processes=2,
      attempt=attempt,
      timeout_s=timeout_s,
    )
    for k in range(2)
  ]


def test_values_are_gathered_in_order(tmp_path):
  first, second = pair(tmp_path)
  other = threading.Thread(target=second.gather, args=("parts", {"b": 2}))
  other.start()
  assert first.gather("parts", {"a": 1}) == [{"a": 1}, {"b": 2}]
  other.join()
  first.follow("room")
  second.follow("room")


def test_who_waits_too_long_says_for_what(tmp_path):
  first, second = pair(tmp_path, timeout_s=0.1)
  with pytest.raises(OSError, match="until all have parts") as caught:
    first.gather("parts", 1)
  assert caught.value.errno == errno.ETIMEDOUT
  second.gather("parts", 2)
  with pytest.raises(OSError, match="until process 0 has room"):
    second.follow("room")
  with pytest.raises(OSError, match="until process 0 has published"):
    second.await_manifest()


def test_a_failure_of_one_is_one_of_all(tmp_path):
  first, second = pair(tmp_path)
  second.gather("parts", 2)
  second.fail("its disk is full")
  with pytest.raises(OSError, match="another process failed: its disk is full"):
    first.gather("files", None)
  # An attempt after that isn't misled.
  again, other = pair(tmp_path, attempt=2)
  other.gather("parts", 4)
  assert again.gather("parts", 3) == [3, 4]
  Storage(tmp_path).remove(Place(1, 0))
  with pytest.raises(OSError, match="gave this version up"):
    other.follow("room")


_TOGETHER = """
import json, sys
import jax
rank, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from jax.experimental import multihost_utils
from arl_jax.sharding import make_mesh, shardings
from arl_jax.weights import Publisher, Subscriber
from arl_jax.weights.manifest import checksum
from tests.weights import published
import numpy as np

def put(number, mesh):
  tree, places = published.weights(number), shardings(published.SPECS, mesh)
  return jax.tree.map(
    lambda x, place: jax.make_array_from_callback(
      x.shape, place, lambda i: np.asarray(x)[i]
    ),
    tree,
    places,
  )

writer, other = make_mesh(fsdp=4), make_mesh(fsdp=2, tensor=2)
publisher = Publisher(path, ["a"], base_every=3)
subscriber = Subscriber(path, published.like(other))
seen = []
for number in range(5):
  publisher.publish(put(number, writer), number)
  seen.append(str(publisher.wait()))
  fetched = subscriber.fetch()
  subscriber.verify(fetched.params)
  right = jax.tree.leaves(published.rounded(published.weights(number)))
  for x, whole in zip(jax.tree.leaves(fetched.params), right, strict=True):
    for shard in x.addressable_shards:
      assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
  multihost_utils.sync_global_devices(str(number))
try:
  Publisher(path, ["b"], lease_s=20)
except OSError as error:
  seen.append(error.errno)
subscriber.close()
publisher.close()
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_two_processes_publish_and_read(tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
  flags = "--xla_force_host_platform_device_count=2"
  jobs = [
    subprocess.Popen(
      [sys.executable, "-c", _TOGETHER, str(rank), str(port), str(tmp_path)],
      cwd=_ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env={**os.environ, "XLA_FLAGS": flags},
    )
    for rank in range(2)
  ]
  try:
    ends = [job.communicate(timeout=150) for job in jobs]
  finally:
    for job in jobs:
      job.kill()
  assert [job.returncode for job in jobs] == [0, 0], ends
  seen = [json.loads(out.splitlines()[-1]) for out, _ in ends]
  assert seen[0] == seen[1]
  assert [x.partition(" ")[0] for x in seen[0][:5]] == [*"01234"]
  assert seen[0][5] == errno.EBUSY
  (place, *_) = Storage(tmp_path).places()
  found = Storage(tmp_path).manifest(place)
  assert len(found.files) == 4
