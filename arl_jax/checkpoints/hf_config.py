"""A checkpoint's config.json -> `ModelConfig`.

Both forms are read: the older one with `rope_theta` and `rope_scaling`, and
the newer one with `rope_parameters`. What the core can't compute is refused by
name, never ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from arl_jax.model.config import ModelConfig, RopeConfig

_REQUIRED = object()


class Fields:
  """Typed look-ups that say which key is wrong."""

  def __init__(self, values: Mapping[str, Any], where: str):
    self.values, self.where = values, where

  def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = self.values.get(key)
    if value is None:
      if default is _REQUIRED:
        raise ValueError(f"{self.where} has no {key!r}")
      return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
      value = float(value)
    if type(value) is not kind:
      raise ValueError(
        f"{self.where}: {key} is {value!r}, not of type {kind.__name__}"
      )
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f"{self.where}: {key} is {value!r}, not finite")
    if isinstance(value, int) and not 0 <= value < 1 << 31:
      raise ValueError(f"{self.where}: {key} is {value}, not in 0..2^31-1")
    return value

  def expect(self, key: str, allowed: tuple[Any, ...]) -> None:
    """A setting that may be absent but has no other implementation."""
    value = self.values.get(key)
    if value is not None and value not in allowed:
      raise ValueError(
        f"{self.where}: {key} is {value!r}; supported is {allowed[0]!r}"
      )


def from_hf(
  values: Mapping[str, Any], where: str = "config.json"
) -> ModelConfig:
  """The `ModelConfig` of a parsed config.json, without MTP modules.

  Raises:
    ValueError: an unknown architecture, a missing or ill-typed key, or a
      setting that isn't implemented; names it.
  """
  kind = values.get("model_type")
  if not isinstance(kind, str) or kind not in _FAMILIES:
    raise ValueError(
      f"{where}: model_type is {kind!r}, not one of {sorted(_FAMILIES)}"
    )
  fields = Fields(values, where)
  fields.expect("hidden_act", ("silu",))
  config = ModelConfig(
    vocab_size=fields.get("vocab_size", int),
    width=fields.get("hidden_size", int),
    layers=fields.get("num_hidden_layers", int),
    heads=fields.get("num_attention_heads", int),
    kv_heads=fields.get(
      "num_key_value_heads", int, fields.get("num_attention_heads", int)
    ),
    norm_eps=fields.get("rms_norm_eps", float),
    tied=fields.get("tie_word_embeddings", bool, False),
    context_length=fields.get("max_position_embeddings", int, 0),
    experts=0,
    mtp_heads=0,
    qk_norm=False,
    rope=_rope(fields),
  )
  config = _FAMILIES[kind](fields, config)
  try:
    config.validate()
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from None
  return config


def _rope_fields(fields: Fields) -> Fields:
  newer = fields.get("rope_parameters", dict, {})
  older = fields.get("rope_scaling", dict, {})
  return Fields(newer or older, f"{fields.where}: rope parameters")


def _rope(fields: Fields) -> RopeConfig:
  inner = _rope_fields(fields)
  kind = inner.values.get("rope_type", inner.values.get("type", "default"))
  theta = inner.get("rope_theta", float, None)
  if theta is None:
    theta = fields.get("rope_theta", float, 10_000.0)
  if not theta > 1:
    raise ValueError(f"{fields.where}: rope_theta is {theta}, not > 1")
  if kind == "default":
    return RopeConfig(theta=theta)
  if kind not in ("llama3", "yarn"):
    raise ValueError(
      f"{fields.where}: rope_type is {kind!r}, not default, llama3 or yarn"
    )
  factor = inner.get("factor", float)
  if not factor >= 1:
    raise ValueError(f"{inner.where}: factor is {factor}, not >= 1")
  stretched = RopeConfig(
    theta=theta,
    kind=kind,
    factor=factor,
    original_length=inner.get("original_max_position_embeddings", int),
  )
  if kind == "llama3":
    low = inner.get("low_freq_factor", float)
    high = inner.get("high_freq_factor", float)
    if not 0 < low < high:
      raise ValueError(
        f"{inner.where}: low_freq_factor {low} is not below high_freq_factor"
        f" {high}, both above 0"
      )
    return dataclasses.replace(stretched, low=low, high=high)
  low = inner.get("beta_slow", float, 1.0)
  high = inner.get("beta_fast", float, 32.0)
  for name, turns in (("beta_slow", low), ("beta_fast", high)):
    if not 1e-3 <= turns <= 1e6:
      raise ValueError(f"{inner.where}: {name} is {turns}, not in 1e-3..1e6")
  return dataclasses.replace(
    stretched,
    low=low,
    high=high,
    truncate=inner.get("truncate", bool, True),
    amplitude=amplitude(inner, factor),
  )


def amplitude(inner: Fields, factor: float) -> float:
  """YaRN's attention factor."""
  given = inner.get("attention_factor", float, None)
  if given is not None:
    return given
  mscale = inner.get("mscale", float, 0.0)
  mscale_all = inner.get("mscale_all_dim", float, 0.0)
  if mscale and mscale_all:
    return _mscale(factor, mscale) / _mscale(factor, mscale_all)
  return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
  if not abs(weight) < 1e6:
    raise ValueError(f"rope parameters: mscale is {weight}, not below 1e6")
  return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _grouped(fields: Fields, config: ModelConfig, **more: Any) -> ModelConfig:
  """Fields of families with grouped-query attention."""
  if "windows" not in more:
    full = ["full_attention"] * min(config.layers, 1 << 12)
    fields.expect("layer_types", (full,))
  head_dim = fields.get("head_dim", int, 0)
  return dataclasses.replace(
    config,
    head_dim=head_dim or config.width // max(config.heads, 1),
    attention_bias=fields.get("attention_bias", bool, False),
    **more,
  )


def _llama(fields: Fields, config: ModelConfig) -> ModelConfig:
  fields.expect("mlp_bias", (False,))
  fields.expect("partial_rotary_factor", (1.0,))
  return _grouped(
    fields, config, dense_width=fields.get("intermediate_size", int)
  )


def _qwen3(fields: Fields, config: ModelConfig) -> ModelConfig:
  fields.expect("use_sliding_window", (False,))
  return _grouped(
    fields,
    config,
    qk_norm=True,
    dense_width=fields.get("intermediate_size", int),
  )


def _qwen3_moe(fields: Fields, config: ModelConfig) -> ModelConfig:
  fields.expect("use_sliding_window", (False,))
  fields.expect("decoder_sparse_step", (1,))
  fields.expect("mlp_only_layers", ([],))
  experts = fields.get("num_experts", int, 0)
  return _grouped(
    fields,
    config,
    qk_norm=True,
    experts=experts or fields.get("num_local_experts", int),
    experts_per_token=fields.get("num_experts_per_tok", int),
    expert_width=fields.get("moe_intermediate_size", int),
    normalise_gates=fields.get("norm_topk_prob", bool, False),
  )


def _gpt_oss(fields: Fields, config: ModelConfig) -> ModelConfig:
  fields.expect("swiglu_alpha", (1.702,))
  window = fields.get("sliding_window", int)
  if not window:
    raise ValueError(f"{fields.where}: sliding_window is 0, not >= 1")
  pattern = ["sliding_attention", "full_attention"]
  usual = [pattern[i % 2] for i in range(min(config.layers, 1 << 12))]
  fields.expect("layer_types", (usual,))
  return _grouped(
    fields,
    config,
    sinks=True,
    windows=(window, 0),
    experts=fields.get("num_local_experts", int),
    experts_per_token=fields.get("num_experts_per_tok", int),
    expert_width=fields.get("intermediate_size", int),
    expert_bias=True,
    router_bias=True,
    swiglu_limit=fields.get("swiglu_limit", float, 7.0),
  )


def _deepseek(fields: Fields, config: ModelConfig) -> ModelConfig:
  fields.expect("attention_bias", (False,))
  fields.expect("scoring_func", ("sigmoid",))
  fields.expect("topk_method", ("noaux_tc",))
  fields.expect("moe_layer_freq", (1,))
  rotated = fields.get("qk_rope_head_dim", int)
  score_scale = 1.0
  if config.rope.kind == "yarn":
    weight = _rope_fields(fields).get("mscale_all_dim", float, 0.0)
    score_scale = _mscale(config.rope.factor, weight) ** 2 if weight else 1.0
  return dataclasses.replace(
    config,
    # Every head has its own keys, expanded from the shared latent.
    kv_heads=config.heads,
    head_dim=fields.get("qk_nope_head_dim", int) + rotated,
    rope_dim=rotated,
    value_dim=fields.get("v_head_dim", int),
    latent_rank=fields.get("kv_lora_rank", int),
    query_rank=fields.get("q_lora_rank", int, 0),
    score_scale=score_scale,
    dense_layers=fields.get("first_k_dense_replace", int),
    dense_width=fields.get("intermediate_size", int),
    experts=fields.get("n_routed_experts", int),
    experts_per_token=fields.get("num_experts_per_tok", int),
    expert_width=fields.get("moe_intermediate_size", int),
    shared_experts=fields.get("n_shared_experts", int, 0),
    router="sigmoid",
    normalise_gates=fields.get("norm_topk_prob", bool, True),
    gate_scale=fields.get("routed_scaling_factor", float, 1.0),
    expert_groups=fields.get("n_group", int, 1),
    groups_kept=fields.get("topk_group", int, 1),
    rope=dataclasses.replace(
      config.rope,
      interleaved=fields.get("rope_interleave", bool, True),
    ),
  )


_FAMILIES: Mapping[str, Callable[[Fields, ModelConfig], ModelConfig]] = {
  "llama": _llama,
  "qwen3": _qwen3,
  "qwen3_moe": _qwen3_moe,
  "gpt_oss": _gpt_oss,
  "deepseek_v3": _deepseek,
  "kimi_k2": _deepseek,
}
