"""Asks a group queue what is going on, once and without patience."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

_MOST_BYTES = 4 << 20


def ask(url: str, path: str, *, token: str = "", seconds: float = 2.0) -> Any:
  """The JSON that the queue answers with.

  Args:
    url: of the queue, as "http://10.0.0.7:7000".
    path: such as "/status".
    token: bearer token, "" for none.
    seconds: for the whole answer, and for each part of it.

  Raises:
    OSError: there is no answer, or none that can be understood; says why.
  """
  headers = {"accept-encoding": "identity"}
  if token:
    headers["authorization"] = f"Bearer {token}"
  where, limit = url.rstrip("/") + path, time.monotonic() + seconds
  body = bytearray()
  try:
    with (
      # Processes of a run find each other directly.
      httpx.Client(timeout=seconds, headers=headers, trust_env=False) as client,
      client.stream("GET", where) as answer,
    ):
      if answer.status_code != 200:
        raise OSError(f"{where} answers with status {answer.status_code}")
      for part in answer.iter_raw(1 << 16):
        body += part
        if len(body) > _MOST_BYTES or time.monotonic() > limit:
          raise OSError(
            f"{where} gave {len(body)} bytes so far, not {_MOST_BYTES} at most"
            f" within {seconds:g} s"
          )
    return json.loads(body)
  except (httpx.HTTPError, httpx.InvalidURL) as error:
    raise OSError(f"{where} doesn't answer: {error!r:.200}") from error
  except (ValueError, RecursionError) as error:
    raise OSError(f"{where} answers with no JSON: {error!s:.200}") from error
