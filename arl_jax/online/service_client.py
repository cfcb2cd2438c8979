"""What an agent samples from, in the process of the server itself."""

from __future__ import annotations

from collections.abc import Sequence

from arl_jax.rollout.request import Sampling
from arl_jax.serving.service import Service
from arl_jax.types import Sample


class ServiceClient:
  """A `types.PolicyClient` over a running service."""

  def __init__(self, service: Service, *, training: bool = False):
    """Takes a service.

    Args:
      service: started.
      training: whether what is sampled may be trained on.
    """
    self._service, self._training = service, training

  async def sample(
    self,
    session: str,
    ids: Sequence[int],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    seed: int,
    temperature: float = 1.0,
  ) -> Sample:
    """See `types.PolicyClient`; raises as `Service.open` and its stream."""
    sampling = Sampling(
      max_tokens=max_tokens,
      stop_ids=tuple(stop_ids),
      seed=seed,
      temperature=temperature,
    )
    stream = self._service.open(
      ids, sampling, session=session, training=self._training
    )
    async with stream:
      return await stream.result()

  async def close(self, session: str) -> None:
    self._service.close_session(session)
