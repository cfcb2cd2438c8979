"""Vectors of texts from an endpoint of OpenAI's embeddings API."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

_CONNECT_SECONDS = 10.0
# Seconds between tries grow from the first to the last of these.
_WAITS = (0.5, 20.0)
_RETRIED_STATUS = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
# Of an answer: a number of JSON takes at most about 26.
_BYTES_A_NUMBER, _BYTES_BESIDE = 32, 2**20
_MAX_DIM = 65536
_MAX_ERROR = 200


class EmbeddingClient:
  """Texts to vectors of length 1, by `POST URL/embeddings`.

  Requests that found no server, or a busy one, are sent again until their time
  is over. Threads may share a client.
  """

  def __init__(
    self,
    url: str,
    model: str,
    *,
    key: str = "",
    batch: int = 64,
    timeout: float = 60.0,
    patience: float = 300.0,
    transport: httpx.BaseTransport | None = None,
  ):
    """Makes a client; nothing is sent yet.

    Args:
      url: up to and without "/embeddings", such as "http://localhost:8000/v1".
      model: that the endpoint is asked for.
      key: sent as a bearer token, if there is one.
      batch: texts of one request.
      timeout: seconds that one request may take.
      patience: seconds in which a request is tried again.
      transport: of HTTP; the network's by default.

    Raises:
      ValueError: the url isn't one of HTTP, or `batch` is below 1.
    """
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
      raise ValueError(
        f"url is {url!r:.200}; it must begin with http:// or https://"
      )
    if batch < 1:
      raise ValueError(f"batch is {batch}, not at least 1")
    self._url = url.rstrip("/") + "/embeddings"
    self._model, self._batch, self._patience = model, batch, patience
    self._timeout = timeout
    self._dim: int | None = None
    self._lock = threading.Lock()
    self._http = httpx.Client(
      headers={"authorization": f"Bearer {key}"} if key else {},
      timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
      transport=transport,
    )

  def __call__(self, texts: Sequence[str]) -> np.ndarray:
    """[n, dim] float32, rows of length 1 or 0.

    Raises:
      ValueError: the endpoint refuses, or its answer isn't one vector a text,
        all of one dimension.
      OSError: no answer came, after all patience.
    """
    rows = [
      self._ask(texts[i : i + self._batch])
      for i in range(0, len(texts), self._batch)
    ]
    if not rows:
      return np.zeros((0, self._dim or 0), np.float32)
    return np.concatenate(rows)

  def _ask(self, texts: Sequence[str]) -> np.ndarray:
    body = {
      "model": self._model,
      # An empty text is an error to some endpoints.
      "input": [text or " " for text in texts],
      "encoding_format": "float",
    }
    limit, wait = time.monotonic() + self._patience, _WAITS[0]
    while True:
      try:
        status, answer = self._post(body, len(texts))
        reason = f"status {status}, {_message(answer)}"
        if status == 200:
          return self._rows(answer, len(texts))
        if status not in _RETRIED_STATUS:
          raise ValueError(f"{self._url}: {reason}")
      except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
      if time.monotonic() + wait > limit:
        raise OSError(
          f"{self._url}: no answer in {self._patience:g} s; last: {reason}"
        )
      # Apart from each other, or all come back at once.
      time.sleep(wait * random.uniform(0.5, 1.0))
      wait = min(2 * wait, _WAITS[1])

  def _post(self, body: Any, count: int) -> tuple[int, bytes]:
    """Status and body of an answer, which is never held if it is too long."""
    most = count * (self._dim or _MAX_DIM) * _BYTES_A_NUMBER + _BYTES_BESIDE
    # httpx's time-out is that between two pieces of an answer.
    deadline = time.monotonic() + self._timeout
    held = bytearray()
    with self._http.stream("POST", self._url, json=body) as response:
      for data in response.iter_bytes():
        held += data
        if len(held) > most:
          raise ValueError(
            f"{self._url}: an answer has over {most} bytes for {count} texts"
          )
        if time.monotonic() > deadline:
          raise httpx.ReadTimeout(f"an answer took over {self._timeout:g} s")
      return response.status_code, bytes(held)

  def _rows(self, answer: bytes, count: int) -> np.ndarray:
    try:
      data = json.loads(answer)["data"]
      if not isinstance(data, list) or len(data) != count:
        raise ValueError(f"data must be a list of {count}")
      rows: list[np.ndarray | None] = [None] * count
      for item in data:
        index = item["index"]
        if type(index) is not int or not 0 <= index < count:
          raise ValueError(f"index {index!r:.40} must be 0 to {count - 1}")
        if rows[index] is not None:
          raise ValueError(f"index {index} is there twice")
        rows[index] = self._row(item["embedding"])
    except (
      ValueError,
      KeyError,
      TypeError,
      OverflowError,
      RecursionError,
    ) as error:
      raise ValueError(
        f"{self._url}: an answer isn't OpenAI's: {error!r:.{_MAX_ERROR}}"
      ) from error
    return np.stack([row for row in rows if row is not None])

  def _row(self, values: Any) -> np.ndarray:
    if not isinstance(values, list) or not all(
      type(v) in (int, float) for v in values
    ):
      raise ValueError("embedding must be a list of numbers")
    row = np.asarray(values, np.float64)
    if not np.isfinite(row).all():
      raise ValueError("embedding must be finite")
    with self._lock:
      self._dim = self._dim or len(row)
    if not 1 <= len(row) <= _MAX_DIM or len(row) != self._dim:
      raise ValueError(
        f"embedding has {len(row)} numbers, must have {self._dim or 1}"
      )
    return (row / max(float(np.linalg.norm(row)), 1e-12)).astype(np.float32)


def _message(answer: bytes) -> str:
  """What an error's body says, in one line."""
  try:
    text = json.loads(answer)["error"]["message"]
  except (ValueError, KeyError, TypeError, RecursionError):
    text = answer[:_MAX_ERROR].decode("utf-8", "replace")
  return " ".join(str(text).split())[:_MAX_ERROR] or "no reason given"
