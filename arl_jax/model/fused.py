"""Projections of one input as one matrix.

Few large products are faster than many small ones where a device's matrix
product needs wide operands (CPUs, decoding with few slots). `project` and
`feed_forward` take either form of the parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# Names of the joint matrices, and of what they are made of.
_JOINT = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}

_TURNED = ("qkv", "out", "gate_up", "down")


def fuse(params: Any) -> dict[str, Any]:
  """Joins what attention and dense feed-forward layers apply to one input.

  Differentiable. Experts and latent attention stay as they are. Not for
  meshes that split heads or hidden units: there the parts of a joint matrix
  would lie on other devices than what they are multiplied with.

  Args:
    params: of a policy, from `init` or `checkpoints.load`.

  Returns:
    Parameters that give the same hidden states; not for checkpoints.
  """
  fused = dict(params)
  fused["layers"] = {
    name: _fused_layer(layer) for name, layer in params["layers"].items()
  }
  if "mtp" in params:
    block = _fused_layer(params["mtp"]["block"])
    fused["mtp"] = {**params["mtp"], "block": block}
  return fused


def for_decoding(params: Any) -> dict[str, Any]:
  """`fuse`, with matrices kept by their rows, as `attention.product` says."""
  fused = fuse(params)
  fused["layers"] = {
    name: _by_rows(layer) for name, layer in fused["layers"].items()
  }
  if "mtp" in params:
    block = _by_rows(fused["mtp"]["block"])
    fused["mtp"] = {**fused["mtp"], "block": block}
  if "head" in fused:
    fused["head_rows"] = fused.pop("head").T
  else:
    # The embedding table itself.
    fused["head_rows"] = fused["embed"]
  return fused


def _by_rows(layer: dict[str, Any]) -> dict[str, Any]:
  def turned(params: dict[str, Any]) -> dict[str, Any]:
    return {
      f"{name}_rows" if name in _TURNED else name: (
        jnp.swapaxes(x, -1, -2) if name in _TURNED else x
      )
      for name, x in params.items()
    }

  new = dict(layer)
  if "qkv" in layer["attention"]:
    new["attention"] = turned(layer["attention"])
  if "mlp" in layer:
    new["mlp"] = turned(layer["mlp"])
  return new


def _fused_layer(layer: dict[str, Any]) -> dict[str, Any]:
  new = {**layer, "attention": _join(layer["attention"], "qkv")}
  if "mlp" in layer:
    new["mlp"] = _join(layer["mlp"], "gate_up")
  elif "shared" in layer["moe"]:
    shared = _join(layer["moe"]["shared"], "gate_up")
    new["moe"] = {**layer["moe"], "shared": shared}
  return new


def _join(params: dict[str, jax.Array], joint: str) -> dict[str, jax.Array]:
  """The same with one matrix, and one bias, in place of several."""
  names = _JOINT[joint]
  if not all(name in params for name in names):
    return params
  new = dict(params)
  for end in ("", "_bias"):
    parts = [new.pop(name + end) for name in names if name + end in new]
    if parts:
      new[joint + end] = jnp.concatenate(parts, -1)
  return new
