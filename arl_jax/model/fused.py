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
