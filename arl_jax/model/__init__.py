"""Policy models: pure functions over nested dicts of arrays."""

from arl_jax.model.config import ModelConfig
from arl_jax.model.mtp import mtp_forward
from arl_jax.model.transformer import (
  extend,
  forward,
  init,
  init_cache,
  specs,
  token_logprobs,
)

__all__ = [
  "ModelConfig",
  "extend",
  "forward",
  "init",
  "init_cache",
  "mtp_forward",
  "specs",
  "token_logprobs",
]
