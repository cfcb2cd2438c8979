"""Checkpoints: published models in and out, training state on disk."""

from arl_jax.checkpoints.hf import load, load_config, save_hf

__all__ = ["load", "load_config", "save_hf"]
