"""Eight virtual CPU devices, and array shapes checked where annotated."""

import os

# Both are read when JAX starts, so they come before anything that imports it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jaxtyping

jaxtyping.install_import_hook(
  ["arl_jax.losses", "arl_jax.model", "arl_jax.learner"], "beartype.beartype"
)
