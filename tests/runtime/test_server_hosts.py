"""A replica of two processes, for real: what it samples, and its death."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import time

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.actors.jobs import Interrupted
from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.local_processes import LocalProcesses, assign_addresses
from arl_jax.model import init, token_logprobs
from arl_jax.observability import metrics
from arl_jax.problems.problem import make_problem
from arl_jax.rollout.engine import Engine
from arl_jax.rollout.request import Sampling
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.runtime.config import Config
from arl_jax.runtime.server_hosts import Misconfigured, ServerHosts
from arl_jax.serving.client import RemoteClient
from arl_jax.serving.listening import listen
from arl_jax.sharding import make_mesh
from arl_jax.weights import Publisher
from launch import supervise

PROBLEM = "tests.actors.echo_problem:Problem"
# Compiled faster, in the same order of operations.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
PATIENCE = 120.0


def make_config(folder):
  config = Config(problem=PROBLEM, run_dir=str(folder / "run"))
  model = config.model
  model.layers, model.width, model.heads, model.kv_heads = 1, 32, 4, 2
  model.head_dim, model.expert_width, model.experts = 8, 16, 4
  engine = config.engine
  engine.max_concurrent_decodes, engine.prefill_rows = 4, 2
  engine.prefill_chunk, engine.decode_steps = 16, 2
  engine.draft_tokens, engine.draft_adaptive = 1, False
  # Two devices of each process.
  mesh = config.serve_mesh
  mesh.fsdp, mesh.expert, mesh.tensor = -1, 2, 2
  config.weights.dtype = "float32"
  config.agent.token_budget = 100
  config.agent.soft_threshold, config.agent.hard_threshold = 60, 80
  config.cluster = ClusterConfig(
    actors=1, server_hosts=2, lost_seconds=15.0, patience=PATIENCE
  )
  config.resolve()
  assign_addresses(config.cluster)
  return config


class Replica:
  """Its processes, and the weights that it follows."""

  def __init__(self, folder, config):
    self.config, self.url = config, config.cluster.replicas
    path = folder / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    self.logs = folder / "logs"
    self.processes = LocalProcesses(path, self.logs)
    self.handles = []
    vocab = make_problem(config).renderer.tokenizer.vocab_size
    self.model = dataclasses.replace(config.model, vocab_size=vocab)
    self.params = {i: init(self.model, jax.random.key(i)) for i in (1, 2)}
    self.publisher = Publisher(config.weights.folder, ("run",), dtype="float32")
    self.publish(1)

  def publish(self, version):
    self.publisher.publish(self.params[version], version)
    self.publisher.wait()

  def start(self):
    self.handles = [
      self.processes.start("server", i, resume=False) for i in range(2)
    ]
    self.wait_until(lambda: self.load()["state"] == "serving", "readiness")
    return self

  def text(self):
    logs = sorted(self.logs.glob("*.log")) if self.logs.exists() else []
    return "\n".join(log.read_text() for log in logs)[-6000:]

  def load(self):
    try:
      found = httpx.get(f"{self.url}/admin/load", timeout=5.0).json()
    except httpx.TransportError:
      found = {}
    return {"state": "", "version": -1, **found}

  def wait_until(self, true, what, seconds=PATIENCE):
    limit = time.monotonic() + seconds
    while not true():
      ended = [h.poll() for h in self.handles]
      assert ended == [None] * len(ended), self.text()
      assert time.monotonic() < limit, f"no {what}: {self.text()}"
      time.sleep(0.05)

  def wait_until_ended(self, seconds):
    limit = time.monotonic() + seconds
    while any(h.poll() is None for h in self.handles):
      assert time.monotonic() < limit, self.text()
      time.sleep(0.02)
    return [h.poll() for h in self.handles]

  def close(self):
    for handle in self.handles:
      handle.kill()
    self.wait_until_ended(20)
    self.publisher.close()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
  """Of processes: two devices each, and what is compiled is shared."""
  compiled = tmp_path_factory.mktemp("compiled")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    devices = "--xla_force_host_platform_device_count=2"
    patch.setenv("XLA_FLAGS", f"{FLAGS} {devices}")
    yield


@pytest.fixture(scope="module")
def replica(environment, tmp_path_factory):
  folder = tmp_path_factory.mktemp("replica")
  with contextlib.closing(Replica(folder, make_config(folder))) as found:
    yield found.start()


def prompt(length, seed, vocab):
  return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def hows(vocab):
  """Session, prompt, sampling: two prompts begin alike, over several chunks."""
  same = prompt(30, 1, vocab)
  return [
    ("a", [*same, 3], {"seed": 5, "max_tokens": 20}),
    ("b", [*same, 4, 5], {"seed": 6, "max_tokens": 9, "temperature": 0.7}),
    ("c", prompt(4, 2, vocab), {"seed": 7, "max_tokens": 17}),
    ("d", prompt(18, 3, vocab), {"seed": 8, "max_tokens": 11}),
  ]


def turn(ids, sampled):
  return [*ids, *sampled, 1, 2], {"seed": 9, "max_tokens": 8}


async def remote(replica):
  """Four requests at once, then a second turn, then one that is given up."""
  requests = hows(replica.model.vocab_size)
  async with RemoteClient(replica.url, patience=PATIENCE) as client:
    found = await asyncio.gather(
      *(client.sample(s, ids, stop_ids=(), **how) for s, ids, how in requests)
    )
    ids, how = turn(requests[0][1], found[0].ids.tolist())
    found.append(await client.sample("a", ids, stop_ids=(), **how))
    given_up = asyncio.create_task(
      client.sample("e", ids[:3], stop_ids=(), seed=1, max_tokens=90)
    )
    await asyncio.sleep(0.2)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    # Its slot goes on for others, as if it had not been.
    found.append(await client.sample("e", ids[:5], stop_ids=(), **how))
  return found


def local(replica):
  """The same by one device of this process."""
  config = replica.config
  engine = Engine(
    replica.model, config.engine, max_length=config.agent.token_budget + 1
  )
  scheduler = Scheduler(engine, engine.place(replica.params[1]), 1)

  def run(requests):
    made = [
      scheduler.submit(s, ids, Sampling(**how)) for s, ids, how in requests
    ]
    while scheduler.busy:
      scheduler.step()
    return [r.result for r in made]

  requests = hows(replica.model.vocab_size)
  found = run(requests)
  ids, how = turn(requests[0][1], found[0].ids.tolist())
  found += run([("a", ids, how)])
  return found + run([("e", ids[:5], how)])


@pytest.mark.slow
def test_it_samples_what_one_device_does(replica):
  found, expected = asyncio.run(remote(replica)), local(replica)
  assert len(found) == len(expected) == 6
  for ours, theirs in zip(found, expected, strict=True):
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.versions.tolist() == theirs.versions.tolist()
    np.testing.assert_allclose(ours.logp, theirs.logp, atol=1e-5, rtol=0)
  load = replica.load()
  # The second turn went on from the first one's cache.
  assert load["reused_tokens"] > 0


@pytest.mark.slow
def test_new_weights_come_amid_requests_and_an_idle_replica_waits(replica):
  vocab, samples = replica.model.vocab_size, []

  async def main():
    async with RemoteClient(replica.url, patience=PATIENCE) as client:

      async def keep_asking(name):
        while not samples or replica.load()["version"] < 2:
          ids = prompt(3, len(samples), vocab)
          found = await client.sample(
            name, ids, stop_ids=(), seed=len(samples), max_tokens=90
          )
          samples.append((ids, found))

      asking = [asyncio.create_task(keep_asking(f"s{i}")) for i in range(3)]
      await asyncio.sleep(0.3)
      await asyncio.to_thread(replica.publish, 2)
      await asyncio.gather(*asking)

  asyncio.run(main())
  mixed = [s for s in samples if len({*s[1].versions.tolist()}) > 1]
  assert mixed
  for ids, found in mixed:
    row = jnp.asarray([[*ids, *found.ids.tolist()]], jnp.int32)
    for version, params in replica.params.items():
      logp = token_logprobs(params, replica.model, row)[0]
      logp = np.asarray(logp)[0, len(ids) :]
      of_it = found.versions == version
      np.testing.assert_allclose(
        found.logp[of_it], logp[of_it], atol=2e-4, rtol=0
      )
  # Beyond all time limits of signs of life, were they those of a call.
  time.sleep(2.0)
  assert [h.poll() for h in replica.handles] == [None, None]


@pytest.mark.slow
def test_killing_one_host_ends_the_replica(replica):
  began = time.monotonic()
  os.kill(replica.handles[1].pid, signal.SIGKILL)
  first, second = replica.wait_until_ended(replica.config.cluster.lost_seconds)
  assert second == -signal.SIGKILL
  assert first not in (0, 1, 2), replica.text()
  # The connection tells; nobody has to be found lost.
  assert time.monotonic() - began < 5
  assert "host 1 is gone" in replica.text()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_goes_on_when_a_replica_loses_a_host(environment, tmp_path):
  config = make_config(tmp_path)
  config.problem = "tests.runtime.seeded_problem:Problem"
  # Nothing that takes long to compile.
  config.model.experts, config.model.dense_width = 0, 16
  config.model.mtp_heads = config.engine.draft_tokens = 0
  config.serve_mesh.expert = 1
  config.rl.steps, config.rl.tasks_per_step, config.rl.group_size = 4, 2, 2
  config.rl.max_staleness = 1
  config.learner.microbatches, config.learner.microbatch_tokens = 1, 640
  config.warm_start.steps = config.warm_start.opening_steps = 0
  run_dir, killed = pathlib.Path(config.run_dir), []

  def steps():
    path = run_dir / "metrics.jsonl"
    return [x["step"] for x in metrics.read(path)] if path.exists() else []

  def kill_a_host():
    if not killed and len(steps()) >= 2:
      killed.append(pid_of("--role=server", "--index=1"))
      os.kill(killed[0], signal.SIGKILL)
    return False

  code = supervise.run_all(config, "local", [], kill_a_host)
  logs = {
    name: (run_dir.parent / f"run.logs/{name}.log").read_text()
    for name in ("server-0", "server-1", "actor-0")
  }
  assert (code, steps()) == (0, [1, 2, 3, 4]), logs
  assert killed
  # Both were started again; the actor's requests found the new one.
  starts = [logs[name].count("-- started") for name in sorted(logs)]
  assert starts == [1, 2, 2], logs
  assert "host 1 is gone" in logs["server-0"]
  # Asked to stop in the end, both did.
  assert logs["server-1"].count("error:") == 0


def pid_of(*words):
  """The pid of this process's child with these words in its command."""
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      command = (path / "cmdline").read_text().split("\0")
      parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
    except (FileNotFoundError, ProcessLookupError):
      continue
    if int(parent) == os.getpid() and {*words} <= {*command}:
      return int(path.name)
  raise AssertionError(f"no process {words}")


@pytest.mark.parametrize(
  ("changes", "index", "says"),
  [
    ({"server_hosts": 2}, 0, "server_coordinators is empty"),
    (
      {"server_hosts": 2, "server_coordinators": "a:1"},
      2,
      "--index is 2, but cluster.servers is 1 and cluster.server_hosts 2",
    ),
  ],
)
def test_a_process_that_cannot_be_is_refused(changes, index, says):
  with pytest.raises(ValueError, match=says):
    ServerHosts(ClusterConfig(**changes), index)


@pytest.mark.parametrize(
  ("error", "code"),
  [
    (Misconfigured("serve_mesh has no device of host 1"), 2),
    (OSError("no such host"), 1),
    (Interrupted(), 3),
  ],
)
def test_how_a_host_of_several_ends_says_what_to_do(monkeypatch, error, code):
  ended = []
  monkeypatch.setattr(os, "_exit", ended.append)
  cluster = ClusterConfig(
    actors=1, server_hosts=2, server_coordinators="127.0.0.1:1"
  )
  # The process would be gone at the first one.
  ServerHosts(cluster, 1).__exit__(type(error), error, None)
  assert ended[0] == code


def test_an_address_that_cannot_be_listened_on_is_refused():
  def enter(coordinator, **changes):
    cluster = ClusterConfig(
      actors=1, server_hosts=2, server_coordinators=coordinator, **changes
    )
    ServerHosts(cluster, 0).__enter__()

  with pytest.raises(ValueError, match=r"cluster\.host is '127\.0\.0\.1'"):
    enter("192.0.2.2:7001")
  with contextlib.closing(listen("127.0.0.1", 0, "port")) as other:
    port = other.getsockname()[1]
    says = rf"cluster\.server_coordinators {port} of 127\.0\.0\.1 can't be had"
    with pytest.raises(OSError, match=says):
      enter(f"127.0.0.1:{port}")


def test_a_mesh_without_devices_of_some_host_is_refused():
  hosts = ServerHosts(
    ClusterConfig(actors=1, server_hosts=2, server_coordinators="a:1"), 1
  )
  # All devices here are process 0's.
  with pytest.raises(ValueError, match=r"serve_mesh has no device of host 1"):
    hosts.check(make_mesh(fsdp=jax.device_count()))


def test_a_process_alone_joins_nothing():
  with ServerHosts(ClusterConfig(servers=3), 2) as hosts:
    assert (hosts.replica, hosts.index, hosts.first) == (2, 0, True)
