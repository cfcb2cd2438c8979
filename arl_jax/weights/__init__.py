"""Weights travel: a learner publishes versions, servers take them in."""

from arl_jax.weights.config import WeightsConfig
from arl_jax.weights.manifest import Version
from arl_jax.weights.publisher import Publisher
from arl_jax.weights.storage import MissingError
from arl_jax.weights.subscriber import Fetched, Subscriber

__all__ = [
  "Fetched",
  "MissingError",
  "Publisher",
  "Subscriber",
  "Version",
  "WeightsConfig",
]
