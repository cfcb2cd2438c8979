"""Weights in a GGUF file, under the names and in the layout of Hugging Face.

llama.cpp stores another layout: query and key rows of Llama in the order of its
rope, the experts of a layer in one tensor, gate and up of gpt-oss apart. All of
it is undone while reading, also for parts. Quantised values become float32.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from arl_jax.chat.gguf_header import Header, Tensor, read_header
from arl_jax.checkpoints.gguf_config import config_from
from arl_jax.checkpoints.source import Source, Stored, spans

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype(np.float32)
_NATIVE = {
  GGMLQuantizationType.F32: _FLOAT32,
  GGMLQuantizationType.F16: np.dtype(np.float16),
  GGMLQuantizationType.BF16: _BFLOAT16,
}
_TOP = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
_ATTENTION = {
  "attn_norm.weight": "input_layernorm.weight",
  **{
    f"attn_{ours}.{part}": f"self_attn.{theirs}_proj.{part}"
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
    for part in ("weight", "bias")
  },
}
_QK_NORM = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
_MLP_NORM = {"ffn_norm.weight": "post_attention_layernorm.weight"}
_MLP = {
  f"ffn_{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")
}
# Names within a layer. {e} stands for every expert of a fused tensor.
_LAYER = {
  "llama": _ATTENTION | _MLP_NORM | _MLP,
  "qwen3": _ATTENTION | _QK_NORM | _MLP_NORM | _MLP,
  "qwen3moe": {
    **(_ATTENTION | _QK_NORM | _MLP_NORM),
    "ffn_gate_inp.weight": "mlp.gate.weight",
    **{
      f"ffn_{x}_exps.weight": f"mlp.experts.{{e}}.{x}_proj.weight"
      for x in ("gate", "up", "down")
    },
  },
  "gpt-oss": {
    **_ATTENTION,
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp.weight": "mlp.router.weight",
    "ffn_gate_inp.bias": "mlp.router.bias",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
  },
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Recipe:
  """How one tensor is made of those in the file.

  Two parts interleave on the last axis. `heads` > 0: rows are in the order of
  llama.cpp's rope. `expert` picks from the first axis; `swapped`: the last two
  axes are exchanged.
  """

  parts: tuple[Tensor, ...]
  heads: int = 0
  expert: int | None = None
  swapped: bool = False

  def stored(self) -> Stored:
    shape = self.parts[0].shape
    if self.expert is not None:
      shape = shape[1:]
    if self.swapped:
      shape = (*shape[:-2], shape[-1], shape[-2])
    shape = (*shape[:-1], shape[-1] * len(self.parts))
    kinds = {_NATIVE.get(part.kind, _BFLOAT16) for part in self.parts}
    dtype = kinds.pop() if len(kinds) == 1 else _FLOAT32
    return Stored(shape=shape, dtype=dtype)


class GgufFile(Source):
  """Tensors of one file.

  `tensors` tells shape and natural dtype of each: bfloat16 for quantised ones.
  """

  def __init__(self, header: Header, recipes: Mapping[str, _Recipe]):
    self.path = header.path
    self._recipes = recipes
    self._data: np.memmap | None = np.memmap(header.path, np.uint8, "r")
    self.tensors: Mapping[str, Stored] = types.MappingProxyType(
      {name: recipe.stored() for name, recipe in recipes.items()}
    )

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Values of a part: float32 if quantised, else as stored, C-contiguous.

    Args:
      name: one of `tensors`.
      index: as of `Source.read`.

    Raises:
      ValueError: no such tensor or part, or a closed file.
    """
    recipe = self._recipes.get(name)
    if recipe is None:
      raise ValueError(f"{self.path}: no tensor {name!r}")
    part = spans(name, self.tensors[name].shape, index)
    index = tuple(slice(*span) for span in part)
    if len(recipe.parts) == 1:
      return np.ascontiguousarray(self._part(recipe, recipe.parts[0], index))
    begin, end = index[-1].start, index[-1].stop
    halves = [
      # Columns 2 j + k that lie in [begin, end), for part k.
      self._part(
        recipe,
        part,
        (*index[:-1], slice((begin - k + 1) // 2, (end - k + 1) // 2)),
      )
      for k, part in enumerate(recipe.parts)
    ]
    same = halves[0].dtype == halves[1].dtype
    out = np.empty(
      (*halves[0].shape[:-1], end - begin),
      halves[0].dtype if same else _FLOAT32,
    )
    for k, half in enumerate(halves):
      out[..., (begin + k) % 2 :: 2] = half
    return out

  def close(self) -> None:
    """Unmaps the file; what was read stays valid."""
    self._data = None

  def _part(
    self, recipe: _Recipe, part: Tensor, index: tuple[slice, ...]
  ) -> np.ndarray:
    rows: np.ndarray | None = None
    if recipe.swapped:
      index = (*index[:-2], index[-1], index[-2])
    if recipe.expert is not None:
      index = (slice(recipe.expert, recipe.expert + 1), *index)
    if recipe.heads:
      # Ours: (head, half, pair). In the file: (head, pair, half).
      size = part.shape[0] // recipe.heads
      ours = np.arange(index[0].start, index[0].stop)
      half, pair = np.divmod(ours % size, size // 2)
      rows = ours - ours % size + 2 * pair + half
    values = self._values(part, index, rows)
    if recipe.expert is not None:
      values = values[0]
    return values.swapaxes(-1, -2) if recipe.swapped else values

  def _values(
    self, part: Tensor, index: tuple[slice, ...], rows: np.ndarray | None
  ) -> np.ndarray:
    """A copy of one region; `rows` replaces the first slice."""
    if self._data is None:
      raise ValueError(f"{self.path}: the file is closed")
    if rows is not None and len(index) == 1:  # A row isn't whole blocks here.
      return self._values(part, (slice(0, part.shape[0]),), None)[rows]
    raw = self._data[part.offset : part.offset + part.nbytes]
    native = _NATIVE.get(part.kind)
    where: tuple[Any, ...] = index if rows is None else (rows, *index[1:])
    if native is not None:
      values = np.frombuffer(raw, native).reshape(part.shape)
      return np.array(values[where], order="C")
    block, block_bytes = GGML_QUANT_SIZES[part.kind]
    # Whole blocks around the columns; everything else is never touched.
    first, last = index[-1].start // block, -(-index[-1].stop // block)
    columns = slice(first * block_bytes, last * block_bytes)
    packed = np.frombuffer(raw, np.uint8).reshape(*part.shape[:-1], -1)
    packed = np.ascontiguousarray(packed[(*where[:-1], columns)])
    if not packed.size:
      shape = (*packed.shape[:-1], index[-1].stop - index[-1].start)
      return np.empty(shape, _FLOAT32)
    with np.errstate(all="ignore"):  # Scales may be anything; so be the values.
      values = quants.dequantize(packed, part.kind)
    start = index[-1].start - first * block
    return values[..., start : start + index[-1].stop - index[-1].start]


def open_gguf(
  path: str | os.PathLike[str],
) -> tuple[dict[str, Any], GgufFile]:
  """Opens a Llama, Qwen3, Qwen3-MoE or gpt-oss model.

  Returns:
    A configuration as in Hugging Face's config.json, and the tensors.

  Raises:
    ValueError: not a GGUF file, cut short, of another architecture, or with
      fields or tensors that the architecture hasn't. One line that names the
      file, the field or tensor, and its value.
    OSError: it can't be opened.
  """
  header = read_header(path)
  _check_kinds(header)
  # Its tensors go by their names in the file.
  raw = {t.name: _Recipe(parts=(t,)) for t in header.tensors.values()}
  with GgufFile(header, raw) as file:

    def read(name: str) -> np.ndarray:
      everything = (slice(None),) * len(file.tensors[name].shape)
      return file.read(name, everything).astype(np.float32)

    config = config_from(header, read)
  return config, GgufFile(header, dict(_recipes(header, config)))


def _check_kinds(header: Header) -> None:
  kinds = {t.kind: t.name for t in header.tensors.values()}
  for kind, name in kinds.items():
    if kind in _NATIVE:
      continue
    try:
      quants.dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
      raise ValueError(
        f"{header.path}: tensor {name!r} has type {kind.name}, which can't be"
        " dequantised"
      ) from None


def _recipes(
  header: Header, config: Mapping[str, Any]
) -> Iterator[tuple[str, _Recipe]]:
  arch = header.fields["general.architecture"]
  heads = {
    "attn_q": config["num_attention_heads"],
    "attn_k": config["num_key_value_heads"],
  }
  for tensor in header.tensors.values():
    if tensor.name in _TOP:
      yield _TOP[tensor.name], _Recipe(parts=(tensor,))
      continue
    if tensor.name == "rope_freqs.weight" and arch == "llama":
      continue  # In the configuration.
    layer, part = _layer_and_part(header, tensor, arch, config)
    if arch == "gpt-oss" and part.startswith("ffn_up_exps."):
      _partner(header, tensor, "ffn_up_exps", "ffn_gate_exps")
      continue
    stem, _, suffix = part.partition(".")
    name = f"model.layers.{layer}.{_LAYER[arch][part]}"
    if stem in heads:
      rows = heads[stem] * config["head_dim"]
      if tensor.shape[0] != rows:
        raise _shape_error(header, tensor, f"{rows} rows: heads times head_dim")
    if stem in heads and arch == "llama":
      yield name, _Recipe(parts=(tensor,), heads=heads[stem])
    elif not stem.endswith("_exps"):
      yield name, _Recipe(parts=(tensor,))
    else:
      experts = config[
        "num_experts" if arch == "qwen3moe" else "num_local_experts"
      ]
      axes = 3 if suffix == "weight" else 2
      if len(tensor.shape) != axes or tensor.shape[0] != experts:
        raise _shape_error(header, tensor, f"{axes} axes, {experts} experts")
      if arch == "qwen3moe":
        for e in range(experts):
          yield name.format(e=e), _Recipe(parts=(tensor,), expert=e)
        continue
      parts: tuple[Tensor, ...] = (tensor,)
      if stem == "ffn_gate_exps":
        parts += (_partner(header, tensor, stem, "ffn_up_exps"),)
      yield name, _Recipe(parts=parts, swapped=suffix == "weight")


def _layer_and_part(
  header: Header, tensor: Tensor, arch: str, config: Mapping[str, Any]
) -> tuple[int, str]:
  """Layer and name within it; ValueError if the architecture lacks it."""
  match = _BLOCK.fullmatch(tensor.name)
  layer, part = (int(match[1]), match[2]) if match else (-1, "")
  known = part in _LAYER[arch] or (
    arch == "gpt-oss" and part in ("ffn_up_exps.weight", "ffn_up_exps.bias")
  )
  if not known or layer >= config["num_hidden_layers"]:
    raise ValueError(
      f"{header.path}: tensor {tensor.name!r} is unknown to {arch} with"
      f" {config['num_hidden_layers']} layers"
    )
  return layer, part


def _partner(header: Header, tensor: Tensor, own: str, other: str) -> Tensor:
  name = tensor.name.replace(own, other)
  partner = header.tensors.get(name)
  if partner is None or partner.shape != tensor.shape:
    raise ValueError(
      f"{header.path}: tensor {tensor.name!r} has shape {tensor.shape}, but"
      f" {name!r} has {partner.shape if partner else 'none'}"
    )
  return partner


def _shape_error(header: Header, tensor: Tensor, right: str) -> ValueError:
  return ValueError(
    f"{header.path}: tensor {tensor.name!r} has shape {tensor.shape}, must have"
    f" {right}"
  )
