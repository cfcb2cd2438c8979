"""The policy as pure functions of a nested dict of arrays.

Everything here sees whole rows; `logprobs` scores them without ever holding
all logits, `decoding` appends tokens to a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from arl_jax import sharding
from arl_jax.losses import regularizers
from arl_jax.model import attention, latent, moe
from arl_jax.model.config import Layer, ModelConfig, Stack
from arl_jax.model.rope import segment_positions
from arl_jax.sharding import Spec, constrain

# What the routers did, [B, T, MoE layers, ...] (see `forward`).
Record = dict[str, jax.Array]


def mixer(config: ModelConfig) -> Any:
  """The module of the attention: both have the same functions."""
  return latent if config.latent_rank else attention


def block_specs(config: ModelConfig, layer: Layer) -> dict[str, Any]:
  return {
    "attention": mixer(config).specs(config),
    "moe" if layer.moe else "mlp": moe.specs(config, layer.moe),
  }


def specs(config: ModelConfig) -> dict[str, Any]:
  """Every parameter, MTP module included.

  "layers" has an entry a layer, named by its depth; with `scan_layers` an
  entry for each layer of a repeated pattern, whose arrays have a leading axis.
  """
  d, v = config.width, config.vocab_size
  layers: dict[str, Any] = {}
  for stack in config.stacks():
    for name, layer in zip(stack.names(), stack.layers, strict=True):
      one = block_specs(config, layer)
      layers[name] = sharding.stacked(one, stack.repeats)
  tree: dict[str, Any] = {
    "embed": Spec(
      shape=(v, d), axes=("vocab", "width"), init="embedding", scale=d**-0.5
    ),
    "layers": layers,
    "norm": Spec(shape=(d,), axes=(None,), init="ones"),
  }
  if not config.tied:
    tree["head"] = Spec(shape=(d, v), axes=("width", "vocab"), fan_in=d)
  if config.mtp_heads:
    tree["mtp"] = {
      "embed_norm": Spec(shape=(d,), axes=(None,), init="ones"),
      "hidden_norm": Spec(shape=(d,), axes=(None,), init="ones"),
      "project": Spec(shape=(2 * d, d), axes=(None, "width"), fan_in=2 * d),
      "block": block_specs(config, config.layer(config.layers - 1)),
      "norm": Spec(shape=(d,), axes=(None,), init="ones"),
    }
  return tree


def init(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """Fresh parameters, float32. Raises ValueError for an impossible config."""
  config.validate()
  return sharding.initialise(specs(config), key)


def embed(params: Any, config: ModelConfig, ids: jax.Array) -> jax.Array:
  """[B, T, D] of ids [B, T]."""
  table = constrain(params["embed"], "vocab", None)
  x = table[ids]
  if config.scaled_embedding:
    # The table is also the head: its rows have unit length, not variance.
    x *= config.width**0.5
  return constrain(x, "batch", None, None)


def head(params: Any) -> jax.Array:
  """[D, V], whole along D on every device: it meets all positions there."""
  matrix = params["head"] if "head" in params else params["embed"].T
  return constrain(matrix, None, "vocab")


def logits(matrix: jax.Array, hidden: jax.Array) -> jax.Array:
  """Float32 logits [..., V] of normed hidden states [..., D]."""
  hidden = constrain(hidden, "batch", *(None,) * (hidden.ndim - 1))
  out = jnp.dot(hidden, matrix, preferred_element_type=jnp.float32)
  return constrain(out, "batch", *(None,) * (out.ndim - 2), "vocab")


def logits_of_rows(rows: jax.Array, hidden: jax.Array) -> jax.Array:
  """`logits` of a head [N, D], in the order of `attention.product`."""
  return attention.rows_product(rows, hidden, jnp.float32)


def unembed(params: Any, hidden: jax.Array) -> jax.Array:
  """Logits [..., V] of normed hidden states [..., D], float32."""
  if "head_rows" in params:
    return logits_of_rows(params["head_rows"], hidden)
  return logits(head(params), hidden)


def block(
  params: Any,
  config: ModelConfig,
  layer: Layer,
  x: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  replay: jax.Array | None = None,
) -> tuple[jax.Array, Record]:
  """One layer over whole rows: x [B, T, D], segment_ids [B, T].

  The record of a layer with experts has "experts" [B, T, K], "balance" and
  "z" [B, T].
  """
  p = params["attention"]
  normed = attention.rms_norm(x, p["norm"], config.norm_eps)
  q, k, v = mixer(config).project(p, config, normed, positions)
  attended = attention.attend_packed(
    q,
    k,
    v,
    segment_ids,
    scale=attention.score_scale(config),
    window=layer.window,
    sinks=p.get("sinks"),
  )
  x = x + attention.merge_heads(p, attended).astype(x.dtype)
  y, routed = moe.apply(
    params["moe" if layer.moe else "mlp"],
    config,
    x,
    moe=layer.moe,
    replay=replay,
  )
  record = {}
  if layer.moe:
    record = {
      "experts": routed["experts"],
      "balance": regularizers.router_balance(
        routed["probabilities"], routed["experts"], segment_ids
      ),
      "z": regularizers.router_z(routed["logits"]),
    }
  return constrain(x + y.astype(x.dtype), "batch", "sequence", None), record


def _rematerialised(config: ModelConfig, function: Callable) -> Callable:
  if config.remat == "none":
    return function
  policies = jax.checkpoint_policies
  policy = {
    "block": policies.nothing_saveable,
    "dots": policies.dots_with_no_batch_dims_saveable,
  }[config.remat]
  return jax.checkpoint(function, policy=policy)


def hidden_states(
  params: Any,
  config: ModelConfig,
  input_ids: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array,
  replay_experts: jax.Array | None = None,
) -> tuple[jax.Array, Record]:
  """Trunk output after the final norm, [B, T, D], and the routers' record.

  Args:
    params: of the policy.
    config: the model's.
    input_ids: [B, T] int32.
    positions: [B, T] int32.
    segment_ids: [B, T] int32, 0 = padding.
    replay_experts: as in `forward`.
  """
  x = embed(params, config, input_ids)
  records = []
  for stack in config.stacks():
    layers = [params["layers"][name] for name in stack.names()]
    replay = _replay_of(config, stack, replay_experts)
    functions = [
      _rematerialised(
        config, functools.partial(block, config=config, layer=layer)
      )
      for layer in stack.layers
    ]

    def run(x, inputs, functions=functions):
      layers, replay = inputs
      out = []
      for i, function in enumerate(functions):
        x, record = function(
          layers[i],
          x=x,
          positions=positions,
          segment_ids=segment_ids,
          replay=None if replay is None else replay[i],
        )
        out.append(record)
      return x, out

    if stack.repeats:
      x, out = jax.lax.scan(run, x, (layers, replay))
    else:
      x, out = run(x, (layers, replay))
      out = jax.tree.map(lambda a: a[None], out)
    records.append(_by_depth(out))
  kept = [r for r in records if r]
  record = {
    name: jnp.moveaxis(jnp.concatenate([r[name] for r in kept]), 0, 2)
    for name in (kept[0] if kept else ())
  }
  return attention.rms_norm(x, params["norm"], config.norm_eps), record


def _replay_of(
  config: ModelConfig, stack: Stack, replay: jax.Array | None
) -> jax.Array | None:
  """[repeats, layers of the period, B, T, K], or without the first axis."""
  if replay is None or not stack.layers[0].moe:
    return None
  first = stack.first - config.dense_layers
  count = len(stack.layers) * max(stack.repeats, 1)
  part = jnp.moveaxis(replay[:, :, first : first + count], 2, 0)
  if not stack.repeats:
    return part
  return part.reshape(stack.repeats, len(stack.layers), *part.shape[1:])


def _by_depth(records: list[Record]) -> Record:
  """Records of a period, each [repeats, ...] -> one, [layers, ...]."""
  return {
    name: jnp.stack([r[name] for r in records], 1).reshape(
      -1, *records[0][name].shape[1:]
    )
    for name in records[0]
  }


def row_defaults(params, config, input_ids, positions, segment_ids, replay):
  """Fills in what is by default; raises ValueError for shapes that can't be."""
  if input_ids.ndim != 2 or not input_ids.size:
    raise ValueError(f"input_ids has shape {input_ids.shape}, not [B, T]")
  for name, array in (("positions", positions), ("segment_ids", segment_ids)):
    if array is not None and array.shape != input_ids.shape:
      raise ValueError(
        f"{name} has shape {array.shape}, input_ids {input_ids.shape}"
      )
  wanted = (*input_ids.shape, config.moe_layers, config.experts_per_token)
  if replay is not None and replay.shape != wanted:
    raise ValueError(f"replay_experts has shape {replay.shape}, not {wanted}")
  names = [name for stack in config.stacks() for name in stack.names()]
  if sorted(params["layers"]) != names:
    raise ValueError(
      f"params has layers {sorted(params['layers'])}, the configuration {names}"
    )
  if segment_ids is None:
    segment_ids = jnp.ones_like(input_ids)
  if positions is None:
    positions = segment_positions(segment_ids)
  return positions, segment_ids


def forward(
  params: Any,
  config: ModelConfig,
  input_ids: jax.Array,
  *,
  positions: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  replay_experts: jax.Array | None = None,
  return_aux: bool = False,
) -> Any:
  """Logits [B, T, V] of input_ids [B, T].

  Args:
    params: from `init` or `checkpoints.load`.
    config: the model's.
    input_ids: [B, T] int32.
    positions: [B, T] int32; by default from 0 in every segment.
    segment_ids: [B, T] int32, 0 = padding; tokens see their own segment only.
      Tokens of a segment stand together. By default a row is one segment.
    replay_experts: [B, T, MoE layers, K] int32, experts that the sampler
      chose; -1 is free (see `router.route`).
    return_aux: also return what the routers did.

  Returns:
    Logits in float32; with `return_aux` a pair with the record: "experts"
    [B, T, MoE layers, K] int32, "balance" (load-balance loss of the token's
    segment, see `losses.router_balance`) and "z" (`losses.router_z`), both
    [B, T, MoE layers]. Models without experts have an empty one.
  """
  positions, segment_ids = row_defaults(
    params, config, input_ids, positions, segment_ids, replay_experts
  )
  hidden, record = hidden_states(
    params, config, input_ids, positions, segment_ids, replay_experts
  )
  scores = unembed(params, hidden)
  return (scores, record) if return_aux else scores
