"""`launch.serve` as a program: served, killed, stopped, updated, misused."""

import asyncio
import signal
import subprocess
import sys
import threading

import grpc
import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from arl_jax.model import token_logprobs
from arl_jax.serving.client import RemoteClient
from arl_jax.serving.proto import jetstream_pb2
from arl_jax.weights import Publisher
from tests.serving.programs import (
  CONFIG,
  PATIENCE,
  ROOT,
  program,
  write_checkpoint,
)

HOW = {"max_tokens": 24, "stop_ids": (), "seed": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model")
  return folder, write_checkpoint(folder)


@pytest.fixture(scope="module")
def running(model, tmp_path_factory):
  log = tmp_path_factory.mktemp("log") / "log"
  with program(model[0], log, grpc_port=0) as found:
    yield found.wait_until_ready()
    assert found.end() == 0, found.text()
    assert "Traceback" not in found.text()


def sample(url, ids, **changes):
  async def main():
    async with RemoteClient(url, patience=PATIENCE) as client:
      found = await client.sample("s", ids, **{**HOW, **changes})
      await client.close("s")
      return found

  return asyncio.run(main())


def assert_scored(params, ids, found):
  """The log-probs are those of these weights."""
  row = jnp.asarray([[*ids, *found.ids.tolist()]], jnp.int32)
  logp = np.asarray(token_logprobs(params, CONFIG, row)[0])[0, len(ids) :]
  np.testing.assert_allclose(found.logp, logp, atol=1e-4, rtol=0)


def test_log_probs_over_the_wire_are_the_learner_s(running, model):
  ids = [*b"a prompt"]
  assert_scored(model[1], ids, sample(running.url, ids))


def test_chat(running, model):
  with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
    answer = client.chat.completions.create(
      model=model[0].name,
      messages=[{"role": "user", "content": "hello"}],
      max_tokens=5,
      logprobs=True,
    )
  assert len(answer.choices[0].logprobs.content) == 5


def test_jetstream_s_service(running):
  with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
    decode = channel.unary_stream(
      "/jetstream_proto.Orchestrator/Decode",
      request_serializer=jetstream_pb2.DecodeRequest.SerializeToString,
      response_deserializer=jetstream_pb2.DecodeResponse.FromString,
    )
    request = jetstream_pb2.DecodeRequest(max_tokens=6)
    request.token_content.token_ids.extend(b"hello")
    ids = [
      i
      for part in decode(request, timeout=PATIENCE)
      for s in part.stream_content.samples
      for i in s.token_ids
    ]
  assert len(ids) == 6


def test_killed_in_mid_request(model, tmp_path):
  """Clients get an error to retry on; a new server gives the same tokens."""
  ids = [*b"killed"]
  expected = None
  with program(model[0], tmp_path / "log") as first:
    first.wait_until_ready()
    expected = sample(first.url, ids)
    port, url = first.port, first.url
    # So that it is amid requests when it is killed.
    assert httpx.post(url + "/admin/pause").status_code == 200
    found, errors = [], []

    def ask():
      found.append(sample(url, ids))

    def ask_openai():
      with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0
      ) as client:
        try:
          client.completions.create(model="x", prompt=ids, max_tokens=3)
        except openai.APIError as error:
          errors.append(error)

    threads = [threading.Thread(target=t) for t in (ask, ask_openai)]
    threads[0].start()
    first.wait_until(lambda: first.load()["requests"], "request")
    first.process.kill()
    first.process.wait(PATIENCE)
    threads[1].start()
    threads[1].join(PATIENCE)
    (error,) = errors
    # What the official client itself retries on.
    assert isinstance(error, openai.APIConnectionError)
  with program(model[0], tmp_path / "log2", port=port) as second:
    second.wait_until_ready()
    threads[0].join(PATIENCE)
    (again,) = found
    np.testing.assert_array_equal(again.ids, expected.ids)
    assert second.end(signal.SIGINT) == 0, second.text()


def test_stopped_amid_its_start(model, tmp_path):
  with program(model[0], tmp_path / "log", "--config.max_length=4096") as found:
    found.wait_until(lambda: "HTTP" in found.text(), "port")
    assert found.end() == 0, found.text()
    assert "Fatal" not in found.text()


def test_published_weights_are_taken_in(model, tmp_path):
  folder = tmp_path / "weights"
  publisher = Publisher(folder, ("run",), dtype="float32")
  versions = [
    jax.tree.map(lambda x, i=i: x * (1 + i / 8), model[1]) for i in range(4)
  ]
  flags = (f"--config.serving.weights={folder}", "--config.serving.caches=keep")
  more = "--config.serving.poll_seconds=0.05"
  with program(model[0], tmp_path / "log", *flags, more) as server:
    # It waits for version 0.
    server.wait_until(lambda: "HTTP" in server.text(), "port")
    assert httpx.get(server.url + "/ready").status_code == 503
    ids = [*b"weights"]
    for number, params in enumerate(versions[:2]):
      publisher.publish(params, number)
      published = publisher.wait()
      server.wait_until(lambda n=number: server.load()["version"] == n, "sync")
      server.wait_until_ready()
      assert server.load()["checksum"] == published.checksum
      found = sample(server.url, ids)
      assert set(found.versions.tolist()) == {number}
      assert_scored(params, ids, found)
    # A damaged version is never served.
    publisher.publish(versions[2], 2)
    publisher.close()
    for file in folder.rglob("*"):
      if file.is_file() and "2" in file.parent.name:
        file.write_bytes(file.read_bytes()[:-7])
    back = httpx.post(server.url + "/admin/weights", json={"version": 0})
    assert back.status_code == 200, back.text
    assert_scored(versions[0], ids, sample(server.url, ids))
    missing = httpx.post(server.url + "/admin/weights", json={"version": 9})
    assert missing.status_code == 400
    assert server.load()["version"] == 0
    # A learner that goes on from a commit has another lineage.
    publisher = Publisher(folder, ("run", "again"), dtype="float32")
    publisher.publish(versions[3], 1)
    published = publisher.wait()
    newest = httpx.post(server.url + "/admin/weights", json={})
    assert newest.json()["checksum"] == published.checksum
    assert_scored(versions[3], ids, sample(server.url, ids))
    publisher.close()
    assert server.end() == 0, server.text()


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ((), "checkpoint is empty"),
    (("--checkpoint=nowhere",), "nowhere"),
    (("--checkpoint=x", "--port=70000"), "serving.port is 70000"),
    (("--checkpoint=x", "--config.serving.host=0.0.0.0"), "token_file"),
    (("--checkpoint=x", "--config.serving.prot=1"), "prot"),
    (("--checkpoint=x", "--config.dtype=int8"), "dtype"),
    (("--checkpoint=x", "--config.chat_format=klingon"), "chat_format"),
    (("--checkpoint=x", "--config=configs/quickstart.py"), "ServeConfig"),
    (("--checkpoint=x", "extra"), "extra"),
  ],
)
def test_wrong_flags_are_one_line(flags, message):
  done = subprocess.run(
    [sys.executable, "-m", "launch.serve", *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=PATIENCE,
    check=False,
  )
  assert done.returncode in (1, 2)
  assert message in done.stderr
  assert "Traceback" not in done.stderr
