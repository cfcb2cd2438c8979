"""Quantised checkpoints, decoded part by part as they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from arl_jax.checkpoints.source import Source, Stored, spans

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALES = tuple(np.dtype(d) for d in (np.float32, ml_dtypes.bfloat16, "f2"))

# Ends of names that only quantised checkpoints have.
_HELPERS = (
  "_blocks",
  "_scales",
  "_scale_inv",
  ".weight_packed",
  ".weight_scale",
  ".weight_shape",
  ".weight_zero_point",
  ".weight_g_idx",
  ".qweight",
  ".qzeros",
)

# Values of a 4-bit float: sign, two bits of exponent, one of mantissa.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
# Powers of two from -127 on; the last byte is the format's NaN.
_E8M0 = np.ldexp(np.float32(1), np.arange(-127, 129).clip(max=127))
_E8M0[255] = np.nan
_INT4 = np.arange(-8, 8, dtype=np.float32)


def _pairs(values: np.ndarray) -> np.ndarray:
  """[256, 2]: what both halves of a byte stand for, the low one first."""
  byte = np.arange(256)
  return np.stack([values[byte & 15], values[byte >> 4]], -1)


_E2M1_PAIRS = _pairs(_E2M1)
_INT4_PAIRS = _pairs(_INT4)
_MXFP4_BLOCK = 32


def decoded(source: Source, quantization: Mapping[str, Any] | None) -> Source:
  """A source whose quantised weights appear decoded, under their plain names.

  Their dtype is bfloat16; `read` gives the product of stored value and scale in
  float32, and reads no more than the blocks that hold the part. The scales and
  the like aren't among the tensors. Closing the result closes `source`.

  - "mxfp4": `X_blocks` and `X_scales` are `X` [E, in, out].
  - "fp8": `X` float8_e4m3 and `X_scale_inv` are `X` [out, in].
  - "compressed-tensors" with int4 groups: `X.weight_packed`, `X.weight_scale`
    and `X.weight_shape` are `X.weight` [out, in].

  Args:
    source: tensors as stored.
    quantization: the `quantization_config` of the model's config.json.

  Raises:
    ValueError: the method or one of its options isn't supported, a tensor
      lacks its partner or has another shape or dtype than that asks for, or
      tensors are left over that only quantised checkpoints have.
  """
  if quantization is None:
    _check_leftovers(source.tensors, "no quantization_config")
    return source
  method = quantization.get("quant_method")
  if not isinstance(method, str) or method not in _METHODS:
    raise ValueError(
      f"quant_method {method!r} must be one of {', '.join(_METHODS)}"
    )
  weights, used = _METHODS[method](source.tensors, quantization)
  plain = {n: s for n, s in source.tensors.items() if n not in used}
  for name in weights:
    if name in plain:
      raise ValueError(
        f"tensor {name!r} is stored both plain and quantised; must be once"
      )
  _check_leftovers(plain, f"quant_method {method!r}")
  return _Decoded(source, plain, weights)


class _Weight(Protocol):
  """A quantised weight, in its stored form."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  def read(
    self, source: Source, part: tuple[tuple[int, int], ...]
  ) -> np.ndarray:
    """The values between (start, stop) of each dimension, in float32."""
    ...


class _Decoded(Source):
  """A source with some weights decoded."""

  def __init__(
    self,
    source: Source,
    plain: Mapping[str, Stored],
    weights: Mapping[str, _Weight],
  ):
    self._source = source
    self._weights = weights
    decoded = {n: Stored(w.shape, _BFLOAT16) for n, w in weights.items()}
    self.tensors = MappingProxyType({**plain, **decoded})

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    if name not in self.tensors:
      raise ValueError(f"the checkpoint has no tensor {name!r}")
    if name not in self._weights:
      return self._source.read(name, index)
    part = spans(name, self.tensors[name].shape, index)
    # Scales may take values beyond float32; they become infinite, as in the
    # reference, and that is for the weights' user to notice.
    with np.errstate(over="ignore", invalid="ignore"):
      return self._weights[name].read(self._source, part)

  def close(self) -> None:
    self._source.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Mxfp4:
  """[E, in, out] as blocks of 32 4-bit floats along `in`."""

  name: str
  shape: tuple[int, int, int]

  def read(
    self, source: Source, part: tuple[tuple[int, int], ...]
  ) -> np.ndarray:
    experts, (start, stop), out = part
    first, last = start // _MXFP4_BLOCK, -(-stop // _MXFP4_BLOCK)
    offset = start - first * _MXFP4_BLOCK
    result = np.empty([b - a for a, b in part], np.float32)
    # One by one: whole ones are the largest tensors of a model.
    for i, expert in enumerate(range(*experts)):
      index = (slice(expert, expert + 1), slice(*out), slice(first, last))
      blocks = source.read(f"{self.name}_blocks", (*index, slice(None)))[0]
      scales = source.read(f"{self.name}_scales", index)[0]
      values = _E2M1_PAIRS[blocks].reshape(*scales.shape, _MXFP4_BLOCK)
      values *= _E8M0[scales][..., None]
      values = values.reshape(len(values), (last - first) * _MXFP4_BLOCK)
      result[i] = values[:, offset : offset + stop - start].T
    return result


def _mxfp4(
  tensors: Mapping[str, Stored], quantization: Mapping[str, Any]
) -> tuple[dict[str, _Weight], set[str]]:
  weights: dict[str, _Weight] = {}
  groups = _groups(tensors, ("_blocks", "_scales"))
  for base in groups:
    blocks, scales = f"{base}_blocks", f"{base}_scales"
    shape = tensors[blocks].shape
    if len(shape) != 4 or shape[3] != _MXFP4_BLOCK // 2:
      raise ValueError(
        f"tensor {blocks!r} has shape {shape}; must be [E, out, blocks, 16]"
      )
    _check(tensors, blocks, shape, (np.dtype(np.uint8),))
    _check(tensors, scales, shape[:3], (np.dtype(np.uint8),))
    experts, out, count, _ = shape
    weights[base] = _Mxfp4(base, (experts, count * _MXFP4_BLOCK, out))
  return weights, {name for names in groups.values() for name in names}


@dataclasses.dataclass(frozen=True, slots=True)
class _Fp8:
  """[out, in] in 8-bit floats, with a scale for each block of both."""

  name: str
  shape: tuple[int, int]
  block: tuple[int, int]

  def read(
    self, source: Source, part: tuple[tuple[int, int], ...]
  ) -> np.ndarray:
    (row, end), (column, stop) = part
    tall, wide = self.block
    top, left = row // tall, column // wide
    index = tuple(slice(a, b) for a, b in part)
    result = source.read(self.name, index).astype(np.float32)
    scales = source.read(
      f"{self.name}_scale_inv",
      (slice(top, -(-end // tall)), slice(left, -(-stop // wide))),
    ).astype(np.float32)
    offset = column - left * wide
    for i, scale in enumerate(scales):
      rows = slice(max(0, (top + i) * tall - row), (top + i + 1) * tall - row)
      result[rows] *= np.repeat(scale, wide)[offset : offset + stop - column]
    return result


def _fp8(
  tensors: Mapping[str, Stored], quantization: Mapping[str, Any]
) -> tuple[dict[str, _Weight], set[str]]:
  block = quantization.get("weight_block_size")
  if (
    not isinstance(block, list | tuple)
    or len(block) != 2
    or not all(type(n) is int and n > 0 for n in block)
  ):
    raise ValueError(
      f"weight_block_size {block!r} must be two positive integers"
    )
  if quantization.get("fmt", "e4m3") != "e4m3":
    raise ValueError(f"fmt {quantization['fmt']!r} of fp8 must be 'e4m3'")
  weights: dict[str, _Weight] = {}
  used = set()
  for base, (scales,) in _groups(tensors, ("_scale_inv",)).items():
    if base not in tensors:
      raise ValueError(f"tensor {scales!r} must have a partner {base!r}")
    shape = tensors[base].shape
    if len(shape) != 2:
      raise ValueError(f"tensor {base!r} has shape {shape}; must be [out, in]")
    _check(tensors, base, shape, (_FLOAT8,))
    blocks = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    _check(tensors, scales, blocks, _SCALES)
    weights[base] = _Fp8(base, (shape[0], shape[1]), (block[0], block[1]))
    used |= {base, scales}
  for name, stored in tensors.items():
    if stored.dtype == _FLOAT8 and name not in used:
      raise ValueError(
        f"tensor {name!r} is fp8; must have a partner {f'{name}_scale_inv'!r}"
      )
  return weights, used


@dataclasses.dataclass(frozen=True, slots=True)
class _Int4:
  """[out, in] in eight integers a word, with a scale for each group of `in`."""

  base: str
  shape: tuple[int, int]
  group: int

  def read(
    self, source: Source, part: tuple[tuple[int, int], ...]
  ) -> np.ndarray:
    # Only the stored shape tells padding from values, and to read it for every
    # weight beforehand would take longer than all else on an object store.
    shape = source.read(f"{self.base}.weight_shape", (slice(None),)).tolist()
    if shape != list(self.shape):
      raise ValueError(
        f"tensor {f'{self.base}.weight_shape'!r} is {shape}; must be"
        f" {list(self.shape)}, by the shape of weight_packed"
      )
    rows, (column, stop) = part
    first, last = column // self.group, -(-stop // self.group)
    words = self.group // 8
    packed = source.read(
      f"{self.base}.weight_packed",
      (slice(*rows), slice(first * words, last * words)),
    )
    scales = source.read(
      f"{self.base}.weight_scale", (slice(*rows), slice(first, last))
    ).astype(np.float32)
    # Lowest bits first is the order of a little-endian word's bytes.
    values = _INT4_PAIRS[packed.astype("<i4", copy=False).view(np.uint8)]
    values = values.reshape(*scales.shape, self.group)
    values *= scales[..., None]
    values = values.reshape(len(values), (last - first) * self.group)
    offset = column - first * self.group
    return np.ascontiguousarray(values[:, offset : offset + stop - column])


def _int4(
  tensors: Mapping[str, Stored], quantization: Mapping[str, Any]
) -> tuple[dict[str, _Weight], set[str]]:
  group = _int4_group(quantization)
  weights: dict[str, _Weight] = {}
  groups = _groups(
    tensors, (".weight_packed", ".weight_scale", ".weight_shape")
  )
  for base, (packed, scales, shape) in groups.items():
    words = tensors[packed].shape
    if len(words) != 2 or words[1] * 8 % group:
      raise ValueError(
        f"tensor {packed!r} has shape {words}; must be [out, in / 8], with in a"
        f" multiple of {group}"
      )
    rows, columns = words[0], words[1] * 8
    _check(tensors, packed, words, (np.dtype(np.int32),))
    _check(tensors, scales, (rows, columns // group), _SCALES)
    integers = (np.dtype(np.int32), np.dtype(np.int64))
    _check(tensors, shape, (2,), integers)
    weights[f"{base}.weight"] = _Int4(base, (rows, columns), group)
  return weights, {name for names in groups.values() for name in names}


# What each option under `weights` must be. Some writers leave out the last two.
_INT4_OPTIONS: dict[str, tuple[Any, ...]] = {
  "num_bits": (4,),
  "symmetric": (True,),
  "strategy": ("group",),
  "type": ("int", None),
  "actorder": (None, False),
}


def _int4_group(quantization: Mapping[str, Any]) -> int:
  """Values that share a scale.

  Raises:
    ValueError: what is quantised isn't int4 in symmetric groups.
  """
  groups = quantization.get("config_groups")
  if not isinstance(groups, Mapping) or not groups:
    raise ValueError(f"config_groups {groups!r} must be a non-empty object")
  sizes = set()
  for key, group in groups.items():
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
      raise ValueError(f"config_groups.{key} must have an object weights")
    for format_ in (quantization.get("format"), group.get("format")):
      if format_ not in (None, "pack-quantized"):
        raise ValueError(f"format {format_!r} must be 'pack-quantized'")
    for option, wanted in _INT4_OPTIONS.items():
      if weights.get(option) not in wanted:
        raise ValueError(
          f"config_groups.{key}.weights.{option} {weights.get(option)!r} must"
          f" be {wanted[0]!r}"
        )
    size = weights.get("group_size")
    if type(size) is not int or size <= 0 or size % 8:
      raise ValueError(
        f"config_groups.{key}.weights.group_size {size!r} must be a multiple"
        " of 8"
      )
    sizes.add(size)
  if len(sizes) > 1:
    raise ValueError(f"group_size must be the same; it is {sorted(sizes)}")
  return sizes.pop()


_METHODS = {"mxfp4": _mxfp4, "fp8": _fp8, "compressed-tensors": _int4}


def _groups(
  tensors: Mapping[str, Stored], suffixes: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
  """Names that differ in these suffixes only, by what they have in common.

  Raises:
    ValueError: one has a partner for some of the suffixes only.
  """
  groups: dict[str, tuple[str, ...]] = {}
  for name in tensors:
    for suffix in suffixes:
      base = name.removesuffix(suffix)
      if base == name or base in groups:
        continue
      groups[base] = tuple(base + s for s in suffixes)
      for partner in groups[base]:
        if partner not in tensors:
          raise ValueError(f"tensor {name!r} must have a partner {partner!r}")
  return groups


def _check(
  tensors: Mapping[str, Stored],
  name: str,
  shape: tuple[int, ...],
  dtypes: tuple[np.dtype, ...],
) -> None:
  """Raises ValueError unless a tensor has this shape and one of the dtypes."""
  stored = tensors[name]
  if stored.shape != shape:
    raise ValueError(
      f"tensor {name!r} has shape {list(stored.shape)}; must be {list(shape)}"
    )
  if stored.dtype not in dtypes:
    raise ValueError(
      f"tensor {name!r} has dtype {stored.dtype}; must be"
      f" {' or '.join(str(d) for d in dtypes)}"
    )


def _check_leftovers(tensors: Mapping[str, Stored], where: str) -> None:
  for name in tensors:
    if name.endswith(_HELPERS):
      raise ValueError(
        f"tensor {name!r} is part of a quantised weight that {where} doesn't"
        " tell how to decode; quantization_config must be that of the"
        " checkpoint's own config.json"
      )
