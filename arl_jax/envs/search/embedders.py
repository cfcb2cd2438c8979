"""What makes vectors of texts, chosen by a string.

| string | what |
|---|---|
| `hashed`, `hashed:DIM` | words hashed into 256 or DIM numbers; no model |
| `minilm:FOLDER` | a BERT encoder in Hugging Face's format, by JAX |
| `openai:URL#MODEL` | an endpoint such as http://localhost:8000/v1 |
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from arl_jax.envs.search.embedding_client import EmbeddingClient
from arl_jax.envs.search.hashing import hashed_embedder

Embedder = Callable[[Sequence[str]], np.ndarray]

_MAX_DIM = 65536
_READ_BYTES = 2**20
# The environment's variable that holds an endpoint's key, if it wants one.
_KEY = "OPENAI_API_KEY"


@dataclasses.dataclass(frozen=True)
class NamedEmbedder:
  """An embedder, with what tells whether two give the same vectors.

  Attributes:
    name: the string that chose it.
    identity: the same for equal vectors wherever a model's folder lies.
    dim: of the vectors.
    embed: n texts to [n, dim].
  """

  name: str
  identity: str
  dim: int
  embed: Embedder

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """[n, dim] float32, rows of length 1 or 0.

    Raises:
      ValueError: `embed` gives another shape, or no finite numbers.
    """
    rows = np.asarray(self.embed(texts), np.float32)
    if rows.shape != (len(texts), self.dim):
      raise ValueError(
        f"embedder {self.name} gave shape {list(rows.shape)} for {len(texts)}"
        f" texts, not [{len(texts)}, {self.dim}]"
      )
    if not np.isfinite(rows).all():
      raise ValueError(f"embedder {self.name} gave numbers that aren't finite")
    return rows


def named_embedder(name: str) -> NamedEmbedder:
  """The embedder that a string names; see the module.

  Raises:
    ValueError: there is none of that name, or its folder or endpoint can't be
      used.
  """
  kind, _, rest = name.partition(":")
  if kind == "hashed":
    return _hashed(name, rest)
  if kind == "minilm":
    return _minilm(name, rest)
  if kind == "openai":
    return _openai(name, rest)
  raise ValueError(
    f"embedder is {name!r:.200}; it must be hashed, hashed:DIM, minilm:FOLDER"
    " or openai:URL#MODEL"
  )


def _hashed(name: str, rest: str) -> NamedEmbedder:
  dim = 256 if not rest else int(rest) if rest.isdecimal() else 0
  if not 1 <= dim <= _MAX_DIM:
    raise ValueError(
      f"embedder is {name!r:.200}; after hashed: must be 1 to {_MAX_DIM}"
    )
  return NamedEmbedder(name, f"hashed:{dim}", dim, hashed_embedder(dim))


def _minilm(name: str, rest: str) -> NamedEmbedder:
  folder = pathlib.Path(rest)
  if not rest or not folder.is_dir():
    raise ValueError(
      f"embedder is {name!r:.200}, but {rest!r:.200} is no folder; name one"
      " that holds config.json, model.safetensors and tokenizer.json"
    )
  # It comes with JAX, which nobody else here needs.
  from arl_jax.checkpoints.encoder import load_encoder

  encoder = load_encoder(folder)
  identity = f"bert:{_digest(folder)}:{encoder.max_tokens}"
  return NamedEmbedder(name, identity, encoder.dim, encoder.embed)


def _openai(name: str, rest: str) -> NamedEmbedder:
  url, _, model = rest.partition("#")
  if not url or not model:
    raise ValueError(
      f"embedder is {name!r:.200}; it must be like"
      " openai:http://localhost:8000/v1#MODEL"
    )
  client = EmbeddingClient(url, model, key=os.environ.get(_KEY, ""))
  (row,) = client(["dimension"])
  return NamedEmbedder(name, f"openai:{model}", len(row), client)


def _digest(folder: pathlib.Path) -> str:
  """Of what decides vectors: the weights and the tokenizer."""
  hashed = hashlib.sha256()
  for file in ("model.safetensors", "tokenizer.json"):
    with (folder / file).open("rb") as opened:
      while data := opened.read(_READ_BYTES):
        hashed.update(data)
  return hashed.hexdigest()[:32]
