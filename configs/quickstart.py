"""A self-editing search agent, trained on real text in minutes on a CPU.

Command:   make quickstart
Hardware:  2 CPU cores, 2 GiB of memory
Duration:  8 minutes; twice that if other work shares the cores
Expect:    held-out reward from about 0.0 to about 1.2
"""

from arl_jax.runtime.config import Config


def get_config() -> Config:
  """See the fields of `Config`; every one is a flag."""
  return Config()
