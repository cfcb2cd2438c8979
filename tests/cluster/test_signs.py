"""What is taken for signs of life, and what isn't."""

import contextlib
import http.server
import json
import threading
import time

import pytest

from arl_jax.cluster import signs as signs_lib
from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.signs import QueueSigns
from arl_jax.cluster.supervisor import Sign


@contextlib.contextmanager
def answering(body, status=200, pause=0.0, seen=None):
  """A queue that answers with bytes, in two halves; gives its configuration."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      if seen is not None:
        seen.append((self.path, self.headers.get("authorization")))
      self.send_response(status)
      self.send_header("content-length", str(len(body)))
      self.end_headers()
      with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for part in (body[:1], body[1:]):
          self.wfile.write(part)
          self.wfile.flush()
          time.sleep(pause)

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  thread = threading.Thread(target=server.serve_forever, args=(0.05,))
  thread.start()
  try:
    yield ClusterConfig(queue=f"http://127.0.0.1:{server.server_port}")
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def role(**changes):
  known = {"role": "actor", "index": 1, "age": 0.5, "idle_seconds": 2}
  return {**known, "pid": 7, "counters": {"episodes": 3}, **changes}


def look(body, **settings):
  with answering(body, **settings) as cluster, QueueSigns(cluster) as signs:
    return signs.look()


def test_signs_are_read_and_the_token_is_sent(tmp_path):
  seen = []
  token = tmp_path / "token"
  token.write_text("secret\n")
  body = json.dumps({"roles": [role(), role(role="learner", index=0)]})
  with answering(body.encode(), seen=seen) as cluster:
    cluster.token_file = str(token)
    with QueueSigns(cluster) as signs:
      found = signs.look()
  assert found == [
    Sign(role="actor", index=1, age=0.5, idle_seconds=2.0),
    Sign(role="learner", index=0, age=0.5, idle_seconds=2.0),
  ]
  assert seen == [("/roles", "Bearer secret")]


@pytest.mark.parametrize(
  "body",
  [
    b"",
    b"\xff",
    b"3",
    b'{"roles": 3}',
    b"[]",
    b"[" * 100_000,
    *(
      json.dumps({"roles": [bad]}).encode()
      for bad in (
        *("actor", role(index="1"), role(index=True), role(role=None)),
        *(role(age=-1), role(age=float("nan")), role(age=float("inf"))),
        *(role(idle_seconds="1"), role(idle_seconds=True), role(age=None)),
      )
    ),
  ],
)
def test_what_is_malformed_is_no_answer(body):
  assert look(body) is None


@pytest.mark.parametrize("status", [401, 409, 500, 503])
def test_a_status_of_failure_is_no_answer(status):
  assert look(b'{"roles": []}', status=status) is None


def test_too_much_is_no_answer(monkeypatch):
  body = json.dumps({"roles": [role()] * 100}).encode()
  assert look(body) is not None
  monkeypatch.setattr(signs_lib, "_MAX_BYTES", len(body) - 1)
  assert look(body) is None


def test_slow_answers_are_none_and_do_not_take_long(monkeypatch):
  monkeypatch.setattr(signs_lib, "_SECONDS", 0.3)
  began = time.monotonic()
  assert look(b'{"roles": []}', pause=0.5) is None
  assert time.monotonic() - began < 3.0


def test_nobody_there_is_no_answer():
  with answering(b"") as cluster:
    pass
  with QueueSigns(cluster) as signs:
    assert signs.look() is None
