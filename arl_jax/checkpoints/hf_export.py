"""`ModelConfig` -> a config.json that transformers reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from arl_jax.checkpoints import hf_config
from arl_jax.model.config import ModelConfig


def family(config: ModelConfig) -> str:
  """The model_type whose published layout fits."""
  if config.latent_rank:
    return "deepseek_v3"
  if config.sinks:
    return "gpt_oss"
  if config.qk_norm:
    return "qwen3_moe" if config.experts else "qwen3"
  return "llama"


_CLASSES = {
  "llama": "LlamaForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "qwen3_moe": "Qwen3MoeForCausalLM",
  "gpt_oss": "GptOssForCausalLM",
  "deepseek_v3": "DeepseekV3ForCausalLM",
}


def to_hf(config: ModelConfig) -> dict[str, Any]:
  """A config.json that transformers reads, of either generation.

  Raises:
    ValueError: no published architecture has this combination of fields.
  """
  kind = family(config)
  values: dict[str, Any] = {
    "architectures": [_CLASSES[kind]],
    "model_type": kind,
    "hidden_act": "silu",
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "num_hidden_layers": config.layers,
    "num_attention_heads": config.heads,
    "num_key_value_heads": config.kv_heads,
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tied,
    "attention_bias": config.attention_bias,
    "max_position_embeddings": config.context_length or 1 << 17,
    "rope_theta": config.rope.theta,
    "rope_scaling": _rope_scaling(config),
    **_SPECIFIC[kind](config),
  }
  again = hf_config.from_hf(values, "this model")
  core = dataclasses.replace(
    config,
    mtp_heads=0,
    scan_layers=False,
    remat="none",
    dispatch_tokens=again.dispatch_tokens,
    context_length=again.context_length,
  )
  if again != core:
    different = [
      f.name
      for f in dataclasses.fields(core)
      if getattr(core, f.name) != getattr(again, f.name)
    ]
    raise ValueError(
      f"no published architecture computes this model: as {kind!r},"
      f" model.{different[0]} would be {getattr(again, different[0])!r}, not"
      f" {getattr(core, different[0])!r}"
    )
  return values


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
  rope = config.rope
  if rope.kind == "plain":
    return None
  scaling = {
    "rope_type": rope.kind,
    "factor": rope.factor,
    "original_max_position_embeddings": rope.original_length,
  }
  if rope.kind == "llama3":
    return {
      **scaling,
      "low_freq_factor": rope.low,
      "high_freq_factor": rope.high,
    }
  scaling |= {
    "beta_slow": rope.low,
    "beta_fast": rope.high,
    "truncate": rope.truncate,
  }
  if config.score_scale != 1.0:
    # Solves (0.1 · m · ln(factor) + 1)² = score_scale for m.
    weight = (math.sqrt(config.score_scale) - 1) / (0.1 * math.log(rope.factor))
    scaling["mscale_all_dim"] = round(weight, 9)
    # The same for both makes the attention factor 1.
    scaling["mscale"] = round(weight, 9)
  if rope.amplitude != hf_config.amplitude(
    hf_config.Fields(scaling, ""), rope.factor
  ):
    scaling["attention_factor"] = rope.amplitude
  return scaling


def _grouped_to_hf(config: ModelConfig) -> dict[str, Any]:
  dense = {"intermediate_size": config.dense_width, "mlp_bias": False}
  return {"head_dim": config.head_dim, **dense}


def _qwen3_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
  return {
    "head_dim": config.head_dim,
    "num_experts": config.experts,
    "num_experts_per_tok": config.experts_per_token,
    "moe_intermediate_size": config.expert_width,
    # Of dense layers, which there are none of.
    "intermediate_size": config.expert_width,
    "norm_topk_prob": config.normalise_gates,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
  }


def _gpt_oss_to_hf(config: ModelConfig) -> dict[str, Any]:
  return {
    "head_dim": config.head_dim,
    "sliding_window": config.windows[0],
    "layer_types": [
      "sliding_attention" if config.layer(i).window else "full_attention"
      for i in range(config.layers)
    ],
    "num_local_experts": config.experts,
    "num_experts_per_tok": config.experts_per_token,
    "intermediate_size": config.expert_width,
    "swiglu_limit": config.swiglu_limit,
  }


def _deepseek_to_hf(config: ModelConfig) -> dict[str, Any]:
  return {
    "qk_nope_head_dim": config.head_dim - config.rope_dim,
    "qk_rope_head_dim": config.rope_dim,
    "v_head_dim": config.values,
    "kv_lora_rank": config.latent_rank,
    "q_lora_rank": config.query_rank or None,
    "first_k_dense_replace": config.dense_layers,
    "intermediate_size": config.dense_width,
    "n_routed_experts": config.experts,
    "num_experts_per_tok": config.experts_per_token,
    "moe_intermediate_size": config.expert_width,
    "n_shared_experts": config.shared_experts,
    "norm_topk_prob": config.normalise_gates,
    "routed_scaling_factor": config.gate_scale,
    "n_group": config.expert_groups,
    "topk_group": config.groups_kept,
    "rope_interleave": config.rope.interleaved,
    "num_nextn_predict_layers": config.mtp_heads,
  }


_SPECIFIC: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = {
  "llama": _grouped_to_hf,
  "qwen3": _grouped_to_hf,
  "qwen3_moe": _qwen3_moe_to_hf,
  "gpt_oss": _gpt_oss_to_hf,
  "deepseek_v3": _deepseek_to_hf,
}
