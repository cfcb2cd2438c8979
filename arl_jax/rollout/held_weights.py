"""Weights by policy version: the current ones, and those still in use."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from arl_jax.rollout.request import Request


class HeldWeights:
  """Weights that requests may be computed with.

  Attributes:
    version: the current one.
  """

  def __init__(self, params: Any, version: int):
    self.version = version
    self._params = {version: params}
    # Whose turn to decode was last.
    self._last = version

  @property
  def versions(self) -> tuple[int, ...]:
    """All that are held, in order."""
    return tuple(sorted(self._params))

  def of(self, batch: Sequence[Request]) -> Any:
    """The weights of requests that have one version."""
    return self._params[batch[0].version]

  def add(self, params: Any, version: int) -> bool:
    """Makes a version the current one.

    Returns:
      Whether it is another than before.

    Raises:
      ValueError: it is older, or no number.
    """
    try:
      version = operator.index(version)
    except TypeError as error:
      raise ValueError(f"version is {version!r}, not an integer") from error
    if version < self.version:
      raise ValueError(f"version {version} is older than {self.version}")
    self._params[version] = params
    new, self.version = version != self.version, version
    return new

  def replace(self, params: Any, version: int) -> None:
    """Holds these alone."""
    self._params, self.version = {version: params}, version

  def drop_unused(self, requests: Iterable[Request]) -> None:
    """Forgets what neither these requests nor new ones need."""
    needed = {self.version, *(r.version for r in requests)}
    for version in self._params.keys() - needed:
      del self._params[version]

  def turn(self, decoding: Sequence[Request]) -> list[Request]:
    """All requests of one version; versions take turns."""
    versions = sorted({r.version for r in decoding})
    if not versions:
      return []
    later = [v for v in versions if v > self._last]
    self._last = (later or versions)[0]
    return [r for r in decoding if r.version == self._last]
