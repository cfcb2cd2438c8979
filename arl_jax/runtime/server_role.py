"""A replica of a run: samples from the newest weights that were published."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from arl_jax import sharding
from arl_jax.actors.jobs import Interrupted
from arl_jax.cluster.heartbeat import Heartbeat
from arl_jax.model import transformer
from arl_jax.model.config import ModelConfig
from arl_jax.observability import provenance
from arl_jax.problems.problem import make_problem
from arl_jax.rollout.engine import Engine
from arl_jax.rollout.scheduler_config import SchedulerConfig
from arl_jax.rollout.slot_engine import SlotEngine
from arl_jax.runtime import distributed_job
from arl_jax.runtime.config import Config
from arl_jax.runtime.server_hosts import (
  Misconfigured,
  ServerHosts,
  end_process,
)
from arl_jax.serving.assembly import engine_mesh, scheduler_maker
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.follower import Follower
from arl_jax.serving.led_engine import LedEngine, LedSubscriber
from arl_jax.serving.server import Server
from arl_jax.serving.service import Load, Service
from arl_jax.weights import Subscriber

# Between two looks at what the service does, and for new weights.
_LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.2
# That running requests get to end in; and, a step of the engine included, that
# the other hosts wait for the first one once they are all asked to stop.
_DRAIN_SECONDS, _STOP_SECONDS = 5.0, 12.0


def run(config: Config, index: int, should_stop: Callable[[], bool]) -> None:
  """Serves until asked to stop.

  Args:
    config: of the run, resolved.
    index: of the process; that of its replica is index //
      `cluster.server_hosts`, whose address is that of `cluster.replicas`.
    should_stop: asked a few times a second.

  Raises:
    ValueError: a field that can't be.
    Interrupted: it was asked to stop before there were all hosts.
    TimeoutError: no weights were published in time.
    OSError: the port is taken.
  """
  with contextlib.ExitStack() as stack:
    heartbeat = Heartbeat(config.cluster, "server", index)
    stack.enter_context(heartbeat)

    def on_wait() -> None:
      heartbeat.progress()
      if should_stop():
        raise Interrupted

    hosts = ServerHosts(config.cluster, index, on_wait=on_wait)
    _address(config, hosts.replica)
    # Before anything else asks for the devices.
    stack.enter_context(hosts)
    try:
      parts = _Parts(config, hosts)
    except ValueError as error:
      raise Misconfigured(str(error)) from error
    if hosts.first:
      _lead(config, hosts, parts, heartbeat, should_stop)
    else:
      _follow(config, hosts, parts, heartbeat, should_stop)


class _Parts:
  """What every process of a replica makes alike.

  Attributes:
    tokenizer: of the policy.
    model: its configuration.
    mesh: of the replica's devices, None for one.
    like: shapes and places of parameters.
  """

  def __init__(self, config: Config, hosts: ServerHosts):
    problem = make_problem(config)
    self.tokenizer = problem.renderer.tokenizer
    self.model = config.policy(self.tokenizer.vocab_size)
    self.mesh = engine_mesh(config.serve_mesh)
    if hosts.count > 1:
      if self.mesh is not None:
        hosts.check(self.mesh)
      made = provenance.plain(dataclasses.asdict(config))
      # Not what each host has in its own way.
      del made["cluster"]
      hosts.agree({"config": made, "data": problem.digests()})
    self.like = _like(self.model, self.mesh)

  def engine_given(self, config: Config) -> dict[str, Any]:
    """Of `SlotEngine`, after model and configuration."""
    return {
      "max_length": config.agent.token_budget + 1,
      "mesh": self.mesh,
      "tokenizer": self.tokenizer,
    }


def _lead(
  config: Config,
  hosts: ServerHosts,
  parts: _Parts,
  heartbeat: Heartbeat,
  should_stop: Callable[[], bool],
) -> None:
  """The replica's first process, or its only one."""
  folder, given = config.weights.folder, parts.engine_given(config)
  followers = None
  engine: SlotEngine
  if hosts.count > 1:
    followers = hosts.followers()
    engine = LedEngine(parts.model, config.engine, followers, **given)
    subscriber: Subscriber = LedSubscriber(
      folder, parts.like, followers, patience=config.cluster.stall_seconds
    )
  else:
    engine = Engine(parts.model, config.engine, **given)
    subscriber = Subscriber(folder, parts.like)
  server, service = _assemble(config, hosts.replica, parts, engine, subscriber)

  def stops() -> bool:
    return should_stop() or service.load().state == "failed"

  def stopped() -> None:
    # A thread that waits for other hosts would be waited for.
    if followers is not None:
      followers.stop_waiting()

  asyncio.run(_serve(server, service, heartbeat, stops, stopped))
  if server.stuck:
    # An interpreter that ends under a running compiler crashes.
    logging.warning("the engine didn't stop in time; left as it was")
    sys.stderr.flush()
    os._exit(0)
  if followers is not None:
    followers.end()
  if service.load().state == "failed":
    raise RuntimeError(f"replica {hosts.replica} failed; the log says why")


def _follow(
  config: Config,
  hosts: ServerHosts,
  parts: _Parts,
  heartbeat: Heartbeat,
  should_stop: Callable[[], bool],
) -> None:
  """Another process of a replica; ends when the first one says so."""
  asked: list[float] = []

  def get_on() -> None:
    heartbeat.progress()
    if should_stop() and not asked:
      asked.append(time.monotonic())
    if asked and time.monotonic() > asked[0] + _STOP_SECONDS:
      end_process("this host was asked to stop; the first one wasn't")

  def idle(seconds: float) -> None:
    heartbeat.count("idle_seconds", seconds)
    get_on()

  follower = Follower(
    SlotEngine(parts.model, config.engine, **parts.engine_given(config)),
    Subscriber(config.weights.folder, parts.like),
    hosts.link(),
    on_lost=end_process,
    on_idle=idle,
    on_call=get_on,
  )
  follower.run()
  if follower.busy:
    # An interpreter that ends would wait for it.
    distributed_job.leave()
    sys.stderr.flush()
    os._exit(0)


def _address(config: Config, replica: int) -> urllib.parse.SplitResult:
  urls = config.cluster.replica_urls
  if not replica < len(urls):
    raise ValueError(
      f"cluster.replicas has {len(urls)} addresses; there is none for server"
      f" {replica}"
    )
  return urllib.parse.urlsplit(urls[replica])


def _assemble(
  config: Config,
  replica: int,
  parts: _Parts,
  engine: SlotEngine,
  subscriber: Subscriber,
) -> tuple[Server, Service]:
  serving = ServingConfig(
    host=config.cluster.host,
    port=_address(config, replica).port or 80,
    grpc_port=-1,
    token_file=config.cluster.token_file,
    weights=config.weights.folder,
    poll_seconds=_POLL_SECONDS,
    drain_seconds=_DRAIN_SECONDS,
  )
  serving.validate()
  service = Service(
    scheduler_maker(
      engine,
      None,
      subscriber,
      detokenize=parts.tokenizer.decode,
      config=SchedulerConfig(),
      first_version_seconds=config.cluster.patience,
      poll_seconds=_POLL_SECONDS,
    ),
    engine,
    parts.tokenizer,
    serving,
  )
  server = Server(
    service, model="policy", chat_format=None, subscriber=subscriber
  )
  return server, service


def _like(model: ModelConfig, mesh: Mesh | None) -> Any:
  """Parameters of the policy where the engine has them."""
  specs = transformer.specs(model)
  shapes = sharding.shapes(specs)
  places: Any = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  if mesh is None:
    places = jax.tree.map(lambda _: places, shapes)
  else:
    places = sharding.shardings(specs, mesh)
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    shapes,
    places,
  )


async def _serve(
  server: Server,
  service: Service,
  heartbeat: Heartbeat,
  should_stop: Callable[[], bool],
  stopped: Callable[[], None],
) -> None:
  watching = asyncio.create_task(_watch(service, heartbeat))
  try:
    await server.run(should_stop)
  finally:
    stopped()
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
      await watching


async def _watch(service: Service, heartbeat: Heartbeat) -> None:
  """Tells what the service gets done; without requests that may be nothing."""
  before = Load(state="starting", version=-1)
  drafts, drafted = service.engine.drafts, (0.0, 0.0)
  while True:
    await asyncio.sleep(_LOOK_SECONDS)
    now = service.load()
    if drafts is not None:
      sums = float(drafts.proposed.sum()), float(drafts.accepted.sum())
      heartbeat.count("drafted_tokens", sums[0] - drafted[0])
      heartbeat.count("accepted_tokens", sums[1] - drafted[1])
      drafted = sums
    for name in ("sampled_tokens", "prefilled_tokens", "reused_tokens"):
      heartbeat.count(name, getattr(now, name) - getattr(before, name))
    if now.state != "starting" and (
      now.steps != before.steps or not now.requests
    ):
      heartbeat.progress()
    if not now.running + now.waiting:
      heartbeat.count("idle_seconds", _LOOK_SECONDS)
    before = now
