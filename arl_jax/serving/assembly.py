"""Puts a server together from its configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh

from arl_jax import checkpoints
from arl_jax.chat.formats import ChatFormat, format_of
from arl_jax.chat.pretrained import PretrainedTokenizer, load_tokenizer
from arl_jax.rollout.engine import Engine
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.rollout.scheduler_config import SchedulerConfig
from arl_jax.rollout.slot_engine import SlotEngine
from arl_jax.serving.http_app import Handler
from arl_jax.serving.replica import first_version
from arl_jax.serving.serve_config import ServeConfig
from arl_jax.serving.server import Server
from arl_jax.serving.service import Service
from arl_jax.sharding import MeshConfig
from arl_jax.weights import Subscriber

Routes = Sequence[tuple[str, str, Handler]]


def assemble(
  config: ServeConfig,
  more: Callable[[Service, PretrainedTokenizer], Routes] = lambda *_: (),
) -> Server:
  """Loads a model and makes a server of it, which compiles once it runs.

  Args:
    config: of the server.
    more: what else is served, around the same service; see `make_app`.

  Raises:
    ValueError: names the field that can't be, or what a file lacks.
    OSError: a file isn't there, or the port is taken.
  """
  config.validate()
  tokenizer = load_tokenizer(config.tokenizer or config.checkpoint)
  mesh = engine_mesh(config.serve_mesh)
  model, params = checkpoints.load(
    config.checkpoint, dtype=config.dtype, mesh=mesh
  )
  dtype = jnp.dtype(config.dtype)
  engine = Engine(
    model,
    config.engine,
    max_length=config.max_length,
    dtype=dtype,
    mesh=mesh,
    tokenizer=tokenizer,
  )
  subscriber = None
  if config.serving.weights:
    subscriber = Subscriber(config.serving.weights, _like(params))
  service = Service(
    scheduler_maker(
      engine,
      params,
      subscriber,
      detokenize=tokenizer.decode,
      config=config.scheduler,
      first_version_seconds=config.first_version_seconds,
      poll_seconds=config.serving.poll_seconds,
    ),
    engine,
    tokenizer,
    config.serving,
  )
  return Server(
    service,
    model=config.serving.model_name or _name(config.checkpoint),
    chat_format=_chat_format(config, tokenizer),
    subscriber=subscriber,
    more=more(service, tokenizer),
  )


def engine_mesh(config: MeshConfig) -> Mesh | None:
  """What an engine is given; None for one device.

  Raises:
    ValueError: there are no such devices.
  """
  mesh = config.make("serve_mesh")
  return mesh if mesh.size > 1 else None


def _like(params: Any) -> Any:
  """Shapes, dtypes and places of parameters."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    params,
  )


def scheduler_maker(
  engine: SlotEngine,
  params: Any,
  subscriber: Subscriber | None,
  *,
  detokenize: Callable[[list[int]], str],
  config: SchedulerConfig,
  first_version_seconds: float,
  poll_seconds: float,
) -> Callable[[], Scheduler]:
  """What makes the scheduler, in the thread that will drive it.

  Args:
    engine: not warm yet.
    params: to begin with, as version 0; unused with a subscriber.
    subscriber: whose first version is waited for.
    detokenize: text of token ids.
    config: the scheduler's limits.
    first_version_seconds: to wait for it at most.
    poll_seconds: between two looks.
  """
  held = [params]

  def make() -> Scheduler:
    weights, version, lineage = held.pop(), 0, ""
    if subscriber is not None:
      found = first_version(subscriber, first_version_seconds, poll_seconds)
      weights, version = found.params, found.version.number
      lineage = found.version.lineage
    placed = engine.place(weights)
    engine.warm_up(placed)
    return Scheduler(
      engine,
      placed,
      version,
      lineage=lineage,
      config=config,
      detokenize=detokenize,
    )

  return make


def _chat_format(
  config: ServeConfig, tokenizer: PretrainedTokenizer
) -> ChatFormat | None:
  try:
    return format_of(tokenizer, config.chat_format)
  except ValueError as error:
    if config.chat_format != "auto":
      raise
    logging.warning("no chats are served: %s", error)
    return None


def _name(checkpoint: str) -> str:
  return os.path.basename(checkpoint.rstrip("/")).removesuffix(".gguf")
