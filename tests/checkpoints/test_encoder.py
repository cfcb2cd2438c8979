"""Encoders read from folders."""

import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from arl_jax.checkpoints.encoder import load_encoder
from tests.model.test_encoder import CONFIG, by_hand, random_params

MINILM = pathlib.Path(__file__).parents[2] / "models" / "all-MiniLM-L6-v2"
NAMES = {
  "q": "attention.self.query",
  "k": "attention.self.key",
  "v": "attention.self.value",
  "out": "attention.output.dense",
  "attention_norm": "attention.output.LayerNorm",
  "up": "intermediate.dense",
  "down": "output.dense",
  "norm": "output.LayerNorm",
}


def write(folder, params, prefix=""):
  """A folder as Hugging Face's libraries write it."""
  tensors = {}

  def put(name, part):
    for theirs, ours in (("weight", "kernel"), ("weight", "scale")):
      if ours in part:
        tensors[f"{prefix}{name}.{theirs}"] = np.ascontiguousarray(part[ours].T)
    tensors[f"{prefix}{name}.bias"] = part["bias"]

  embeddings = f"{prefix}embeddings."
  tensors[f"{embeddings}word_embeddings.weight"] = params["tokens"]
  tensors[f"{embeddings}position_embeddings.weight"] = params["positions"]
  tensors[f"{embeddings}token_type_embeddings.weight"] = np.stack(
    [params["kind"], params["kind"] + 1]
  )
  put("embeddings.LayerNorm", params["norm"])
  for i, layer in params["layers"].items():
    for name, part in layer.items():
      put(f"encoder.layer.{i}.{NAMES[name]}", part)
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  config = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "vocab_size": CONFIG.vocab_size,
    "hidden_size": CONFIG.width,
    "num_hidden_layers": CONFIG.layers,
    "num_attention_heads": CONFIG.heads,
    "intermediate_size": CONFIG.hidden,
    "max_position_embeddings": CONFIG.positions,
    "layer_norm_eps": CONFIG.norm_eps,
  }
  (folder / "config.json").write_text(json.dumps(config))
  vocab = {name: i for i, name in enumerate(["?", *"abcdefghij"])}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocab, unk_token="?")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.save(str(folder / "tokenizer.json"))


def test_reads_what_was_written(tmp_path):
  params = random_params(CONFIG)
  write(tmp_path, params)
  encoder = load_encoder(tmp_path)
  assert encoder.config == CONFIG
  assert (encoder.dim, encoder.max_tokens) == (12, 9)
  jax.tree.map(np.testing.assert_array_equal, encoder.params, params)
  # 40 texts are two batches; of the last one nine tokens count.
  texts = [" ".join("abcdefghij"[: i % 9 + 1]) for i in range(39)] + ["a " * 50]
  found = encoder.embed(texts)
  for text, row in zip(texts, found, strict=True):
    ids = ["?abcdefghij".index(letter) for letter in text.split()][:9]
    np.testing.assert_allclose(row, by_hand(params, CONFIG, ids), atol=1e-5)
  assert encoder.embed(["\ud800"]).shape == (1, 12)


def test_reads_names_of_a_whole_model(tmp_path):
  params = random_params(CONFIG)
  write(tmp_path, params, "bert.")
  jax.tree.map(
    np.testing.assert_array_equal, load_encoder(tmp_path).params, params
  )


@pytest.mark.parametrize(
  ("file", "change", "message"),
  [
    ("config.json", {"model_type": "gpt2"}, "model_type is 'gpt2', must be"),
    ("config.json", {"hidden_act": "relu"}, "hidden_act is 'relu', must be"),
    ("config.json", {"hidden_size": True}, "hidden_size is True, must be"),
    ("config.json", {"layer_norm_eps": 2}, "layer_norm_eps is 2, not 0 to 1"),
    ("config.json", {"intermediate_size": 21}, "must have"),
    ("config.json", {"vocab_size": 10}, "has 11 tokens, the model 10"),
    (
      "1_Pooling/config.json",
      {"pooling_mode_mean_tokens": False},
      "pools its tokens otherwise",
    ),
    (
      "sentence_bert_config.json",
      {"max_seq_length": 10},
      "max_tokens is 10, not 3 to 9",
    ),
  ],
)
def test_refuses_other_models(tmp_path, file, change, message):
  write(tmp_path, random_params(CONFIG))
  path = tmp_path / file
  path.parent.mkdir(exist_ok=True)
  found = json.loads(path.read_text()) if path.exists() else {}
  path.write_text(json.dumps(found | change))
  with pytest.raises(ValueError, match=message):
    load_encoder(tmp_path)


@pytest.mark.parametrize(
  "file", ["config.json", "model.safetensors", "tokenizer.json"]
)
def test_says_what_is_missing_or_broken(tmp_path, file):
  write(tmp_path, random_params(CONFIG))
  (tmp_path / file).write_bytes(b"\xff{")
  with pytest.raises(ValueError, match=str(tmp_path)):
    load_encoder(tmp_path)
  (tmp_path / file).unlink()
  with pytest.raises(ValueError, match=str(tmp_path)):
    load_encoder(tmp_path)


@pytest.mark.slow
def test_minilm_gives_published_values():
  if not MINILM.is_dir():
    pytest.skip("no models/; `make models` fetches them")
  encoder = load_encoder(MINILM)
  assert (encoder.dim, encoder.max_tokens) == (384, 256)
  texts = [
    "That is a happy person",
    "That is a happy dog",
    "That is a very happy person",
    "Today is a sunny day",
  ]
  found = encoder.embed(texts)
  # The similarities that the model's card gives for these sentences.
  np.testing.assert_allclose(
    found[0] @ found[1:].T, [0.695, 0.943, 0.257], atol=5e-4
  )
  tensors = safetensors.numpy.load_file(MINILM / "model.safetensors")
  tokenizer = tokenizers.Tokenizer.from_file(str(MINILM / "tokenizer.json"))
  tokenizer.no_padding()
  ids = tokenizer.encode(texts[0]).ids
  # [CLS] that is a happy person [SEP]
  assert ids == [101, 2008, 2003, 1037, 3407, 2711, 102]
  theirs = _numpy_bert(tensors, ids)
  np.testing.assert_allclose(found[0], theirs, atol=2e-6)


def _numpy_bert(tensors, ids):
  """Forward pass from the file's own names."""
  layers = {}
  for i in range(6):
    at = f"encoder.layer.{i}."
    layers[str(i)] = {
      ours: {
        ("scale" if ours.endswith("norm") else "kernel"): (
          tensors[f"{at}{theirs}.weight"].T
        ),
        "bias": tensors[f"{at}{theirs}.bias"],
      }
      for ours, theirs in NAMES.items()
    }
  params = {
    "tokens": tensors["embeddings.word_embeddings.weight"],
    "positions": tensors["embeddings.position_embeddings.weight"],
    "kind": tensors["embeddings.token_type_embeddings.weight"][0],
    "norm": {
      "scale": tensors["embeddings.LayerNorm.weight"],
      "bias": tensors["embeddings.LayerNorm.bias"],
    },
    "layers": layers,
  }
  config = type(CONFIG)(
    vocab_size=30522,
    width=384,
    layers=6,
    heads=12,
    hidden=1536,
    positions=512,
    norm_eps=1e-12,
  )
  return by_hand(params, config, ids)
