"""Tokens on their way to the devices that hold their experts, and back.

Devices exchange buffers of a fixed size that hold a little more than an even
load, in as many rounds as the fullest needs: one as a rule, more when many
tokens choose the same experts. So no token is ever dropped, and memory doesn't
depend on the routing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Room in a buffer, relative to what an even load fills.
_SLACK = 1.25

# (weights, rows [R, D] sorted by expert, sizes [E / P], expert of each row [R])
# -> [R, D]; E / P stands for no expert.
Compute = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


class Route(NamedTuple):
  """Attributes: mesh axes along which P devices share E experts; E."""

  axis: tuple[str, ...]
  experts: int


class _Plan(NamedTuple):
  """Which choice travels where.

  A choice is one of a token's K experts; choices are numbered token by token.

  Attributes:
    order: [N·K], choices sorted by expert, and so by device.
    place: [N·K], of each choice in that order, counted from the first one for
      the same device.
    device: [N·K], where each choice goes.
    counts: [P, P, E/P], choices of device i for each expert of j.
    me: [], this device.
  """

  order: jax.Array
  place: jax.Array
  device: jax.Array
  counts: jax.Array
  me: jax.Array


def sort(keys: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
  """A stable sorting permutation of keys in 0..limit, and its inverse."""
  n = keys.shape[0]
  index = jnp.arange(n, dtype=jnp.int32)
  if (limit + 1) * n < 1 << 31:
    # Keys and places in one number: a fraction of the work, and on TPU of the
    # compile time, of sorting pairs.
    order = jax.lax.sort(keys * n + index, is_stable=False) % n
  else:
    order = jnp.argsort(keys, stable=True)
  return order, jnp.zeros_like(order).at[order].set(index, unique_indices=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(
  x: jax.Array, take: jax.Array, give: jax.Array, copies: int
) -> jax.Array:
  """Rows x[take // copies], 0 where `take` is negative.

  Args:
    x: [N, D].
    take: [M] int32, choices in 0..N·copies, each at most once.
    give: [N · copies] int32, where each choice went; negative: nowhere.
    copies: K.

  Returns:
    [M, D].
  """
  rows = x[jnp.maximum(take, 0) // copies]
  return jnp.where((take >= 0)[:, None], rows, 0)


def _take_forward(x, take, give, copies):
  return take_rows(x, take, give, copies), (take, give)


def _take_backward(copies, indices, g):
  # A gather; differentiating the gather above would scatter.
  take, give = indices
  g = take_rows(g, give, take, 1)
  return g.reshape(-1, copies, g.shape[-1]).sum(1), None, None


take_rows.defvjp(_take_forward, _take_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def travel(
  compute: Compute,
  route: Route,
  weights: Any,
  x: jax.Array,
  gates: jax.Array,
  experts: jax.Array,
) -> jax.Array:
  """Σ_k gate_k · expert_k(x), the experts being spread over devices.

  Inside a `shard_map`. The backward pass makes the same rounds again.

  Args:
    compute: what a device does with the rows that arrive.
    route: along which devices.
    weights: of this device's experts.
    x: [N, D], tokens of this device.
    gates: [N, K].
    experts: [N, K] int32, of all E.

  Returns:
    [N, D].
  """
  plan, rounds = _plan(route, experts)

  def add(turn, y):
    return y + _round(compute, plan, turn, weights, x, gates, route)

  return jax.lax.fori_loop(0, rounds, add, jnp.zeros_like(x))


def _travel_forward(compute, route, weights, x, gates, experts):
  y = travel(compute, route, weights, x, gates, experts)
  return y, (weights, x, gates, experts)


def _travel_backward(compute, route, kept, g):
  *inputs, experts = kept
  plan, rounds = _plan(route, experts)

  def add(turn, total):
    _, pull = jax.vjp(
      lambda w, x, g: _round(compute, plan, turn, w, x, g, route), *inputs
    )
    return jax.tree.map(jnp.add, total, pull(g))

  zeros = jax.tree.map(jnp.zeros_like, tuple(inputs))
  return (*jax.lax.fori_loop(0, rounds, add, zeros), None)


travel.defvjp(_travel_forward, _travel_backward)


def _capacity(choices: int, devices: int) -> int:
  """Rows that a device sends to another one in a round."""
  return int(-(-choices * _SLACK // devices))


def _plan(route: Route, experts: jax.Array) -> tuple[_Plan, jax.Array]:
  """The plan, and how many rounds all devices of the mesh make together."""
  keys = experts.reshape(-1)
  devices = jax.lax.axis_size(route.axis)
  order, inverse = sort(keys, route.experts)
  counts = jnp.bincount(keys, length=route.experts)
  table = jax.lax.all_gather(counts, route.axis).reshape(devices, devices, -1)
  me = jax.lax.axis_index(route.axis)
  leaving = table[me].sum(-1)
  device = keys // (route.experts // devices)
  place = inverse - (jnp.cumsum(leaving) - leaving)[device]
  rounds = -(-table.sum(-1).max() // _capacity(keys.shape[0], devices))
  # Equal everywhere: collectives wait for each other.
  every = jax.sharding.get_abstract_mesh().axis_names
  plan = _Plan(order, place, device, table, me)
  return plan, jax.lax.pmax(rounds, every)


def _round(compute, plan, turn, weights, x, gates, route):
  """What one round adds to each token, [N, D]."""
  choices, devices = plan.order.shape[0], plan.counts.shape[0]
  size = _capacity(choices, devices)
  first = turn * size
  slot = first + jnp.arange(size)
  leaving = plan.counts[plan.me].sum(-1)[:, None]
  start = jnp.cumsum(leaving, 0) - leaving
  at = jnp.minimum(start + slot, choices - 1)
  take = jnp.where(slot < leaving, plan.order[at], -1).reshape(-1)
  here = (plan.place >= first) & (plan.place < first + size)
  give = jnp.where(here, plan.device * size + plan.place - first, -1)
  exchange = functools.partial(
    jax.lax.all_to_all, axis_name=route.axis, split_axis=0, concat_axis=0
  )

  rows = take_rows(x, take, give, gates.shape[1])
  rows = exchange(rows.reshape(devices, size, -1)).reshape(devices * size, -1)
  owner = _arrived(plan, slot)
  order, inverse = sort(owner, plan.counts.shape[-1])
  sizes = jnp.bincount(owner, length=plan.counts.shape[-1])
  rows = take_rows(rows, order, inverse, 1)
  rows = compute(weights, rows, sizes, owner[order])
  rows = take_rows(rows, inverse, order, 1)
  rows = exchange(rows.reshape(devices, size, -1)).reshape(devices * size, -1)
  each = take_rows(rows, give, take, 1).reshape(*gates.shape, -1)
  return (each * gates[..., None]).sum(1)


def _arrived(plan: _Plan, slot: jax.Array) -> jax.Array:
  """Local expert of each row that arrives [P · size]; E / P where none does."""
  ends = jnp.cumsum(plan.counts[:, plan.me], 1)
  find = functools.partial(jnp.searchsorted, v=slot, side="right")
  return jax.vmap(find)(ends).reshape(-1).astype(jnp.int32)
