"""Where each parameter lies in a published checkpoint.

A leaf of the parameter tree is made of pieces: one tensor, possibly transposed
or every other column of it, or several stacked (experts, scanned layers).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from arl_jax.checkpoints.source import Source
from arl_jax.model import transformer
from arl_jax.model.config import ModelConfig
from arl_jax.sharding import Spec

Index = tuple[slice, ...]

# Bytes of a tensor that are read and copied at a time.
_BLOCK_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
  """One tensor of a checkpoint.

  Attributes:
    name: of the tensor.
    transposed: the last two dimensions are swapped.
    phase: 0 or 1: every other column, from this one on; None: all.
  """

  name: str
  transposed: bool = False
  phase: int | None = None

  def shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
    """Of the tensor, when this piece of the leaf has shape `part`."""
    if self.transposed:
      part = (*part[:-2], part[-1], part[-2])
    if self.phase is not None:
      part = (*part[:-1], 2 * part[-1])
    return part

  def read_into(self, out: np.ndarray, source: Source, index: Index) -> None:
    """Fills `out` with the piece's part, a bounded block at a time."""
    rows = max(1, _BLOCK_BYTES * out.shape[0] // max(out.nbytes, 1))
    for first in range(0, out.shape[0], rows):
      last = min(first + rows, out.shape[0])
      at = index[0].start
      block = (slice(at + first, at + last), *index[1:])
      out[first:last] = self._read(source, block)

  def _read(self, source: Source, index: Index) -> np.ndarray:
    if self.transposed:
      index = (*index[:-2], index[-1], index[-2])
    if self.phase is not None:
      columns = index[-1]
      index = (*index[:-1], slice(2 * columns.start, 2 * columns.stop))
    part = source.read(self.name, index)
    if self.phase is not None:
      part = part[..., self.phase :: 2]
    return part.swapaxes(-1, -2) if self.transposed else part


# One level of tuples for each dimension along which tensors are stacked.
Pieces: TypeAlias = "Piece | tuple[Pieces, ...]"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
  """One parameter.

  Attributes:
    path: keys in the parameter tree.
    spec: what the model declares.
    pieces: nested tuples, one level for each leading dimension of the array
      that isn't in the tensors; or one piece.
  """

  path: tuple[str, ...]
  spec: Spec
  pieces: Pieces

  def located(self) -> Iterator[tuple[tuple[int, ...], Piece]]:
    """Pieces with their index along the stacked dimensions."""
    yield from _located(self.pieces, ())

  def part_shape(self) -> tuple[int, ...]:
    """Shape of what one piece brings."""
    depth, pieces = 0, self.pieces
    while isinstance(pieces, tuple):
      depth, pieces = depth + 1, pieces[0]
    return self.spec.shape[depth:]

  def read(self, source: Source, index: Index, dtype: np.dtype) -> np.ndarray:
    """The part of the parameter at `index`, from as few bytes as possible."""
    full = tuple(
      slice(*s.indices(size)[:2])
      for s, size in zip(index, self.spec.shape, strict=True)
    )
    out = np.empty([s.stop - s.start for s in full], dtype)
    _read_into(out, self.pieces, source, full)
    return out


def _located(
  pieces: Pieces, at: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Piece]]:
  if isinstance(pieces, Piece):
    yield at, pieces
    return
  for i, inner in enumerate(pieces):
    yield from _located(inner, (*at, i))


def _read_into(
  out: np.ndarray, pieces: Pieces, source: Source, index: Index
) -> None:
  if isinstance(pieces, Piece):
    if out.ndim:
      pieces.read_into(out, source, index)
    return
  for i in range(index[0].start, index[0].stop):
    part = out[i - index[0].start]
    _read_into(part, pieces[i], source, index[1:])


def leaves(config: ModelConfig) -> list[Leaf]:
  """Every parameter of the model and what it is made of."""
  made = []
  specs = transformer.specs(config)
  stacks = {name: s for s in config.stacks() for name in s.names()}
  flat, _ = jax.tree_util.tree_flatten_with_path(
    specs, is_leaf=lambda x: isinstance(x, Spec)
  )
  for key, spec in flat:
    path = tuple(k.key for k in key)
    if path[0] != "layers":
      made.append(Leaf(path, spec, _outside(config, path)))
      continue
    stack = stacks[path[1]]
    if not stack.repeats:
      pieces = _in_layer(config, int(path[1]), path[2:])
    else:
      period = len(stack.layers)
      pieces = tuple(
        _in_layer(config, int(path[1]) + i * period, path[2:])
        for i in range(stack.repeats)
      )
    made.append(Leaf(path, spec, pieces))
  return made


def _outside(config: ModelConfig, path: tuple[str, ...]) -> Pieces:
  if path[0] == "mtp":
    prefix = f"model.layers.{config.layers}."
    if path[1] == "block":
      return _in_layer(config, config.layers, path[2:])
    return {
      "embed_norm": Piece(f"{prefix}enorm.weight"),
      "hidden_norm": Piece(f"{prefix}hnorm.weight"),
      "project": Piece(f"{prefix}eh_proj.weight", transposed=True),
      "norm": Piece(f"{prefix}shared_head.norm.weight"),
    }[path[1]]
  return {
    "embed": Piece("model.embed_tokens.weight"),
    "norm": Piece("model.norm.weight"),
    "head": Piece("lm_head.weight", transposed=True),
  }[path[0]]


def _in_layer(config: ModelConfig, depth: int, path: tuple[str, ...]) -> Pieces:
  prefix = f"model.layers.{depth}."
  if path[0] == "attention":
    names = _LATENT if config.latent_rank else _GROUPED
    name = names[path[1]]
    if path[1] == "q" and config.latent_rank and not config.query_rank:
      name = _GROUPED["q"]
    return _named(name, prefix)
  if path[1] == "shared":
    return _named(_PROJECTIONS[path[2]], f"{prefix}mlp.shared_experts.")
  name = path[1]
  if name == "norm":
    return Piece(f"{prefix}post_attention_layernorm.weight")
  prefix = f"{prefix}mlp."
  if path[0] == "mlp":
    return _named(_PROJECTIONS[name], prefix)
  if name.startswith("router") or name == "choice_bias":
    router = "router" if config.sinks else "gate"
    return {
      "router": Piece(f"{prefix}{router}.weight", transposed=True),
      "router_bias": Piece(f"{prefix}{router}.bias"),
      "choice_bias": Piece(f"{prefix}gate.e_score_correction_bias"),
    }[name]
  if config.expert_bias:
    return {
      "gate": Piece(f"{prefix}experts.gate_up_proj", phase=0),
      "up": Piece(f"{prefix}experts.gate_up_proj", phase=1),
      "down": Piece(f"{prefix}experts.down_proj"),
      "gate_bias": Piece(f"{prefix}experts.gate_up_proj_bias", phase=0),
      "up_bias": Piece(f"{prefix}experts.gate_up_proj_bias", phase=1),
      "down_bias": Piece(f"{prefix}experts.down_proj_bias"),
    }[name]
  return tuple(
    _named(_PROJECTIONS[name], f"{prefix}experts.{e}.")
    for e in range(config.experts)
  )


def _named(name: str, prefix: str) -> Piece:
  matrix = name.endswith(("_proj.weight", "with_mqa.weight"))
  return Piece(prefix + name, transposed=matrix)


_PROJECTIONS = {
  "gate": "gate_proj.weight",
  "up": "up_proj.weight",
  "down": "down_proj.weight",
}
_GROUPED = {
  "norm": "input_layernorm.weight",
  "q": "self_attn.q_proj.weight",
  "k": "self_attn.k_proj.weight",
  "v": "self_attn.v_proj.weight",
  "out": "self_attn.o_proj.weight",
  "q_bias": "self_attn.q_proj.bias",
  "k_bias": "self_attn.k_proj.bias",
  "v_bias": "self_attn.v_proj.bias",
  "out_bias": "self_attn.o_proj.bias",
  "q_norm": "self_attn.q_norm.weight",
  "k_norm": "self_attn.k_norm.weight",
  "sinks": "self_attn.sinks",
}
_LATENT = {
  "norm": "input_layernorm.weight",
  "latent": "self_attn.kv_a_proj_with_mqa.weight",
  "latent_norm": "self_attn.kv_a_layernorm.weight",
  "expand": "self_attn.kv_b_proj.weight",
  "out": "self_attn.o_proj.weight",
  "q_latent": "self_attn.q_a_proj.weight",
  "q_latent_norm": "self_attn.q_a_layernorm.weight",
  "q": "self_attn.q_b_proj.weight",
}


def has_mtp(config: ModelConfig, tensors: Mapping[str, Any]) -> bool:
  """Whether the checkpoint holds a DeepSeek-V3 MTP module."""
  return f"model.layers.{config.layers}.eh_proj.weight" in tensors


def copies(config: ModelConfig) -> dict[str, str]:
  """Tensors that repeat another one, and which."""
  made = {}
  if config.tied:
    made["lm_head.weight"] = "model.embed_tokens.weight"
  if config.mtp_heads:
    prefix = f"model.layers.{config.layers}."
    made[f"{prefix}embed_tokens.weight"] = "model.embed_tokens.weight"
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    made[f"{prefix}shared_head.head.weight"] = head
  return made
