"""How this process reaches the run's group queue. Imports no jax."""

from __future__ import annotations

from arl_jax.cluster.config import ClusterConfig
from arl_jax.queueing import ray_queue
from arl_jax.queueing.client import ActorQueue, LearnerQueue
from arl_jax.queueing.ray_client import RayActorQueue, RayLearnerQueue


def learner_queue(cluster: ClusterConfig) -> LearnerQueue | RayLearnerQueue:
  """The queue as the learner sees it; a context manager.

  Raises:
    ValueError: there is no address, or the token file can't be used.
    OSError: the token can't be read.
  """
  if _through_ray(cluster):
    return RayLearnerQueue(cluster)
  return LearnerQueue(cluster)


def actor_queue(
  cluster: ClusterConfig, index: int
) -> ActorQueue | RayActorQueue:
  """The queue as an actor sees it, for `async with`; raises the same."""
  if _through_ray(cluster):
    return RayActorQueue(cluster, index)
  return ActorQueue(cluster, index)


def _through_ray(cluster: ClusterConfig) -> bool:
  return cluster.ray.object_store and ray_queue.get_host() is not None
