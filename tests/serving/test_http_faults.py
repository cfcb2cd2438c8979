"""Whatever a client does, the server answers it and goes on."""

import json
import random
import socket
import threading
import time

import httpx
import pytest

from tests.serving.http_serving import (
  PATIENCE,
  EchoEngine,
  idle,
  post,
  serving,
  wait_until,
)

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "say:hello"}]}


@pytest.fixture(scope="module")
def server():
  with serving(EchoEngine(), max_body_bytes=100_000) as found:
    yield found
    assert idle(found.service)


def works(server):
  response = post(server, CHAT, HELLO)
  assert response.status_code == 200, response.text
  content = response.json()["choices"][0]["message"]["content"]
  return content == "hello"


def refused(response, status, param=None):
  assert response.status_code == status, response.text
  error = response.json()["error"]
  assert error["param"] == param, error
  assert error["message"]
  assert "Traceback" not in response.text
  return error["message"]


class TestWrongFields:
  @pytest.mark.parametrize(
    ("changes", "param"),
    [
      ({"messages": None}, "messages"),
      ({"messages": []}, "messages"),
      ({"messages": "hi"}, "messages"),
      ({"messages": [1]}, "messages[0]"),
      ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
      ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
      ({"model": 7}, "model"),
      ({"max_tokens": 0}, "max_tokens"),
      ({"max_tokens": "9"}, "max_tokens"),
      ({"max_tokens": True}, "max_tokens"),
      ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
      ({"temperature": -1}, "temperature"),
      ({"temperature": 1e-9}, "temperature"),
      ({"top_p": 0}, "top_p"),
      ({"top_p": 1.5}, "top_p"),
      ({"top_k": 10**6}, "top_k"),
      ({"n": 0}, "n"),
      ({"n": 10**9}, "n"),
      ({"seed": 1.5}, "seed"),
      ({"stop": ["a", ""]}, "stop"),
      ({"stop": ["a"] * 9}, "stop"),
      ({"stop": {"a": 1}}, "stop"),
      ({"logit_bias": {"x": 1}}, "logit_bias"),
      ({"logit_bias": {"1": 1000}}, "logit_bias"),
      ({"logit_bias": {"100000": 1}}, "logit_bias"),
      ({"stop_token_ids": [10**9]}, "stop_token_ids"),
      ({"stop_token_ids": list(range(9))}, "stop_token_ids"),
      ({"stop_token_ids": "a"}, "stop_token_ids"),
      ({"forbidden_token_ids": [-1]}, "forbidden_token_ids"),
      ({"stream": "yes"}, "stream"),
      ({"stream_options": {"include_usage": True}}, "stream_options"),
      ({"stream": True, "stream_options": {"x": 1}}, "x"),
      ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
      ({"tools": {}}, "tools"),
      ({"tools": [{"type": "function"}]}, "tools[0].function"),
      ({"tool_choice": "required"}, "tool_choice"),
      ({"response_format": {"type": "json_object"}}, "response_format"),
      ({"frequency_penalty": 0.5}, "frequency_penalty"),
      ({"reasoning_effort": "extreme"}, "reasoning_effort"),
      ({"functions": []}, "functions"),
      ({"timeout": 0}, "timeout"),
      ({"session": 5}, "session"),
      ({"session": "s", "n": 2}, "n"),
      ({"record": True}, "record"),
      ({"training": True, "top_p": 0.5}, None),
      ({"temprature": 1}, "temprature"),
    ],
  )
  def test_chat(self, server, changes, param):
    message = refused(post(server, CHAT, HELLO | changes), 400, param)
    assert (param or "top_p") in message
    assert server.service.load().state == "serving"

  @pytest.mark.parametrize(
    ("changes", "param"),
    [
      ({"prompt": None}, "prompt"),
      ({"prompt": ""}, "prompt[0]"),
      ({"prompt": []}, "prompt"),
      ({"prompt": [[]]}, "prompt[0]"),
      ({"prompt": [1, "a"]}, "prompt[0]"),
      ({"prompt": [-1]}, "prompt"),
      ({"prompt": [260]}, "prompt"),
      ({"prompt": [10**30]}, "prompt"),
      ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
      ({"prompt": [["a"]]}, "prompt[0]"),
      ({"prompt": 7}, "prompt"),
      ({"echo": True}, "echo"),
      ({"suffix": "x"}, "suffix"),
      ({"best_of": 2}, "best_of"),
      ({"logprobs": 5}, "logprobs"),
      ({"version": 99}, "version"),
    ],
  )
  def test_completions(self, server, changes, param):
    body = {"prompt": "say:x", "max_tokens": 5} | changes
    refused(post(server, PLAIN, body), 400, param)

  def test_an_unknown_model(self, server):
    response = post(server, CHAT, HELLO | {"model": "other"})
    assert "tiny" in refused(response, 404, "model")

  def test_what_fits_exactly(self, server):
    longest = server.service.engine.max_length
    body = {"prompt": [1] * (longest - 3), "max_tokens": 3}
    assert post(server, PLAIN, body).status_code == 200
    refused(post(server, PLAIN, body | {"max_tokens": 4}), 400, "prompt")


class TestBodies:
  @pytest.mark.parametrize(
    "body",
    [
      b"",
      b"{",
      b"[]",
      b"null",
      b"\xff\xfe",
      b'{"messages": NaN}',
      b'{"temperature": 1e999}',
      b'{"n": 1, "n": 2}',
      b"[" * 50_000,
      b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
      b'{"seed": ' + b"9" * 10_000 + b"}",
      b'{"messages": "\\ud800"}',
    ],
  )
  def test_what_isn_t_an_object_in_json(self, server, body):
    headers = {"content-type": "application/json"}
    response = httpx.post(
      server.url + CHAT, content=body, headers=headers, timeout=PATIENCE
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]

  def test_a_body_that_is_too_large(self, server):
    body = HELLO | {"user": "x" * 100_000}
    refused(post(server, CHAT, body), 413)

  def test_a_large_body_without_its_length(self, server):
    def parts():
      for _ in range(20):
        yield b"x" * 10_000

    response = httpx.post(
      server.url + CHAT,
      content=parts(),
      headers={"content-type": "application/json"},
      timeout=PATIENCE,
    )
    refused(response, 413)

  def test_another_type(self, server):
    # As a page in a browser could send it to this machine.
    response = httpx.post(
      server.url + CHAT,
      content=json.dumps(HELLO),
      headers={"content-type": "text/plain"},
      timeout=PATIENCE,
    )
    refused(response, 415)

  def test_addresses_and_methods(self, server):
    assert httpx.get(server.url + "/v2/x").status_code == 404
    assert httpx.get(server.url + CHAT).status_code == 405


def test_a_thousand_malformed_requests(server):
  random_ = random.Random(0)
  seed = json.dumps(
    HELLO
    | {"max_tokens": 3, "temperature": 1.0, "stop": ["x"], "n": 1, "seed": 3}
  ).encode()
  values = [
    "null",
    "-1",
    "1e9",
    '""',
    "[]",
    "{}",
    "[[[]]]",
    '"\\u0000"',
    "true",
  ]
  headers = {"content-type": "application/json"}
  statuses = set()
  with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
    for i in range(1000):
      body = bytearray(seed)
      for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(body))
        match random_.randrange(4):
          case 0:
            body[at] = random_.randrange(256)
          case 1:
            del body[at : at + random_.randrange(1, 20)]
          case 2:
            body[at:at] = random_.choice(values).encode()
          case 3:
            body[at:at] = bytes(random_.randrange(256) for _ in range(5))
      path = (CHAT, PLAIN)[i % 2]
      response = client.post(path, content=bytes(body), headers=headers)
      statuses.add(response.status_code)
      assert response.status_code in (200, 400, 404), response.text
      assert "Traceback" not in response.text
  assert 400 in statuses
  wait_until(lambda: idle(server.service))
  assert works(server)


class TestClientsThatLeave:
  @pytest.mark.parametrize("stream", [True, False])
  def test_their_slots_are_free(self, stream):
    gate = threading.Event()

    def slowly(name, argument):
      if name == "generate" and not gate.is_set():
        time.sleep(0.02)

    with serving(EchoEngine(on_call=slowly)) as server:
      body = json.dumps(
        {"prompt": "say:" + "x" * 900, "max_tokens": 800, "stream": stream}
      ).encode()
      lines = f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\n" + (
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
      )
      for _ in range(6):
        # More than there are slots: some wait.
        connection = socket.create_connection(
          ("127.0.0.1", server.http_port), PATIENCE
        )
        connection.sendall(lines.encode() + body)
        if stream:
          assert connection.recv(100)
        else:
          wait_until(lambda: server.service.load().requests)
        connection.close()
      wait_until(lambda: idle(server.service))
      gate.set()
      assert works(server)
      # What was left was given up, not served to its end.
      assert server.service.load().sampled_tokens < 6 * 800

  def test_a_body_that_never_ends(self, server):
    with socket.create_connection(
      ("127.0.0.1", server.http_port)
    ) as connection:
      connection.sendall(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"
        "\r\ncontent-length: 50\r\n\r\n{".encode()
      )
      assert works(server)


class TestOverload:
  def test_it_is_said_at_once(self):
    gate = threading.Event()

    def wait(name, argument):
      if name == "generate":
        assert gate.wait(PATIENCE)

    with serving(EchoEngine(on_call=wait), max_requests=3) as server:
      answers = []

      def ask():
        answers.append(post(server, CHAT, HELLO).status_code)

      threads = [threading.Thread(target=ask) for _ in range(3)]
      for thread in threads:
        thread.start()
      wait_until(lambda: server.service.load().requests == 3)
      response = post(server, CHAT, HELLO)
      assert "max_requests" in refused(response, 429)
      assert response.headers["retry-after"] == "1"
      gate.set()
      for thread in threads:
        thread.join(PATIENCE)
      assert answers == [200, 200, 200]
      assert works(server)

  def test_a_request_that_takes_too_long(self):
    def slowly(name, argument):
      if name == "generate":
        time.sleep(0.05)

    with serving(EchoEngine(on_call=slowly)) as server:
      body = {"prompt": "say:" + "x" * 900, "max_tokens": 800, "timeout": 0.2}
      response = post(server, PLAIN, body)
      assert "0.2 s" in refused(response, 504)
      wait_until(lambda: idle(server.service))

  def test_one_fails_alone(self):
    engine = EchoEngine()
    engine.poison = {ord("#")}
    with serving(engine) as server:
      response = post(
        server, CHAT, {"messages": [{"role": "user", "content": "say:#"}]}
      )
      assert "finite" in refused(response, 500)
      assert works(server)

  def test_an_engine_thread_that_dies(self):
    with serving(EchoEngine()) as server:
      service = server.service
      service._commands.put(lambda: 1 / 0)
      wait_until(lambda: service.load().state == "failed")
      refused(post(server, CHAT, HELLO), 503)
      health = httpx.get(server.url + "/health")
      assert (health.status_code, health.json()) == (503, {"state": "failed"})
      server_failed = httpx.get(server.url + "/ready").status_code
      assert server_failed == 503


def test_a_stream_s_error_is_its_last_event():

  def slowly(name, argument):
    if name == "generate":
      time.sleep(0.03)

  with serving(EchoEngine(on_call=slowly)) as server:
    body = {
      "prompt": "say:" + "x" * 900,
      "max_tokens": 800,
      "stream": True,
      "timeout": 0.4,
    }
    lines = post(server, PLAIN, body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    last = json.loads(lines[-3].removeprefix("data: "))
    assert last["error"]["type"] == "timeout_error"
