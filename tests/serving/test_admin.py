"""Health, draining, pausing, tokens, metrics, aborts."""

import json
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from arl_jax.serving.config import ServingConfig, read_token
from arl_jax.serving.service import Service
from tests.serving.http_serving import (
  PATIENCE,
  EchoEngine,
  idle,
  post,
  serving,
  wait_until,
)

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "say:hello"}]}


def status(server, path, **more):
  return httpx.get(server.url + path, timeout=PATIENCE, **more).status_code


class Asking(threading.Thread):
  """Sends one request; `response` is there once it has ended."""

  def __init__(self, server, body=HELLO):
    super().__init__()
    self.server, self.body, self.response = server, body, None
    self.start()

  def run(self):
    self.response = post(self.server, CHAT, self.body)

  def answer(self):
    self.join(PATIENCE)
    return self.response


class Gate:
  """Holds the engine's generate calls until it is open."""

  def __init__(self):
    self.open = threading.Event()

  def __call__(self, name, argument):
    if name == "generate":
      assert self.open.wait(PATIENCE)


class TestStates:
  def test_starting(self):
    ready = threading.Event()
    engine = EchoEngine()
    with serving(engine) as server:
      # The thread of another service over the same engine still compiles.
      service = server.service
      slow = Service(
        lambda: ready.wait(PATIENCE) and service._make_scheduler(),
        engine,
        service.tokenizer,
        service.config,
      )
      slow.start()
      assert slow.load().state == "starting"
      ready.set()
      wait_until(lambda: slow.load().state == "serving")
      assert slow.stop(PATIENCE)
      assert slow.load().state == "stopped"

  def test_pause_and_resume(self):
    with serving() as server:
      assert post(server, "/admin/pause").json() == {"state": "paused"}
      wait_until(lambda: server.service.load().state == "paused")
      assert status(server, "/ready") == 503
      assert status(server, "/health") == 200
      steps = server.service.load().steps
      asking = Asking(server)
      wait_until(lambda: server.service.load().waiting == 1)
      assert server.service.load().steps == steps
      post(server, "/admin/resume")
      assert asking.answer().status_code == 200
      assert status(server, "/ready") == 200

  def test_a_paused_request_s_time_goes_on(self):
    with serving() as server:
      post(server, "/admin/pause")
      response = post(server, CHAT, HELLO | {"timeout": 0.2})
      assert response.status_code == 504
      post(server, "/admin/resume")

  def test_draining(self):
    gate = Gate()
    with serving(EchoEngine(on_call=gate)) as server:
      asking = Asking(server)
      wait_until(lambda: server.service.load().requests == 1)
      post(server, "/admin/drain")
      refused = post(server, CHAT, HELLO)
      assert refused.status_code == 503
      assert refused.headers["retry-after"] == "1"
      assert "draining" in refused.json()["error"]["message"]
      gate.open.set()
      assert asking.answer().status_code == 200
      wait_until(lambda: server.service.load().state == "drained")
      post(server, "/admin/resume")
      assert post(server, CHAT, HELLO).status_code == 200

  def test_load(self):
    with serving(version=3) as server:
      post(server, CHAT, HELLO)
      load = httpx.get(server.url + "/admin/load").json()
      assert load["version"] == 3
      assert load["slots"] == 4
      assert load["sampled_tokens"] == len("hello") + 1

  def test_stopping_lets_running_requests_end(self):
    gate = Gate()
    with serving(EchoEngine(on_call=gate), drain_seconds=PATIENCE) as server:
      asking = Asking(server)
      wait_until(lambda: server.service.load().requests == 1)
      threading.Timer(0.3, gate.open.set).start()
    assert asking.answer().status_code == 200


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
  path = tmp_path_factory.mktemp("token") / "token"
  path.write_text("s3cret\n")
  with serving(token_file=str(path)) as found:
    yield found


class TestToken:
  @pytest.mark.parametrize("given", ["s3cre", "s3cret!", "x", "é"])
  def test_without_it_nothing_is_served(self, locked, given):
    headers = {b"authorization": f"Bearer {given}".encode()}
    for path in ("/metrics", "/v1/models", "/admin/load"):
      assert status(locked, path, headers=headers) == 401
    assert post(locked, CHAT, HELLO, headers=headers).status_code == 401
    assert post(locked, "/admin/pause", headers=headers).status_code == 401
    assert locked.service.load().state == "serving"

  def test_with_it(self, locked):
    headers = {"authorization": "bearer s3cret"}
    assert post(locked, CHAT, HELLO, headers=headers).status_code == 200

  def test_probes_need_none(self, locked):
    assert status(locked, "/health") == status(locked, "/ready") == 200

  def test_files(self, tmp_path):
    assert read_token("") == ""
    for text in ("", " \n", "two words", "é", "x" * 5000):
      path = tmp_path / "token"
      path.write_text(text)
      with pytest.raises(ValueError, match="token_file"):
        read_token(str(path))


def test_metrics():
  with serving() as server:
    post(server, CHAT, HELLO)
    post(server, CHAT, {})
    text = httpx.get(server.url + "/metrics").text
    found = {
      (s.name, *sorted(s.labels.values())): s.value
      for family in text_string_to_metric_families(text)
      for s in family.samples
    }
    assert found["arl_requests_total", CHAT, "200"] == 1
    assert found["arl_requests_total", CHAT, "400"] == 1
    assert found["arl_sampled_tokens_total",] == 6
    assert found["arl_time_to_first_token_seconds_count",] == 1
    assert found["arl_time_between_tokens_seconds_count",] == 1
    assert found["arl_state", "serving"] == 1
    assert found["arl_slots",] == 4


def test_abort():
  with serving() as server:
    messages = [{"role": "user", "content": "say:" + "x" * 1500}]
    body = {"messages": messages, "stream": True}
    with httpx.stream(
      "POST", server.url + CHAT, json=body, timeout=PATIENCE
    ) as stream:
      events = stream.iter_lines()
      name = json.loads(next(events).removeprefix("data: "))["id"]
      path = f"{server.url}/v1/requests/{name}"
      assert httpx.delete(path).status_code == 200
      last = [line for line in events if line][-2:]
    assert "aborted_error" in last[0]
    assert last[1] == "data: [DONE]"
    wait_until(lambda: idle(server.service))
    assert httpx.delete(path).status_code == 404


def test_weights_need_a_place_to_come_from():
  with serving() as server:
    response = post(server, "/admin/weights", {"version": 3})
    assert response.status_code == 409
    assert "serving.weights" in response.json()["error"]["message"]


class TestConfig:
  def test_only_loopback_goes_without_a_token(self):
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
      ServingConfig(host=host).validate()
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
      with pytest.raises(ValueError, match="token_file"):
        ServingConfig(host=host).validate()
      ServingConfig(host=host, token_file="x").validate()

  @pytest.mark.parametrize(
    ("field", "value"),
    [
      ("port", -1),
      ("port", 65536),
      ("port", "80"),
      ("grpc_port", -2),
      ("max_requests", 0),
      ("max_body_bytes", True),
      ("timeout", 0),
      ("timeout", float("inf")),
      ("poll_seconds", float("nan")),
      ("session_seconds", "1"),
      ("caches", "drop"),
    ],
  )
  def test_fields(self, field, value):
    with pytest.raises(ValueError, match=f"serving.{field}"):
      ServingConfig(**{field: value}).validate()

  def test_a_port_that_is_taken(self):
    with (
      serving() as server,
      pytest.raises(OSError, match=f"serving.port {server.http_port}"),
      serving(port=server.http_port),
    ):
      pytest.fail("two servers have one port")
