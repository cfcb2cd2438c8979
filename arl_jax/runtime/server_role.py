"""A replica of a run: samples from the newest weights that were published."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import urllib.parse
from collections.abc import Callable

import jax
from absl import logging

from arl_jax import sharding
from arl_jax.cluster.heartbeat import Heartbeat
from arl_jax.model import transformer
from arl_jax.problems.problem import make_problem
from arl_jax.rollout.engine import Engine
from arl_jax.rollout.scheduler_config import SchedulerConfig
from arl_jax.runtime.config import Config
from arl_jax.serving.assembly import scheduler_maker
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.server import Server
from arl_jax.serving.service import Load, Service
from arl_jax.weights import Subscriber

# Between two looks at what the service does, and for new weights.
_LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.2


def run(config: Config, index: int, should_stop: Callable[[], bool]) -> None:
  """Serves until asked to stop.

  Args:
    config: of the run, resolved.
    index: of the replica; its address is that of `cluster.replicas`.
    should_stop: asked a few times a second.

  Raises:
    ValueError: a field that can't be.
    TimeoutError: no weights were published in time.
    OSError: the port is taken.
  """
  with Heartbeat(config.cluster, "server", index) as heartbeat:
    server, service = _assemble(config, index)
    asyncio.run(_serve(server, service, heartbeat, should_stop))
  if service.load().state == "failed":
    raise RuntimeError(f"replica {index} failed; the log says why")
  if server.stuck:
    # An interpreter that ends under a running compiler crashes.
    logging.warning("the engine didn't stop in time; left as it was")
    sys.stderr.flush()
    os._exit(0)


def _assemble(config: Config, index: int) -> tuple[Server, Service]:
  urls = config.cluster.replica_urls
  if not index < len(urls):
    raise ValueError(
      f"cluster.replicas has {len(urls)} addresses; there is none for server"
      f" {index}"
    )
  address = urllib.parse.urlsplit(urls[index])
  tokenizer = make_problem(config).renderer.tokenizer
  model = config.policy(tokenizer.vocab_size)
  engine = Engine(
    model,
    config.engine,
    max_length=config.agent.token_budget + 1,
    tokenizer=tokenizer,
  )
  subscriber = Subscriber(config.weights.folder, _like(model))
  serving = ServingConfig(
    host=config.cluster.host,
    port=address.port or 80,
    grpc_port=-1,
    token_file=config.cluster.token_file,
    weights=config.weights.folder,
    poll_seconds=_POLL_SECONDS,
    drain_seconds=5.0,
  )
  serving.validate()
  service = Service(
    scheduler_maker(
      engine,
      None,
      subscriber,
      detokenize=tokenizer.decode,
      config=SchedulerConfig(),
      first_version_seconds=config.cluster.patience,
      poll_seconds=_POLL_SECONDS,
    ),
    engine,
    tokenizer,
    serving,
  )
  server = Server(
    service, model="policy", chat_format=None, subscriber=subscriber
  )
  return server, service


def _like(model):
  """Parameters of the policy on the engine's device."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    sharding.shapes(transformer.specs(model)),
  )


async def _serve(
  server: Server,
  service: Service,
  heartbeat: Heartbeat,
  should_stop: Callable[[], bool],
) -> None:
  watching = asyncio.create_task(_watch(service, heartbeat))
  try:
    await server.run(should_stop)
  finally:
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
