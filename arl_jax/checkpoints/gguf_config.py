"""A GGUF file's fields as a configuration of Hugging Face's newer form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from arl_jax.chat.gguf_header import Header

# general.architecture -> model_type and class name.
ARCHITECTURES = {
  "llama": ("llama", "LlamaForCausalLM"),
  "qwen3": ("qwen3", "Qwen3ForCausalLM"),
  "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
  "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
}
# They change what a model computes, and no family here has them.
_FOREIGN = (
  "attention.clamp_kqv",
  "attention.scale",
  "attention.temperature_scale",
  "logit_scale",
  "rope.scaling.attn_factor",
  "rope.scaling.yarn_ext_factor",
  "rope.scaling.yarn_log_multiplier",
)
_MAX_EXPERTS = 4096
# Llama 3's rope has two wavelengths, of which a file keeps just the effect.
# Published models use these ratios, and a power of two as the context.
_LOW, _HIGH = 1.0, 4.0
_CONTEXTS = (8192, *(1 << k for k in range(4, 24)))


def config_from(
  header: Header, read: Callable[[str], np.ndarray]
) -> dict[str, Any]:
  """The configuration of a model.

  Args:
    header: of the file.
    read: yields a tensor of the file by its name there, as float32.

  Raises:
    ValueError: an architecture that isn't one of `ARCHITECTURES`, or a field
      that is absent, of a wrong type or value, or foreign to it.
  """
  arch = header.get("general.architecture", str)
  if arch not in ARCHITECTURES:
    raise ValueError(
      f"{header.path}: field 'general.architecture' is {arch[:80]!r}, must be"
      f" one of {', '.join(ARCHITECTURES)}"
    )
  if header.get("split.count", int, 1) > 1:
    raise ValueError(
      f"{header.path}: field 'split.count' is {header.fields['split.count']};"
      " merge the parts of a split model first"
    )
  foreign = [*_FOREIGN]
  if arch != "gpt-oss":
    foreign.append("attention.sliding_window")
  if arch in ("llama", "qwen3"):
    foreign.append("expert_count")
  for name in foreign:
    if header.fields.get(f"{arch}.{name}", 0) != 0:
      raise _wrong(header, f"{arch}.{name}", f"0 or absent for {arch}")

  count = lambda name: header.positive(f"{arch}.{name}")  # noqa: E731
  layers, width = count("block_count"), count("embedding_length")
  # Anything that is made for each layer is so bounded by the file's size.
  if layers > len(header.tensors):
    raise _wrong(
      header,
      f"{arch}.block_count",
      f"at most {len(header.tensors)}, as tensors",
    )
  heads = count("attention.head_count")
  kv_heads = header.positive(f"{arch}.attention.head_count_kv", heads)
  if heads % kv_heads:
    raise _wrong(
      header, f"{arch}.attention.head_count_kv", f"to divide {heads}"
    )
  head_dim = header.positive(
    f"{arch}.attention.key_length", max(width // heads, 1)
  )
  rotated = header.positive(f"{arch}.rope.dimension_count", head_dim)
  value_dim = header.positive(f"{arch}.attention.value_length", head_dim)
  if head_dim % 2 or (rotated, value_dim) != (head_dim, head_dim):
    raise ValueError(
      f"{header.path}: fields '{arch}.attention.key_length' {head_dim},"
      f" '{arch}.attention.value_length' {value_dim} and"
      f" '{arch}.rope.dimension_count' {rotated} must be even and equal"
    )
  model_type, name = ARCHITECTURES[arch]
  config: dict[str, Any] = {
    "architectures": [name],
    "model_type": model_type,
    "vocab_size": _vocab_size(header, width),
    "hidden_size": width,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "head_dim": head_dim,
    "hidden_act": "silu",
    "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    "max_position_embeddings": count("context_length"),
    "rms_norm_eps": _positive_float(
      header, f"{arch}.attention.layer_norm_rms_epsilon"
    ),
    "rope_parameters": _rope(header, arch, head_dim, read),
    "tie_word_embeddings": "output.weight" not in header.tensors,
    "dtype": "bfloat16",
  }
  for token in ("bos", "eos"):
    field = f"tokenizer.ggml.{token}_token_id"
    config[f"{token}_token_id"] = (
      header.get(field, int) if field in header.fields else None
    )
  if arch == "gpt-oss":
    config |= _gpt_oss(header, layers)
  elif arch == "qwen3moe":
    config |= _qwen3_moe(header)
  else:
    config["intermediate_size"] = count("feed_forward_length")
  return config


def _gpt_oss(header: Header, layers: int) -> dict[str, Any]:
  kinds = ("sliding_attention", "full_attention")
  experts, used = _experts(header, "gpt-oss")
  return {
    "intermediate_size": header.positive("gpt-oss.expert_feed_forward_length"),
    "num_local_experts": experts,
    "num_experts_per_tok": used,
    "sliding_window": header.positive("gpt-oss.attention.sliding_window"),
    # The file holds none of these: all models of the family agree.
    "layer_types": [kinds[i % 2] for i in range(layers)],
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
  }


def _qwen3_moe(header: Header) -> dict[str, Any]:
  experts, used = _experts(header, "qwen3moe")
  width = header.positive("qwen3moe.expert_feed_forward_length")
  return {
    # Of dense layers, which a file of this architecture can't have.
    "intermediate_size": header.positive("qwen3moe.feed_forward_length", width),
    "moe_intermediate_size": width,
    "num_experts": experts,
    "num_experts_per_tok": used,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    # The architecture implies it.
    "norm_topk_prob": True,
  }


def _experts(header: Header, arch: str) -> tuple[int, int]:
  experts = header.positive(f"{arch}.expert_count")
  used = header.positive(f"{arch}.expert_used_count")
  if experts > _MAX_EXPERTS:
    raise _wrong(header, f"{arch}.expert_count", f"at most {_MAX_EXPERTS}")
  if used > experts:
    raise _wrong(header, f"{arch}.expert_used_count", f"at most {experts}")
  return experts, used


def _vocab_size(header: Header, width: int) -> int:
  embedding = header.tensors.get("token_embd.weight")
  if embedding is None:
    raise ValueError(f"{header.path}: tensor 'token_embd.weight' is absent")
  if len(embedding.shape) != 2 or embedding.shape[1] != width:
    raise ValueError(
      f"{header.path}: tensor 'token_embd.weight' has shape {embedding.shape},"
      f" must have {width} columns"
    )
  return embedding.shape[0]


def _rope(
  header: Header,
  arch: str,
  head_dim: int,
  read: Callable[[str], np.ndarray],
) -> dict[str, Any]:
  prefix = f"{arch}.rope.scaling"
  theta = _positive_float(header, f"{arch}.rope.freq_base", 10000.0)
  kind = header.get(f"{prefix}.type", str, "none")
  if kind not in ("none", "linear", "yarn"):
    raise _wrong(header, f"{prefix}.type", "none, linear or yarn")
  if "rope_freqs.weight" in header.tensors:
    factors = read("rope_freqs.weight")
    if arch != "llama" or kind != "none" or factors.shape != (head_dim // 2,):
      raise ValueError(
        f"{header.path}: tensor 'rope_freqs.weight' has shape {factors.shape}"
        f" with {arch} and rope scaling {kind!r}; it must have {head_dim // 2}"
        " values, with llama and none"
      )
    return _llama3(header, theta, head_dim, factors)
  if kind == "none":
    return {"rope_type": "default", "rope_theta": theta}
  rope: dict[str, Any] = {
    "rope_type": kind,
    "rope_theta": theta,
    "factor": _positive_float(header, f"{prefix}.factor"),
  }
  if kind == "yarn":
    rope["original_max_position_embeddings"] = header.positive(
      f"{prefix}.original_context_length"
    )
    rope["beta_fast"] = _positive_float(
      header, f"{prefix}.yarn_beta_fast", 32.0
    )
    rope["beta_slow"] = _positive_float(header, f"{prefix}.yarn_beta_slow", 1.0)
    if f"{prefix}.yarn_attn_factor" in header.fields:
      rope["attention_factor"] = _positive_float(
        header, f"{prefix}.yarn_attn_factor"
      )
    if arch == "gpt-oss":
      rope["truncate"] = False  # As published; the file doesn't say.
  return rope


def _llama3(
  header: Header, theta: float, head_dim: int, factors: np.ndarray
) -> dict[str, Any]:
  """Parameters that yield `factors` [head_dim / 2], divisors of frequencies."""
  frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  factor = float(str(factors.max()))
  for context in _CONTEXTS if factors.min() >= 1 and factor < math.inf else ():
    smooth = context * frequencies / (2 * math.pi)
    smooth = np.clip((smooth - _LOW) / (_HIGH - _LOW), 0, 1)
    if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
      return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": context,
      }
  raise ValueError(
    f"{header.path}: tensor 'rope_freqs.weight' from {factors.min():g} to"
    f" {factors.max():g} isn't Llama 3's rope for a context of"
    f" {min(_CONTEXTS)} to {max(_CONTEXTS)}"
  )


def _positive_float(
  header: Header, name: str, default: float | None = None
) -> float:
  value = header.get(name, float, default)
  if not 0 < value < math.inf:
    raise _wrong(header, name, "positive")
  return value


def _wrong(header: Header, name: str, right: str) -> ValueError:
  value = str(header.fields.get(name))[:80]
  return ValueError(
    f"{header.path}: field {name!r} is {value!r}, must be {right}"
  )
