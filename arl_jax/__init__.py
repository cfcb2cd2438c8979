"""Reinforcement learning of language-model agents in JAX.

Importing the package loads nothing heavy and touches no device; its parts are
imported by name, such as `from arl_jax import losses`.
"""

__version__ = "0.1.0"
