"""Policy models: pure functions over nested dicts of arrays."""

from arl_jax.model.config import ModelConfig, RopeConfig
from arl_jax.model.decoding import extend, init_cache
from arl_jax.model.logprobs import token_logprobs
from arl_jax.model.mtp import add_mtp, mtp_forward
from arl_jax.model.transformer import forward, init, specs

__all__ = [
  "ModelConfig",
  "RopeConfig",
  "add_mtp",
  "extend",
  "forward",
  "init",
  "init_cache",
  "mtp_forward",
  "specs",
  "token_logprobs",
]
