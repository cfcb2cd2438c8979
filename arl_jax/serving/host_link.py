"""Connections between the hosts of a replica. Imports no jax.

Frames of four bytes of length and as many bytes. Before the first, both ends
show that they have the key: the one that connects would obey whoever answers.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable

from absl import logging

from arl_jax.rollout import calls

_LENGTH = struct.Struct("!I")
_HELLO = struct.Struct("!H32s32s")
_NONCE_BYTES = 32
# That a stranger may keep others from being let in.
_HANDSHAKE_SECONDS = 5.0
_POLL_SECONDS = 0.5


def frame(message: calls.Message) -> bytes:
  """What is sent of a message. Raises ValueError if it can't be."""
  body = calls.pack(message)
  return _LENGTH.pack(len(body)) + body


def receive(link: socket.socket) -> calls.Message:
  """The next message, waited for however long it takes.

  Raises:
    ConnectionError: the other end is gone.
    ValueError: what came is no message.
  """
  (size,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
  if size > calls.MAX_BYTES:
    raise ValueError(f"a frame of {size} bytes is above {calls.MAX_BYTES}")
  return calls.parse(_exactly(link, size))


def _exactly(
  link: socket.socket, size: int, limit: float | None = None
) -> bytes:
  """So many bytes, all of them before a time of the monotonic clock."""
  found = bytearray()
  while len(found) < size:
    if limit is not None:
      link.settimeout(max(limit - time.monotonic(), 1e-3))
    # Never more at once than has come, whatever the length says.
    part = link.recv(min(size - len(found), 1 << 16))
    if not part:
      raise ConnectionResetError("the connection was closed")
    found += part
  return bytes(found)


def accept(
  listener: socket.socket,
  count: int,
  key: bytes,
  *,
  seconds: float,
  on_wait: Callable[[], None] = lambda: None,
) -> list[socket.socket]:
  """Lets all other hosts in; whoever hasn't the key is left out.

  Args:
    listener: that they connect to.
    count: of hosts, this one included.
    key: that all have.
    seconds: to wait at most.
    on_wait: called at least every few seconds.

  Returns:
    Connections to hosts 1, 2, ... in this order.

  Raises:
    TimeoutError: names the hosts that didn't come.
  """
  limit, found = time.monotonic() + seconds, dict[int, socket.socket]()
  listener.settimeout(_POLL_SECONDS)
  try:
    while len(found) < count - 1:
      on_wait()
      if time.monotonic() > limit:
        missing = [i for i in range(1, count) if i not in found]
        raise TimeoutError(
          f"waited {seconds:.0f} s for hosts {missing} of the replica to"
          " connect"
        )
      with contextlib.suppress(TimeoutError):
        link, peer = listener.accept()
        index = _let_in(link, key)
        if index is None or not 0 < index < count or index in found:
          logging.warning("%s was not let in as a host of the replica", peer)
          link.close()
        else:
          found[index] = _ready(link)
  except BaseException:
    for link in found.values():
      link.close()
    raise
  return [found[i] for i in range(1, count)]


def _let_in(link: socket.socket, key: bytes) -> int | None:
  """The index of the host that connected, None if it hasn't the key."""
  try:
    limit = time.monotonic() + _HANDSHAKE_SECONDS
    link.settimeout(_HANDSHAKE_SECONDS)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    link.sendall(nonce)
    hello = _exactly(link, _HELLO.size, limit)
    index, theirs, proof = _HELLO.unpack(hello)
    if not hmac.compare_digest(proof, _proof(key, b"asks", index, nonce)):
      return None
    link.sendall(_proof(key, b"answers", index, theirs))
  except OSError:
    return None
  return index


def connect(
  address: tuple[str, int], index: int, key: bytes, *, seconds: float
) -> socket.socket:
  """A connection to the replica's first host.

  Args:
    address: that it listens on.
    index: of this host.
    key: that both have.
    seconds: to wait for it at most.

  Raises:
    OSError: it can't be reached.
    ConnectionError: who listens there has another key.
  """
  link = socket.create_connection(address, timeout=seconds)
  try:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    theirs = _exactly(link, _NONCE_BYTES)
    proof = _proof(key, b"asks", index, theirs)
    link.sendall(_HELLO.pack(index, nonce, proof))
    try:
      answer = _exactly(link, _NONCE_BYTES)
    except ConnectionResetError as error:
      raise ConnectionRefusedError(
        f"the replica's first host at {address[0]}:{address[1]} let this one"
        " not in: is cluster.token_file the same on both, and is host"
        f" {index} of the replica started once?"
      ) from error
    if not hmac.compare_digest(answer, _proof(key, b"answers", index, nonce)):
      raise ConnectionRefusedError(
        f"who listens at {address[0]}:{address[1]} isn't the replica's first"
        " host: it has another key"
      )
  except BaseException:
    link.close()
    raise
  return _ready(link)


def _proof(key: bytes, who: bytes, index: int, nonce: bytes) -> bytes:
  return hmac.digest(key, who + struct.pack("!H", index) + nonce, "sha256")


def _ready(link: socket.socket) -> socket.socket:
  """For small frames at once, waited for without an end."""
  link.settimeout(None)
  link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return link
