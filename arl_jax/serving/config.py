"""Limits and addresses of a rollout server."""

import dataclasses
import ipaddress
import math


@dataclasses.dataclass(kw_only=True, slots=True)
class ServingConfig:
  """Limits and addresses of a rollout server.

  Attributes:
    host: address to listen on; the default can't be reached from elsewhere.
    port: of HTTP; 0 takes a free one.
    grpc_port: of gRPC; 0 takes a free one, -1 serves no gRPC.
    token_file: holds the bearer token that every request must bring; empty
      asks for none, which only a loopback address may do.
    model_name: what the API calls the model; empty takes its file's name.
    max_requests: requests that are served or wait at a time, at most.
    max_choices: n of a request, at most.
    max_body_bytes: of a request, at most.
    max_sessions: recorded conversations that are open at a time, at most.
    max_session_tokens: of one of them in all its segments, at most.
    session_seconds: after which an idle one is forgotten.
    timeout: seconds that a request may take if it doesn't say itself.
    drain_seconds: that running requests get to end when the server stops.
    weights: folder or bucket whose published versions are taken in; empty
      keeps the weights of the start.
    poll_seconds: between two looks for a new version.
    caches: what running requests go on from at new weights: "recompute" or
      "keep" (see `Scheduler.update_weights`).
  """

  host: str = "127.0.0.1"
  port: int = 8000
  grpc_port: int = 9000
  token_file: str = ""
  model_name: str = ""
  max_requests: int = 1024
  max_choices: int = 128
  max_body_bytes: int = 8 << 20
  max_sessions: int = 4096
  max_session_tokens: int = 1 << 20
  session_seconds: float = 3600.0
  timeout: float = 600.0
  drain_seconds: float = 30.0
  weights: str = ""
  poll_seconds: float = 1.0
  caches: str = "recompute"

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    for name, low, high in (
      ("port", 0, 65535),
      ("grpc_port", -1, 65535),
      ("max_requests", 1, math.inf),
      ("max_choices", 1, math.inf),
      ("max_body_bytes", 1, math.inf),
      ("max_sessions", 1, math.inf),
      ("max_session_tokens", 1, math.inf),
    ):
      value = getattr(self, name)
      right = isinstance(value, int) and not isinstance(value, bool)
      if not right or not low <= value <= high:
        wanted = f"in {low}..{high}" if high < math.inf else f">= {low}"
        raise ValueError(
          f"serving.{name} is {value!r}, not an integer {wanted}"
        )
    for name in ("session_seconds", "timeout", "drain_seconds", "poll_seconds"):
      value = getattr(self, name)
      if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(
          f"serving.{name} is {value!r}, not a number of seconds > 0"
        )
    if self.caches not in ("recompute", "keep"):
      raise ValueError(
        f"serving.caches is {self.caches!r}, not 'recompute' or 'keep'"
      )
    if not self.token_file and not is_loopback(self.host):
      raise ValueError(
        f"serving.host is {self.host!r}, which others can reach; set"
        " serving.token_file, so that not everybody may use the server"
      )


def is_loopback(host: str) -> bool:
  """Whether only programs of this machine reach an address."""
  if host == "localhost":
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def read_token(path: str) -> str:
  """The bearer token in a file, "" without a file.

  Raises:
    ValueError: it is empty, or can't stand in a header.
    OSError: the file can't be read.
  """
  if not path:
    return ""
  with open(path, encoding="utf-8", errors="replace") as file:
    token = file.read(4097).strip()
  if not token or len(token) > 4096 or not token.isascii() or " " in token:
    raise ValueError(
      f"serving.token_file {path!r} must hold one word of 1 to 4096 ASCII"
      " characters"
    )
  return token
