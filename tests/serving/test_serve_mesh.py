"""`launch.serve` on eight devices serves what it does on one."""

import dataclasses

import jax
import numpy as np
import pytest

from arl_jax.rollout.request import Sampling
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.rollout.slot_engine import SlotEngine
from arl_jax.serving.assembly import assemble
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.serve_config import ServeConfig
from arl_jax.sharding import MeshConfig
from arl_jax.weights import Publisher
from tests.serving.programs import write_checkpoint


def config(folder, mesh, weights=""):
  made = ServeConfig(checkpoint=str(folder), max_length=64, serve_mesh=mesh)
  made.engine.max_concurrent_decodes, made.engine.prefill_chunk = 4, 16
  made.serving = ServingConfig(port=0, grpc_port=-1, weights=str(weights))
  return made


def sampled(scheduler):
  requests = [
    scheduler.submit(str(i), ids, Sampling(max_tokens=12, seed=i))
    for i, ids in enumerate(([*b"a prompt"], [*b"another one"]))
  ]
  while scheduler.busy:
    scheduler.step()
  return [r.result for r in requests]


@pytest.mark.slow
def test_what_is_served_is_the_same(tmp_path, monkeypatch):
  # What isn't called needs no compiling.
  monkeypatch.setattr(SlotEngine, "warm_up", lambda self, params: None)
  params = write_checkpoint(tmp_path / "model")
  publisher = Publisher(tmp_path / "weights", ("run",), dtype="float32")
  publisher.publish(jax.tree.map(lambda x: 1.1 * x, params), 3)
  publisher.close()
  found = []
  for mesh, devices in ((MeshConfig(fsdp=1), 1), (MeshConfig(tensor=2), 8)):
    server = assemble(
      config(tmp_path / "model", mesh, weights=tmp_path / "weights")
    )
    # As its thread would.
    scheduler: Scheduler = server._service._make_scheduler()
    server._socket.close()
    leaves = jax.tree.leaves(scheduler._weights.of([Version(3)]))
    assert {len(x.sharding.device_set) for x in leaves} == {devices}
    # Split, not copied.
    split = [x for x in leaves if not x.sharding.is_fully_replicated]
    assert bool(split) == (devices > 1)
    found.append(sampled(scheduler))
  for ours, theirs in zip(*found, strict=True):
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.versions.tolist() == theirs.versions.tolist() == [3] * 12
    np.testing.assert_allclose(ours.logp, theirs.logp, atol=1e-5, rtol=0)


@dataclasses.dataclass
class Version:
  version: int


@pytest.mark.parametrize(
  ("mesh", "says"),
  [
    (MeshConfig(fsdp=3), r"serve_mesh \{.*'fsdp': 3.*\} does not fit"),
    (MeshConfig(fsdp=-1, tensor=3), r"serve_mesh \{.* does not fit 8 devices"),
    (MeshConfig(fsdp=0), "serve_mesh .*sizes are >= 1"),
    (MeshConfig(fsdp=-1, data=-1), "serve_mesh .*at most one is -1"),
  ],
)
def test_meshes_that_cannot_be_are_refused(tmp_path, mesh, says):
  write_checkpoint(tmp_path)
  mesh.data *= 4 if mesh.fsdp == 3 else 1
  with pytest.raises(ValueError, match=says):
    assemble(config(tmp_path, mesh))
