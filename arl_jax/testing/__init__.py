"""What users need to test their own parts."""

from arl_jax.testing.battery import CHECKS, Result, check

__all__ = ["CHECKS", "Result", "check"]
