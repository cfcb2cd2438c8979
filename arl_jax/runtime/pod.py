"""A model on a pod: the programs that its learner and its servers run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from arl_jax import losses, sharding
from arl_jax.learner import TokenBatch, make_train_step, state
from arl_jax.model import decoding, transformer
from arl_jax.rollout import decode_state, steps
from arl_jax.runtime.pod_config import PodConfig
from arl_jax.sharding import MeshConfig


def make_mesh(config: MeshConfig, devices: list[Any]) -> Mesh:
  """The mesh on these devices.

  Raises:
    ValueError: the sizes don't fit the number of devices.
  """
  return sharding.make_mesh(devices, **config.sizes(len(devices)))


def lower(config: PodConfig, step: str, devices: list[Any]) -> Any:
  """Lowers one step for devices that need not exist here.

  Args:
    config: of the pod.
    step: "train" (the RL update), "prefill" or "decode".
    devices: of one platform, as `jax.experimental.topologies` describes them.

  Returns:
    `jax.stages.Lowered`.
  """
  trains = step == "train"
  mesh = make_mesh(config.train_mesh if trains else config.serve_mesh, devices)
  build = {"train": _train, "prefill": _prefill, "decode": _decode}[step]
  with jax.set_mesh(mesh), sharding.compiling_for(devices[0]):
    program, arguments = build(config, mesh)
    return program.lower(*arguments)


def _abstract(shape, dtype, mesh, *axes):
  place = NamedSharding(mesh, sharding.partition(axes, shape, mesh))
  return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def _train(config: PodConfig, mesh: Mesh):
  """The learner's update, as it runs."""
  tx, frozen = state.optimizer(config.optimizer), config.optimizer.frozen
  abstract = state.abstract(config.model, tx, mesh, frozen=frozen)
  step = make_train_step(
    config.model,
    tx,
    losses.by_name(config.loss),
    config.step,
    frozen=frozen,
    shardings=jax.tree.map(lambda x: x.sharding, abstract),
  )
  rows = config.rows_per_shard * config.train_mesh.shards(mesh.size)
  shape = (config.microbatches, rows, config.sequence_length)

  def tokens(dtype):
    return _abstract(shape, dtype, mesh, None, "batch", None)

  batch = TokenBatch(
    ids=tokens(jnp.int32),
    segment_ids=tokens(jnp.int32),
    mask=tokens(jnp.bool_),
    behaviour_logp=tokens(jnp.float32),
    advantage=tokens(jnp.float32),
    temperature=tokens(jnp.float32),
    episode_weight=tokens(jnp.float32),
    microbatches=_abstract((), jnp.int32, mesh),
    episodes=_abstract((), jnp.int32, mesh),
    trained_episodes=_abstract((), jnp.int32, mesh),
  )
  return step, (abstract, batch)


def _serving(config: PodConfig, mesh: Mesh):
  """Abstract bfloat16 weights and decode state of a server replica."""
  specs = transformer.specs(config.model)
  places = sharding.shardings(specs, mesh)

  def bfloat16(spec, place):
    return jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16, sharding=place)

  params = jax.tree.map(bfloat16, sharding.shapes(specs), places)
  state_of_slots = jax.eval_shape(
    functools.partial(
      decode_state.empty,
      config.model,
      config.slots,
      config.sequence_length,
      config.prefill_chunk,
      jnp.bfloat16,
      drafts=False,
    )
  )
  return params, jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    state_of_slots,
    decode_state.placed(state_of_slots, mesh),
  )


def _prefill(config: PodConfig, mesh: Mesh):
  """One chunk of prompts appended to a cache of their own."""
  params, state_of_slots = _serving(
    dataclasses.replace(config, slots=config.prefill_rows), mesh
  )
  integers = state_of_slots.length
  ids = _abstract(
    (config.prefill_rows, config.prefill_chunk), jnp.int32, mesh, "batch", None
  )
  program = jax.jit(
    lambda params, *rest: decoding.extend(params, config.model, *rest),
    donate_argnums=1,
  )
  return program, (params, state_of_slots.cache, ids, integers, integers)


def _decode(config: PodConfig, mesh: Mesh):
  """One token in every slot."""
  length = config.sequence_length
  program = jax.jit(
    functools.partial(steps.generate, config.model, 1, 0, length, length),
    donate_argnums=2,
  )
  params, state_of_slots = _serving(config, mesh)
  chosen = state_of_slots.active
  return program, (params, None, state_of_slots, chosen)
