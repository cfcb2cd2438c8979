"""Checkpoints: published models in and out, training state on disk."""

from arl_jax.checkpoints.hf import load, save_hf

__all__ = ["load", "save_hf"]
