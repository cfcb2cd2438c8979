"""Text encoders from folders in Hugging Face's format."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tokenizers

from arl_jax.checkpoints.safetensors_file import open_folder
from arl_jax.checkpoints.source import Source
from arl_jax.model.encoder import EncoderConfig, encode, shapes

_MAX_CONFIG = 1 << 20  # bytes
# Each batch is padded to one of these, so that few programs are compiled.
_ROWS = (1, 8, 32)
_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512)

_LAYER = {
  "q": "attention.self.query",
  "k": "attention.self.key",
  "v": "attention.self.value",
  "out": "attention.output.dense",
  "attention_norm": "attention.output.LayerNorm",
  "up": "intermediate.dense",
  "down": "output.dense",
  "norm": "output.LayerNorm",
}


class Encoder:
  """Texts to vectors. Threads may share it.

  Attributes:
    config: of the model.
    params: float32, as `model.encoder.shapes` says.
    dim: of the vectors.
    max_tokens: of a text, with its two marks; the rest of it doesn't count.
  """

  def __init__(
    self,
    config: EncoderConfig,
    params: Any,
    tokenizer: tokenizers.Tokenizer,
    max_tokens: int,
  ):
    if not 2 < max_tokens <= config.positions:
      raise ValueError(
        f"max_tokens is {max_tokens}, not 3 to {config.positions}"
      )
    self.config, self.params = config, jax.device_put(params)
    self.dim, self.max_tokens = config.width, max_tokens
    self._tokenizer = tokenizer
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    self._encode = jax.jit(functools.partial(_encode, config))

  def embed(self, texts: Sequence[str]) -> np.ndarray:
    """[n, dim] float32, rows of length 1."""
    # Lone surrogates have no UTF-8, which the tokenizer needs.
    clean = [t.encode("utf-8", "replace").decode() for t in texts]
    ids = [e.ids for e in self._tokenizer.encode_batch(clean)]
    # Texts of about one length share a batch, which is padded to its longest.
    order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i))
    found = np.zeros((len(ids), self.dim), np.float32)
    for start in range(0, len(order), _ROWS[-1]):
      rows = order[start : start + _ROWS[-1]]
      found[rows] = self._batch([ids[i] for i in rows])
    return found

  def _batch(self, ids: list[list[int]]) -> np.ndarray:
    longest = max(map(len, ids))
    length = min(_least(_LENGTHS, longest), self.config.positions)
    shape = (_least(_ROWS, len(ids)), max(length, longest))
    padded, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row, text in enumerate(ids):
      padded[row, : len(text)] = text
      mask[row, : len(text)] = True
    return np.asarray(self._encode(self.params, padded, mask))[: len(ids)]


def _encode(
  config: EncoderConfig, params: Any, ids: jax.Array, mask: jax.Array
) -> jax.Array:
  return encode(params, config, ids, mask)


def _least(sizes: Sequence[int], wanted: int) -> int:
  return next((s for s in sizes if s >= wanted), wanted)


def load_encoder(
  folder: pathlib.Path, *, max_tokens: int | None = None
) -> Encoder:
  """Reads a BERT encoder with mean pooling, such as all-MiniLM-L6-v2.

  Args:
    folder: with config.json, model.safetensors and tokenizer.json.
    max_tokens: of a text; what sentence_bert_config.json says if None, or what
      the model has places for.

  Raises:
    ValueError: a file is missing or at fault, or it is another kind of model.
  """
  config = _config(folder)
  pooling = _json(folder / "1_Pooling" / "config.json", needed=False)
  if not pooling.get("pooling_mode_mean_tokens", True):
    raise ValueError(f"{folder} pools its tokens otherwise than by their mean")
  sentence = _json(folder / "sentence_bert_config.json", needed=False)
  if max_tokens is None:
    given = sentence.get("max_seq_length")
    max_tokens = given if type(given) is int else config.positions
  file = folder / "tokenizer.json"
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
  except Exception as error:  # The library raises nothing more special.
    raise ValueError(f"{file} can't be read: {error}") from error
  if tokenizer.get_vocab_size() > config.vocab_size:
    raise ValueError(
      f"{file} has {tokenizer.get_vocab_size()} tokens, the model"
      f" {config.vocab_size}"
    )
  with open_folder(folder) as source:
    params = _params(folder, source, config)
  return Encoder(config, params, tokenizer, max_tokens)


def _config(folder: pathlib.Path) -> EncoderConfig:
  file = folder / "config.json"
  found = _json(file, needed=True)
  for name, wanted in (
    ("model_type", "bert"),
    ("hidden_act", "gelu"),
    ("position_embedding_type", "absolute"),
  ):
    value = found.get(name, wanted)
    if value != wanted:
      raise ValueError(f"{file}: {name} is {value!r:.80}, must be {wanted!r}")
  names = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
    "positions": "max_position_embeddings",
  }
  sizes = {}
  for name, theirs in names.items():
    value = found.get(theirs)
    if type(value) is not int or not 0 < value < 1 << 24:
      raise ValueError(f"{file}: {theirs} is {value!r:.80}, must be a size")
    sizes[name] = value
  eps = found.get("layer_norm_eps", 1e-12)
  if type(eps) not in (int, float) or not 0 < eps < 1:
    raise ValueError(f"{file}: layer_norm_eps is {eps!r:.80}, not 0 to 1")
  return EncoderConfig(**sizes, norm_eps=eps)


def _params(
  folder: pathlib.Path, source: Source, config: EncoderConfig
) -> dict[str, Any]:
  prefix = "" if "embeddings.LayerNorm.weight" in source.tensors else "bert."

  def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
    name = prefix + name
    stored = source.tensors.get(name)
    if stored is None or stored.shape != shape:
      raise ValueError(
        f"{folder}: tensor {name} has shape"
        f" {None if stored is None else list(stored.shape)}, must have"
        f" {list(shape)}"
      )
    whole = tuple(slice(0, n) for n in shape)
    return source.read(name, whole).astype(np.float32)

  def norm(name: str) -> dict[str, np.ndarray]:
    d = config.width
    return {
      "scale": read(f"{name}.weight", (d,)),
      "bias": read(f"{name}.bias", (d,)),
    }

  def linear(name: str, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    # Theirs are [out, in].
    return {
      "kernel": read(f"{name}.weight", shape[::-1]).T,
      "bias": read(f"{name}.bias", shape[1:]),
    }

  wanted = shapes(config)
  layers = {}
  for i, parts in wanted["layers"].items():
    at = f"encoder.layer.{i}."
    layers[i] = {
      name: norm(at + _LAYER[name])
      if name.endswith("norm")
      else linear(at + _LAYER[name], part["kernel"])
      for name, part in parts.items()
    }
  # Kinds tell two texts of a pair apart; here there is one.
  stored = source.tensors.get(
    f"{prefix}embeddings.token_type_embeddings.weight"
  )
  kinds = stored.shape[0] if stored is not None and stored.shape else 1
  kind = read("embeddings.token_type_embeddings.weight", (kinds, config.width))
  return {
    "tokens": read("embeddings.word_embeddings.weight", wanted["tokens"]),
    "positions": read(
      "embeddings.position_embeddings.weight", wanted["positions"]
    ),
    "kind": kind[0],
    "norm": norm("embeddings.LayerNorm"),
    "layers": layers,
  }


def _json(file: pathlib.Path, *, needed: bool) -> dict[str, Any]:
  try:
    with file.open("rb") as opened:
      data = opened.read(_MAX_CONFIG + 1)
  except FileNotFoundError:
    if needed:
      raise ValueError(f"{file} doesn't exist") from None
    return {}
  try:
    found = json.loads(data) if len(data) <= _MAX_CONFIG else None
  except (ValueError, RecursionError):
    found = None
  if not isinstance(found, dict):
    raise ValueError(f"{file} must be a JSON object of at most {_MAX_CONFIG} B")
  return found
