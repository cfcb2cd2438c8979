"""Published checkpoints in and out, streamed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from etils import epath
from jax.sharding import Mesh, SingleDeviceSharding

from arl_jax import sharding
from arl_jax.checkpoints import (
  gguf_file,
  hf_config,
  hf_export,
  layout,
  quantized,
)
from arl_jax.checkpoints.safetensors_file import open_folder
from arl_jax.checkpoints.safetensors_writer import Writer
from arl_jax.checkpoints.source import Source, Stored
from arl_jax.model.config import ModelConfig

# What parameters may be.
_DTYPES = tuple(
  map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))
)

# Rows of two tables that are compared at a time.
_ROWS = 4096

# Of config.json, in bytes.
_MAX_CONFIG = 1 << 20

# Older checkpoints store tables that follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"

# What the file of an other modality is called in Kimi K2.5.
_OTHER_MODALITIES = ("vision_tower.", "mm_projector.", "multi_modal_projector.")

# Files that make up a tokenizer.
_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "tokenizer.model",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "generation_config.json",
)


def load(
  path: epath.PathLike,
  *,
  dtype: Any = None,
  mesh: Mesh | None = None,
  rules: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[ModelConfig, dict[str, Any]]:
  """Reads a model: a folder in Hugging Face layout, or a .gguf file.

  Each device's part of a parameter is read, decoded and placed on its own;
  beyond the result the host holds one part of one parameter at a time.

  Args:
    path: of the folder or file; anything `etils.epath` opens.
    dtype: of the parameters; by default as stored, bfloat16 where quantised.
      The router's selection bias stays float32.
    mesh: of the devices that hold the parameters; by default one device.
    rules: logical axis -> mesh axes, by default `sharding.RULES`.

  Returns:
    The configuration (with `mtp_heads` 1 if the checkpoint has the module),
    and parameters for `model.forward`.

  Raises:
    FileNotFoundError: nothing there.
    ValueError: names the file and the key or tensor: unknown architecture or
      quantisation, a tensor missing, left over or of a wrong shape, a
      truncated or inconsistent file.
  """
  dtype = _floating(dtype)
  rules = sharding.RULES if rules is None else rules
  sharding.check_rules(rules)
  with _open(epath.Path(path)) as (config, source):
    leaves = layout.leaves(config)
    _check(config, leaves, source.tensors, str(path))
    _check_copies(config, source, str(path))
    params: dict[str, Any] = {}
    for leaf in leaves:
      value = _place(leaf, source, dtype, mesh, rules)
      _put(params, leaf.path, value)
  return config, params


def load_config(path: epath.PathLike) -> ModelConfig:
  """The configuration of a model, without its parameters; as `load`."""
  with _open(epath.Path(path)) as (config, _):
    return config


@contextlib.contextmanager
def _open(path: epath.Path) -> Iterator[tuple[ModelConfig, Source]]:
  """Configuration and decoded tensors of a model."""
  source: Source
  if path.suffix == ".gguf":
    values, source = gguf_file.open_gguf(path)
    where = str(path)
  else:
    values = read_config(path)
    where = str(path / "config.json")
    source = open_folder(path)
  with source:
    prefix = ""
    if values.get("text_config") is not None:
      values, prefix = _inner(values, where), "language_model."
    plain = _without_prefix(source, prefix)
    quantization = values.get("quantization_config")
    if not isinstance(quantization, dict | None):
      raise ValueError(
        f"{where}: quantization_config is {quantization!r}, not an object"
      )
    decoded = quantized.decoded(plain, quantization)
    config = hf_config.from_hf(values, where)
    _check_count(config, len(decoded.tensors), str(path))
    if layout.has_mtp(config, decoded.tensors):
      config = dataclasses.replace(config, mtp_heads=1)
    yield config, decoded


def _floating(dtype: Any) -> np.dtype | None:
  if dtype is None:
    return None
  try:
    given = np.dtype(dtype)
    if given in _DTYPES:
      return given
  except TypeError:
    pass
  raise ValueError(
    f"dtype is {dtype!r}, not one of {', '.join(map(str, _DTYPES))}"
  )


def _check_count(config: ModelConfig, tensors: int, where: str) -> None:
  """Before anything as large as the configuration claims is made."""
  experts = 0 if config.expert_bias else config.experts
  least = config.layers + config.moe_layers * experts
  if least > tensors:
    raise ValueError(
      f"{where}: {config.layers} layers"
      + (f" with {experts} experts" if experts else "")
      + f" have more than its {tensors} tensors"
    )


def _check_copies(config: ModelConfig, source: Source, where: str) -> None:
  """Tensors that should repeat another one do."""
  for name, original in layout.copies(config).items():
    if name not in source.tensors:
      continue
    shape = source.tensors[original].shape
    if source.tensors[name].shape != shape:
      raise ValueError(
        f"{where}: {name} has shape {source.tensors[name].shape}, not {shape}"
      )
    for first in range(0, shape[0], _ROWS):
      block = (slice(first, min(first + _ROWS, shape[0])), slice(0, shape[1]))
      if not np.array_equal(
        source.read(name, block), source.read(original, block)
      ):
        raise ValueError(
          f"{where}: {name} differs from {original}, which the configuration"
          " says it repeats"
        )


def read_config(path: epath.Path) -> dict[str, Any]:
  """config.json of a folder. Raises ValueError if it isn't a JSON object."""
  file = epath.Path(path) / "config.json"
  if not file.exists():
    raise FileNotFoundError(f"{path} holds no config.json")
  if file.stat().length > _MAX_CONFIG:
    raise ValueError(f"{file} is longer than {_MAX_CONFIG} bytes")
  try:
    values = json.loads(file.read_bytes())
  except (ValueError, RecursionError) as e:
    raise ValueError(f"{file} is not JSON: {e}") from None
  if not isinstance(values, dict):
    raise ValueError(f"{file} holds {type(values).__name__}, not an object")
  return values


def _inner(values: Mapping[str, Any], where: str) -> dict[str, Any]:
  """The language model's part of a multimodal configuration."""
  inner = values["text_config"]
  if not isinstance(inner, dict):
    raise ValueError(f"{where}: text_config is {inner!r}, not an object")
  outer = values.get("quantization_config")
  return {"quantization_config": outer, **inner} if outer else dict(inner)


class _Renamed(Source):
  """A source without a prefix of its names, and without other modalities."""

  def __init__(
    self, source: Source, prefix: str, tensors: Mapping[str, Stored]
  ):
    self._source, self._prefix = source, prefix
    self.tensors = tensors

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    return self._source.read(self._prefix + name, index)

  def close(self) -> None:
    self._source.close()


def _without_prefix(source: Source, prefix: str) -> Source:
  kept = {}
  for name, stored in source.tensors.items():
    if name.endswith(_DERIVED):
      continue
    if prefix and name.startswith(_OTHER_MODALITIES):
      continue
    kept[name.removeprefix(prefix)] = stored
  return _Renamed(source, prefix, kept)


def _check(
  config: ModelConfig,
  leaves: Sequence[layout.Leaf],
  tensors: Mapping[str, Stored],
  where: str,
) -> None:
  """Every tensor is there, has its shape, and has a use."""
  used = set(layout.copies(config))
  for leaf in leaves:
    part = leaf.part_shape()
    for _, piece in leaf.located():
      used.add(piece.name)
      stored = tensors.get(piece.name)
      wanted = piece.shape(part)
      if stored is None:
        raise ValueError(f"{where} has no tensor {piece.name} {wanted}")
      if tuple(stored.shape) != wanted:
        raise ValueError(
          f"{where}: {piece.name} has shape {tuple(stored.shape)}, not {wanted}"
        )
      if not jnp.issubdtype(stored.dtype, jnp.floating):
        raise ValueError(
          f"{where}: {piece.name} is {stored.dtype}, not floating point; is"
          " quantization_config missing from config.json?"
        )
  if unknown := sorted(set(tensors) - used):
    raise ValueError(
      f"{where} has {len(unknown)} tensors that the architecture doesn't,"
      f" among them {unknown[0]}"
    )


def _place(
  leaf: layout.Leaf,
  source: Source,
  dtype: Any,
  mesh: Mesh | None,
  rules: Mapping[str, tuple[str, ...]],
) -> jax.Array:
  """One parameter on its devices; each distinct part is read once."""
  _, first = next(leaf.located())
  dtype = np.dtype(dtype or source.tensors[first.name].dtype)
  if leaf.path[-1] == "choice_bias":
    dtype = np.dtype(np.float32)
  shape = leaf.spec.shape
  place: jax.sharding.Sharding
  if mesh is None:
    place = SingleDeviceSharding(jax.devices()[0])
  else:
    axes = sharding.partition(leaf.spec.axes, shape, mesh, rules)
    place = jax.sharding.NamedSharding(mesh, axes)
  devices: dict[Any, list[jax.Device]] = {}
  for device, index in place.addressable_devices_indices_map(shape).items():
    assert index is not None  # It is for devices of other processes only.
    key = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    devices.setdefault(key, []).append(device)
  parts = []
  for key, owners in devices.items():
    index = tuple(slice(*ends) for ends in key)
    part = leaf.read(source, index, dtype)
    parts += [jax.device_put(part, device) for device in owners]
    # The host's copy is given up before the next one is made.
    jax.block_until_ready(parts[-len(owners) :])
    del part
  return jax.make_array_from_single_device_arrays(shape, place, parts)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value


def save_hf(
  path: epath.PathLike,
  config: ModelConfig,
  params: Any,
  *,
  tokenizer_from: epath.PathLike | None = None,
) -> None:
  """Writes a folder that transformers, and `load`, read again.

  Tensors are written one at a time in the parameters' dtype, unquantised, in
  files of 5 GB.

  Args:
    path: of the folder; made if absent.
    config: of the model.
    params: its parameters. Their first shards are gathered tensor by tensor.
    tokenizer_from: folder whose tokenizer files are copied.

  Raises:
    ValueError: no published architecture computes this model; a parameter is
      missing, left over, or not what the configuration says; the folder holds
      weights already, of which an interrupted save may have left some.
    FileNotFoundError: `tokenizer_from` holds no tokenizer.
  """
  values = hf_export.to_hf(config)
  leaves = layout.leaves(config)
  arrays = {leaf.path: _taken(params, leaf) for leaf in leaves}
  _check_used(params, set(arrays))
  values["torch_dtype"] = str(arrays["embed",].dtype)
  tokenizer = _tokenizer_files(tokenizer_from)
  path = epath.Path(path)
  path.mkdir(parents=True, exist_ok=True)
  stored: dict[str, Stored] = {}
  for leaf in leaves:
    part = leaf.part_shape()
    for _, piece in leaf.located():
      dtype = np.dtype(arrays[leaf.path].dtype)
      stored[piece.name] = Stored(piece.shape(part), dtype)
  copies = layout.copies(config)
  # A tied head is not stored; MTP modules repeat both tables.
  copies.pop("lm_head.weight", None)
  stored |= {name: stored[of] for name, of in copies.items()}
  # The configuration comes last: without it a folder is no checkpoint.
  with Writer(path, stored) as writer:
    (path / "config.json").unlink(missing_ok=True)
    for file in tokenizer:
      if file.resolve() != (path / file.name).resolve():
        file.copy(path / file.name, overwrite=True)
    for name, tensor in _tensors(leaves, arrays):
      writer.write(name, tensor)
      for copy in [c for c, of in copies.items() if of == name]:
        writer.write(copy, tensor)
  unfinished = path / "config.json.tmp"
  unfinished.write_text(json.dumps(values, indent=2) + "\n")
  unfinished.rename(path / "config.json")


def _check_used(params: Any, known: set[tuple[str, ...]]) -> None:
  for keys, _ in jax.tree_util.tree_leaves_with_path(params):
    path = tuple(getattr(k, "key", k) for k in keys)
    if path not in known:
      raise ValueError(
        f"params has {'/'.join(map(str, path))}, which the configuration"
        " doesn't"
      )


def _taken(params: Any, leaf: layout.Leaf) -> jax.Array:
  value = params
  for key in leaf.path:
    if not isinstance(value, Mapping) or key not in value:
      raise ValueError(f"params has no {'/'.join(leaf.path)}")
    value = value[key]
  if getattr(value, "dtype", object) not in _DTYPES:
    raise ValueError(
      f"params: {'/'.join(leaf.path)} is {getattr(value, 'dtype', value)}, not"
      f" one of {', '.join(map(str, _DTYPES))}"
    )
  if tuple(value.shape) != leaf.spec.shape:
    raise ValueError(
      f"params: {'/'.join(leaf.path)} has shape {tuple(value.shape)}, not"
      f" {leaf.spec.shape}"
    )
  return value


def _tokenizer_files(folder: epath.PathLike | None) -> list[epath.Path]:
  if folder is None:
    return []
  found = [epath.Path(folder) / name for name in _TOKENIZER_FILES]
  found = [file for file in found if file.is_file()]
  if not found:
    raise FileNotFoundError(f"{folder} holds no tokenizer files")
  return found


def _tensors(
  leaves: Sequence[layout.Leaf],
  arrays: Mapping[tuple[str, ...], jax.Array],
) -> Iterator[tuple[str, np.ndarray]]:
  """Names and values in the published layout."""
  halves: dict[str, dict[int, np.ndarray]] = {}
  for leaf in leaves:
    array = arrays[leaf.path]
    for at, piece in leaf.located():
      part = np.asarray(jax.device_get(array[at] if at else array))
      if piece.transposed:
        part = part.swapaxes(-1, -2)
      if piece.phase is None:
        yield piece.name, np.ascontiguousarray(part)
        continue
      pair = halves.setdefault(piece.name, {})
      pair[piece.phase] = part
      if len(pair) == 2:
        both = np.stack([pair[0], pair[1]], -1)
        yield piece.name, both.reshape(*part.shape[:-1], -1)
        del halves[piece.name]
