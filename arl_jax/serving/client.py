"""A rollout server as agents see it. Imports no jax."""

from __future__ import annotations

import asyncio
import base64
import functools
import random
import socket
import ssl
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from arl_jax.rollout.request import Overloaded, RequestFailed, RequestTimeout
from arl_jax.serving.stream import Aborted, Unavailable
from arl_jax.types import Sample

# Seconds between tries grow from the first to the last of these.
_WAITS = (0.1, 5.0)
_CONNECT_SECONDS = 10.0
# Seconds in which a machine that is gone is noticed while it owes an answer.
_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# What a server may need beyond the time that a request has.
_GRACE_SECONDS = 30.0
_ERRORS: dict[int, type[Exception]] = {
  429: Overloaded,
  503: Unavailable,
  504: RequestTimeout,
  410: Aborted,
  500: RequestFailed,
}
# Another try may succeed: nothing was sampled, or nothing of it came back.
_RETRIED = (Overloaded, Unavailable, httpx.TransportError)
_FINISHES = ("stop_id", "stop_string", "length")


class RemoteClient:
  """A `types.PolicyClient` of a server, for many concurrent episodes.

  Requests that found no server, or a busy one, are sent again until their time
  is over: a request's tokens depend on its seed alone. `async with` closes the
  connections.

  Attributes:
    retries: requests that were sent again.
  """

  def __init__(
    self,
    url: str,
    *,
    token: str = "",
    patience: float = 120.0,
    timeout: float = 600.0,
    max_connections: int = 1024,
  ):
    """Makes a client.

    Args:
      url: of the server, such as "http://10.0.0.7:8000".
      token: that the server wants.
      patience: seconds in which a request is tried again.
      timeout: seconds that a request may take at the server.
      max_connections: requests at a time.

    Raises:
      ValueError: the url isn't one of HTTP.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
      raise ValueError(
        f"url is {url!r}; it must begin with http:// or https://"
      )
    self.retries = 0
    self._patience, self._timeout = patience, timeout
    limits = httpx.Limits(
      max_connections=max_connections,
      max_keepalive_connections=max_connections,
    )
    self._http = httpx.AsyncClient(
      base_url=url.rstrip("/"),
      headers={"authorization": f"Bearer {token}"} if token else {},
      timeout=httpx.Timeout(timeout + _GRACE_SECONDS, connect=_CONNECT_SECONDS),
      transport=httpx.AsyncHTTPTransport(
        verify=_certificates(), limits=limits, socket_options=_keep_alive()
      ),
    )

  async def __aenter__(self) -> RemoteClient:
    return self

  async def __aexit__(self, *_: Any) -> None:
    await self._http.aclose()

  async def sample(
    self,
    session: str,
    ids: Sequence[int],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    seed: int,
    temperature: float = 1.0,
    training: bool = True,
    version: int | None = None,
    lineage: str | None = None,
    min_version: int | None = None,
  ) -> Sample:
    """See `types.PolicyClient`.

    Args:
      session: whose cached prefix it may go on from.
      ids: the prompt.
      max_tokens: sampled tokens, at most.
      stop_ids: token ids that end it.
      seed: of its random numbers.
      temperature: of sampling.
      training: whether the tokens may be trained on.
      version: that computes all of it; the current one by default.
      lineage: of the weights that must sample; any by default.
      min_version: oldest of them that may; any by default.

    Raises:
      ValueError: the server says what can't be, or its answer can't be.
      Overloaded, Unavailable, httpx.TransportError: still, after all patience.
      RequestTimeout, RequestFailed, Aborted: as the server says.
    """
    wanted = {"lineage": lineage, "min_version": min_version}
    answer = await self._post(
      "/v1/completions",
      {
        **{k: v for k, v in wanted.items() if v is not None},
        "prompt": [int(i) for i in ids],
        "max_tokens": max_tokens,
        "stop_token_ids": [int(i) for i in stop_ids],
        "seed": seed,
        "temperature": temperature,
        "session": session,
        "record": False,
        "training": training,
        "version": version,
        "timeout": self._timeout,
        "return_tokens": True,
      },
    )
    try:
      return read_sample(answer["choices"][0]["tokens"])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
      raise ValueError(f"the server's answer lacks {error}") from error

  async def close(self, session: str) -> None:
    """Gives back what the session holds; a server that is gone has nothing."""
    path = f"/v1/sessions/{urllib.parse.quote(session, safe='')}"
    try:
      await self._http.delete(path, timeout=_CONNECT_SECONDS)
    except httpx.TransportError:
      return

  async def load(self) -> dict[str, Any]:
    """What the server has to do; see `service.Load`."""
    response = await self._http.get("/admin/load", timeout=_CONNECT_SECONDS)
    _raise(response)
    return response.json()

  async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
    limit, wait = time.monotonic() + self._patience, _WAITS[0]
    while True:
      try:
        response = await self._http.post(path, json=body)
        _raise(response)
        return response.json()
      except _RETRIED:
        if time.monotonic() + wait > limit:
          raise
      self.retries += 1
      # Apart from each other, or all come back at once.
      await asyncio.sleep(wait * random.uniform(0.5, 1.0))
      wait = min(2 * wait, _WAITS[1])


@functools.cache
def _certificates() -> ssl.SSLContext:
  """Shared, as reading them takes long."""
  return httpx.create_ssl_context()


def _keep_alive() -> list[tuple[int, int, int]]:
  options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
  for name, value in _ALIVE.items():
    if (number := getattr(socket, name, None)) is not None:
      options.append((socket.IPPROTO_TCP, number, value))
  return options


def _raise(response: httpx.Response) -> None:
  if response.status_code == 200:
    return
  try:
    message = response.json()["error"]["message"]
  except (ValueError, KeyError, TypeError):
    message = response.text[:200] or "no reason given"
  error = _ERRORS.get(response.status_code, ValueError)
  raise error(f"{response.url}: {response.status_code}, {message}")


def read_sample(tokens: Mapping[str, Any]) -> Sample:
  """The sample in an answer's `tokens` (see `openai_answers.tokens_json`).

  Raises:
    ValueError: it doesn't fit together.
  """
  found = {
    "ids": np.asarray(tokens["ids"], np.int32),
    "logp": np.asarray(tokens["logprobs"], np.float32),
    "versions": np.asarray(tokens["versions"], np.int32),
    "sampled_logp": np.asarray(tokens["sampled_logprobs"], np.float32),
    "cache_versions": np.asarray(tokens["cache_versions"], np.int32),
  }
  shapes = {a.shape for a in found.values()}
  if len(shapes) != 1 or found["ids"].ndim != 1:
    raise ValueError(f"the server's tokens have shapes {sorted(shapes)}")
  if not np.isfinite(found["logp"]).all():
    raise ValueError("the server's log-probs aren't finite")
  finish = tokens["finish"]
  if finish not in _FINISHES:
    raise ValueError(f"the server's finish is {finish!r:.80}")
  return Sample(
    **found,
    stopped=finish != "length",
    experts=_experts(tokens["experts"], len(found["ids"])),
    finish=finish,
  )


def _experts(packed: Any, length: int) -> np.ndarray | None:
  if packed is None:
    return None
  shape = tuple(packed["shape"])
  if len(shape) != 3 or shape[0] != length:
    raise ValueError(f"the server's experts have shape {shape}")
  flat = np.frombuffer(base64.b64decode(packed["base64"]), "<i2")
  return flat.astype(np.int32).reshape(shape)
