"""Signs of life of a run's processes, as its queue knows them. No jax."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import httpx
from absl import logging

from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.supervisor import Sign
from arl_jax.serving.config import read_token

_SECONDS = 3.0
_MAX_BYTES = 4 << 20


class QueueSigns:
  """Asks the queue's service; see `supervisor.Signs`. A context manager."""

  def __init__(self, cluster: ClusterConfig):
    """Connects to nothing yet.

    Args:
      cluster: with the queue's address.

    Raises:
      ValueError, OSError: the token can't be read.
    """
    token = read_token(cluster.token_file)
    self._http = httpx.Client(
      base_url=cluster.queue.rstrip("/"),
      headers={"authorization": f"Bearer {token}"} if token else {},
      timeout=_SECONDS,
      # A proxy that is down would look like a queue that is.
      trust_env=False,
    )
    self._said = ""

  def __enter__(self) -> QueueSigns:
    return self

  def __exit__(self, *_: object) -> None:
    self._http.close()

  def look(self) -> list[Sign] | None:
    """Signs of all processes; None if the queue gives no answer of its kind."""
    try:
      return [_sign(role) for role in self._roles()]
    except httpx.TransportError:
      return None  # It is being started, or is gone.
    except (ValueError, httpx.HTTPError) as error:
      if str(error) != self._said:
        logging.warning("GET /roles of the queue: %s", error)
        self._said = str(error)
      return None

  def _roles(self) -> list[Any]:
    limit, body = time.monotonic() + _SECONDS, bytearray()
    with self._http.stream("GET", "/roles") as response:
      if response.status_code != 200:
        raise ValueError(f"status {response.status_code}, not 200")
      for part in response.iter_raw(65536):
        body += part
        if len(body) > _MAX_BYTES or time.monotonic() > limit:
          raise ValueError(
            f"{len(body)} bytes so far, not {_MAX_BYTES} within {_SECONDS} s"
          )
    try:
      answer = json.loads(body)
    except RecursionError as error:
      raise ValueError("the answer is nested too deeply") from error
    roles = answer.get("roles") if isinstance(answer, dict) else None
    if not isinstance(roles, list):
      raise ValueError("the answer has no list of roles")
    return roles


def _sign(role: Any) -> Sign:
  """Raises ValueError for what is no sign of life."""
  if not isinstance(role, dict):
    raise ValueError(f"{role!r:.100} is no role")
  name, index = role.get("role"), role.get("index")
  if not isinstance(name, str) or type(index) is not int:
    raise ValueError(f"role {name!r:.40} with index {index!r:.40}")
  return Sign(
    role=name,
    index=index,
    age=_seconds(role, "age"),
    idle_seconds=_seconds(role, "idle_seconds"),
  )


def _seconds(role: dict[str, Any], key: str) -> float:
  value = role.get(key)
  if (
    not isinstance(value, int | float)
    or isinstance(value, bool)
    or not 0 <= value < math.inf
  ):
    raise ValueError(
      f"{role['role']}-{role['index']} has {key} {value!r:.40}, not seconds"
      " >= 0"
    )
  return float(value)
