"""A chat endpoint on this machine that answers as a test wants it to."""

import contextlib
import http.server
import json
import re
import threading
import time


class ChatServer:
  """Serves `answer(request) -> str | bytes | (status, bytes)`.

  A text becomes the message of a chat completion, bytes the whole body. An
  iterator of bytes is a body sent piece by piece.

  Attributes:
    url: of the server.
    requests: bodies that came, in order.
    headers: of the last request.
    most: requests that were answered at one time, at most.
  """

  def __init__(self, answer):
    self.requests, self.headers, self.most = [], {}, 0
    self._running, self._lock = 0, threading.Lock()
    outer = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.0"

      def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        with outer._lock:
          outer._running += 1
          outer.most = max(outer.most, outer._running)
          outer.requests.append(json.loads(body))
          outer.headers = dict(self.headers)
        try:
          found = answer(outer.requests[-1])
          # A client that has had enough closes the connection.
          with contextlib.suppress(OSError):
            self.send(found)
        finally:
          with outer._lock:
            outer._running -= 1

      def send(self, found):
        status = 200
        if isinstance(found, tuple):
          status, found = found
        if isinstance(found, str):
          found = completion(found)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        for piece in [found] if isinstance(found, bytes) else found:
          self.wfile.write(piece)
          self.wfile.flush()

      def log_message(self, *_):
        pass

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
    self._thread = threading.Thread(
      target=self._server.serve_forever, args=(0.05,)
    )

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *_):
    self._server.shutdown()
    self._thread.join()
    self._server.server_close()


def completion(text, finish="stop"):
  message = {"role": "assistant", "content": text}
  choice = {"index": 0, "message": message, "finish_reason": finish}
  return json.dumps({"choices": [choice]}).encode()


def endlessly(piece, seconds):
  """A body that comes slowly and never ends by itself."""
  for _ in range(1000):
    yield piece
    time.sleep(seconds)


def passages(request):
  """Labels by text of the passages in a request's prompt."""
  prompt = request["messages"][-1]["content"]
  return {
    text: label
    for label, text in re.findall(r"^\[(P\d+)\] (.*)$", prompt, re.MULTILINE)
  }


def wants(request):
  """Which of the four questions a request asks."""
  prompt = request["messages"][-1]["content"]
  for name, words in (
    ("explore", "Write three clues"),
    ("extend", "one step longer"),
    ("quote", "word for word"),
    ("distract", "look relevant"),
  ):
    if words in prompt:
      return name
  raise AssertionError(prompt)
