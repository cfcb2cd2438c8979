"""Feed-forward layers: dense, and mixtures of experts on any mesh."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from arl_jax import sharding
from arl_jax.model import dispatch, router
from arl_jax.model.attention import product, rms_norm
from arl_jax.model.config import ModelConfig
from arl_jax.model.grouped import grouped_matmul
from arl_jax.sharding import Spec


def dense_specs(config: ModelConfig, width: int) -> dict[str, Spec]:
  d = config.width
  return {
    "gate": Spec(shape=(d, width), axes=("width", "mlp"), fan_in=d),
    "up": Spec(shape=(d, width), axes=("width", "mlp"), fan_in=d),
    "down": Spec(shape=(width, d), axes=("mlp", "width"), fan_in=width),
  }


def expert_specs(config: ModelConfig) -> dict[str, Spec]:
  d, e, f = config.width, config.experts, config.expert_width
  inward = ("experts", "width", "mlp")
  tree = {
    "gate": Spec(shape=(e, d, f), axes=inward, fan_in=d),
    "up": Spec(shape=(e, d, f), axes=inward, fan_in=d),
    "down": Spec(shape=(e, f, d), axes=("experts", "mlp", "width"), fan_in=f),
  }
  if config.expert_bias:
    for name in ("gate", "up"):
      tree[f"{name}_bias"] = Spec(
        shape=(e, f), axes=("experts", "mlp"), init="zeros"
      )
    tree["down_bias"] = Spec(shape=(e, d), axes=("experts", None), init="zeros")
  return tree


def specs(config: ModelConfig, moe: bool) -> dict[str, Any]:
  """Parameters of a feed-forward layer, with or without experts."""
  norm = Spec(shape=(config.width,), axes=(None,), init="ones")
  if not moe:
    return {"norm": norm, **dense_specs(config, config.dense_width)}
  tree: dict[str, Any] = {
    "norm": norm,
    **router.specs(config),
    **expert_specs(config),
  }
  if config.shared_experts:
    width = config.shared_experts * config.expert_width
    tree["shared"] = dense_specs(config, width)
  return tree


def swiglu(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
  """silu(gate) · up, or gpt-oss's clamped form."""
  if not config.swiglu_limit:
    return jax.nn.silu(gate) * up
  limit = config.swiglu_limit
  gate = jnp.minimum(gate, limit)
  up = jnp.clip(up, -limit, limit)
  return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def feed_forward(params: Any, config: ModelConfig, x: jax.Array) -> jax.Array:
  """down(swiglu(gate x, up x)) of every token."""
  if "gate" in params:
    gate, up = x @ params["gate"], x @ params["up"]
  else:
    gate, up = jnp.split(product(params, "gate_up", x), 2, -1)
  return product(params, "down", swiglu(config, gate, up))


def apply(
  params: Any,
  config: ModelConfig,
  x: jax.Array,
  *,
  moe: bool,
  replay: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """One feed-forward layer of the normed input.

  Args:
    params: of this layer.
    config: the model's.
    x: [B, T, D].
    moe: whether the layer has experts.
    replay: [B, T, K] int32, experts to take (see `router.route`).

  Returns:
    [B, T, D] to be added to the residual stream, and of layers with experts
    what the router did: "experts" [B, T, K], "probabilities" and "logits"
    [B, T, E].
  """
  x = rms_norm(x, params["norm"], config.norm_eps)
  if not moe:
    return feed_forward(params, config, x), {}
  gates, experts, record = router.route(params, config, x, replay)
  names = [n for n in params if n in expert_specs(config)]
  weights = {n: params[n] for n in names}
  flat = x.reshape(-1, x.shape[-1])
  y = mixture(
    weights,
    config,
    flat,
    gates.reshape(flat.shape[0], -1).astype(x.dtype),
    experts.reshape(flat.shape[0], -1),
  ).reshape(x.shape)
  if config.shared_experts:
    y += feed_forward(params["shared"], config, x)
  return y, {"experts": experts, **record}


def mixture(
  weights: Any,
  config: ModelConfig,
  x: jax.Array,
  gates: jax.Array,
  experts: jax.Array,
) -> jax.Array:
  """Σ_k gate_k · expert_k(x), exact for any choice of experts.

  Args:
    weights: of the experts.
    config: the model's.
    x: [N, D].
    gates: [N, K].
    experts: [N, K] int32.

  Returns:
    [N, D].
  """
  mesh = sharding.ambient_mesh()
  if mesh is not None:
    return _across(mesh, weights, config, x, gates, experts)
  if config.experts <= 2 * config.experts_per_token:
    return _every_expert(weights, config, x, gates, experts)
  return grouped(weights, x, gates, experts, config=config)


def _every_expert(weights, config, x, gates, experts):
  """Evaluates all and lets the gates select: cheaper than sorting a few."""
  chosen = jax.nn.one_hot(experts, config.experts, dtype=x.dtype)
  gates = (gates[..., None] * chosen).sum(1)
  parts = []
  for name in ("gate", "up"):
    part = jnp.einsum("nd,edf->nef", x, weights[name])
    parts.append(part + weights[f"{name}_bias"] if config.expert_bias else part)
  hidden = swiglu(config, *parts) * gates[..., None]
  y = jnp.einsum("nef,efd->nd", hidden, weights["down"])
  return y + gates @ weights["down_bias"] if config.expert_bias else y


def _expert_rows(config, weights, rows, sizes, owner):
  """Each row through its expert; rows are sorted, owner [R] says whose."""
  real = (owner < sizes.shape[0])[:, None]

  def product(name, rows):
    y = grouped_matmul(rows, weights[name], sizes)
    if f"{name}_bias" in weights:
      y += weights[f"{name}_bias"].at[owner].get(mode="clip")
    # Where no row is, there may be anything, which 0 times wouldn't stop.
    return jnp.where(real, y, 0)

  hidden = swiglu(config, product("gate", rows), product("up", rows))
  return product("down", hidden)


def grouped(weights, x, gates, experts, *, config):
  """Tokens sorted by expert, on one device that has all experts."""
  k = experts.shape[1]
  keys = experts.reshape(-1)
  order, inverse = dispatch.sort(keys, config.experts)
  rows = dispatch.take_rows(x, order, inverse, k)
  sizes = jnp.bincount(keys, length=config.experts)
  y = _expert_rows(config, weights, rows, sizes, keys[order])
  y = dispatch.take_rows(y, inverse, order, 1).reshape(*gates.shape, -1)
  return (y * gates[..., None]).sum(1)


def _across(mesh, weights, config, x, gates, experts):
  """`mixture` on a mesh: experts, and parts of them, lie on many devices.

  Tokens are split over the batch axes, in chunks whose buffers are bounded.
  """
  batch = tuple(a for a in sharding.RULES["batch"] if mesh.shape.get(a, 1) > 1)
  shares = math.prod(mesh.shape[a] for a in batch)
  n = x.shape[0]
  chunk = min(-(-n // shares), config.dispatch_tokens)
  padding = -n % (shares * chunk)
  x, gates = (jnp.pad(a, ((0, padding), (0, 0))) for a in (x, gates))
  # Padding takes turns, so that it makes no device busier than others.
  filler = jnp.arange(padding * experts.shape[1], dtype=experts.dtype)
  filler = (filler % config.experts).reshape(padding, experts.shape[1])
  experts = jnp.concatenate([experts, filler])
  declared = expert_specs(config)
  parts = {
    name: sharding.partition(declared[name].axes, declared[name].shape, mesh)
    for name in weights
  }
  spread = sharding.mesh_axes(parts["gate"][0])

  split = sharding.mesh_axes(parts["gate"][2])

  def local(weights, x, gates, experts):
    weights = {k: _whole(w, parts[k]) for k, w in weights.items()}
    if split and config.expert_bias:
      # The parts of a product are summed below, its bias counts once.
      first = jax.lax.axis_index(split) == 0
      weights["down_bias"] *= first.astype(x.dtype)
    # Buffers of one chunk at a time, also in the backward pass.
    mixed = jax.checkpoint(functools.partial(grouped, config=config))
    if spread:
      mixed = functools.partial(
        dispatch.travel,
        functools.partial(_expert_rows, config),
        dispatch.Route(spread, config.experts),
      )
    cut = [a.reshape(-1, chunk, a.shape[-1]) for a in (x, gates, experts)]
    y = jax.lax.map(lambda part: mixed(weights, *part), tuple(cut))
    y = y.reshape(x.shape)
    return jax.lax.psum(y, split) if split else y

  tokens = PartitionSpec(batch or None, None)
  y = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(parts, tokens, tokens, tokens),
    out_specs=tokens,
    # Loops with carried zeros inside; sums over devices are as written.
    check_vma=False,
  )(weights, x, gates, experts)
  return y[:n]


def _whole(weight, parts):
  """Collects the dimension of the residual stream."""
  for dim, part in enumerate(parts):
    axes = sharding.mesh_axes(part)
    if set(axes) & set(sharding.RULES["width"]):
      weight = jax.lax.all_gather(weight, axes, axis=dim, tiled=True)
  return weight
