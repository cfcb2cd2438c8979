"""Models of published size, by shape alone."""

import importlib

import jax
import pytest

from arl_jax import sharding
from arl_jax.checkpoints import hf_config
from arl_jax.model import specs

_YARN = {
  "type": "yarn",
  "beta_slow": 1,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
  "original_max_position_embeddings": 4096,
}
# config.json of the released weights, as far as shapes need it.
_DEEPSEEK_V3 = {
  "model_type": "deepseek_v3",
  "vocab_size": 129280,
  "hidden_size": 7168,
  "intermediate_size": 18432,
  "moe_intermediate_size": 2048,
  "num_hidden_layers": 61,
  "num_attention_heads": 128,
  "num_key_value_heads": 128,
  "n_shared_experts": 1,
  "n_routed_experts": 256,
  "routed_scaling_factor": 2.5,
  "kv_lora_rank": 512,
  "q_lora_rank": 1536,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "qk_nope_head_dim": 128,
  "n_group": 8,
  "topk_group": 4,
  "num_experts_per_tok": 8,
  "first_k_dense_replace": 3,
  "norm_topk_prob": True,
  "rms_norm_eps": 1e-6,
  "max_position_embeddings": 163840,
  "rope_theta": 10000,
  "rope_scaling": {**_YARN, "factor": 40, "beta_fast": 32},
}
_KIMI_K2 = {
  **_DEEPSEEK_V3,
  "model_type": "kimi_k2",
  "vocab_size": 163840,
  "num_attention_heads": 64,
  "num_key_value_heads": 64,
  "n_routed_experts": 384,
  "routed_scaling_factor": 2.827,
  "n_group": 1,
  "topk_group": 1,
  "first_k_dense_replace": 1,
  "rope_theta": 50000.0,
  "max_position_embeddings": 131072,
  "rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0},
}


def _count(model):
  shapes = jax.eval_shape(lambda: sharding.initialise(specs(model), _key()))
  return sum(x.size for x in jax.tree.leaves(shapes))


def _key():
  return jax.random.key(0)


@pytest.mark.parametrize(
  ("recipe", "billions"),
  [
    ("gpt_oss_20b", 20.9),
    ("gpt_oss_120b", 116.8),
    ("qwen3_30b_a3b", 30.5),
    ("kimi_k2", 1026.4),
    ("smollm2_135m", 0.1),
  ],
)
def test_recipes_have_the_published_number_of_parameters(recipe, billions):
  config = importlib.import_module(f"configs.{recipe}").get_config()
  config.validate()
  assert round(_count(config.model) / 1e9, 1) == billions


def test_deepseek_v3_has_671_billion_parameters():
  assert round(_count(hf_config.from_hf(_DEEPSEEK_V3)) / 1e9) == 671


def test_recipe_of_kimi_k2_is_its_configuration():
  model = hf_config.from_hf(_KIMI_K2)
  recipe = importlib.import_module("configs.kimi_k2").get_config().model
  model.scan_layers, model.remat = recipe.scan_layers, recipe.remat
  model.dispatch_tokens = recipe.dispatch_tokens
  assert recipe == model
