"""Values that no answer could say, and names that nobody can have."""

import json
import threading

import httpx
import pytest

from arl_jax.records import from_json
from tests.serving.http_serving import (
  PATIENCE,
  EchoEngine,
  serving,
  tokenizer,
)

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
  with serving(EchoEngine()) as found:
    yield found


def post(server, path, fields=None):
  return httpx.post(
    server.url + path,
    content=json.dumps(fields or {}),
    headers={"content-type": "application/json"},
    timeout=PATIENCE,
  )


def say(server, text, path=CHAT, **more):
  body = {"messages": [{"role": "user", "content": f"say:{text}"}], **more}
  return post(server, path, body)


def refused(response, status=400):
  assert response.status_code == status, response.text
  assert len(response.text) < 2000
  return response.json()["error"]


@pytest.mark.parametrize(
  "fields",
  [
    {"\ud800": 1},
    {"messages": [{"\ud800": 1}]},
    {"user": "\ud800"},
    {"session": "\ud800"},
    {"stop": ["\ud800"]},
  ],
)
def test_half_of_a_surrogate_pair(server, fields):
  assert "surrogate" in refused(say(server, "x", **fields))["message"]


def test_a_long_name_isnt_said_again(server):
  error = refused(say(server, "x", **{"a" * 50_000: 1}))
  assert error["param"] == "a" * 77 + "..."


@pytest.mark.parametrize("name", ["", "%00", "%00a", "a" * 257])
def test_sessions_without_a_name(server, name):
  error = refused(say(server, "x", f"/sessions/{name}{CHAT}"))
  assert error["param"] == "session"
  error = refused(post(server, f"/v1/sessions/{name}/finish"))
  assert error["param"] == "session"


@pytest.mark.parametrize("name", ["a/b", "a%2Fb", "%F0%9F%98%80", "v1/v1"])
def test_sessions_with_any_other_name(server, name):
  assert say(server, "x", f"/sessions/{name}{CHAT}").status_code == 200
  assert post(server, f"/v1/sessions/{name}/finish").status_code == 200


@pytest.mark.parametrize(
  "fields",
  [
    {"reward": {"total": 10**400}},
    {"reward": {"total": 1, "parts": {"a": -(10**400)}}},
    {"outcome": {"a": "\ud800"}},
  ],
)
def test_nothing_recorded_is_lost_by_a_bad_end(server, fields):
  assert say(server, "x", f"/sessions/bad{CHAT}").status_code == 200
  refused(post(server, "/v1/sessions/bad/finish", fields))
  response = post(server, "/v1/sessions/bad/finish")
  assert from_json(response.json()).turns == 1


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("stop_token_ids", [1] * 70_000),
    ("forbidden_token_ids", [1] * 70_000),
    ("logit_bias", {str(i): 1 for i in range(70_000)}),
  ],
)
def test_too_many_ids(server, name, value):
  assert refused(say(server, "x", **{name: value}))["param"] == name


def test_thoughts_end_before_a_stop_string(server):
  text = "<think>\nhm, stop here\n</think>\n\nreply"
  message = say(server, text, stop="stop").json()["choices"][0]["message"]
  assert message["reasoning_content"] == "hm, "
  assert message["content"] == ""


def test_others_run_while_a_long_text_is_encoded():
  ended = threading.Event()
  turns = 0

  def count():
    nonlocal turns
    while not ended.wait(0.001):
      turns += 1

  thread = threading.Thread(target=count)
  thread.start()
  ids = tokenizer().encode("ab " * 200_000)
  ended.set()
  thread.join()
  assert len(ids) == 600_000
  assert turns > 10
