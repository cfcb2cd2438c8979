"""The server as agents see it: the same tokens as of an engine beside them."""

import asyncio
import socket
import subprocess
import sys
import threading

import httpx
import numpy as np
import pytest

from arl_jax.rollout.client import LocalClient
from arl_jax.rollout.request import RequestTimeout, Sampling
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.serving.client import RemoteClient, read_sample
from arl_jax.serving.stream import Unavailable
from arl_jax.types import PolicyClient
from tests.rollout.fake_engine import FakeEngine, Params, alone
from tests.serving.http_serving import (
  EchoEngine,
  idle,
  serving,
  tokenizer,
  wait_until,
)


class HashEngine(FakeEngine):
  """Tokens depend on the whole prefix; any mistake shows."""

  vocab_size = 260

  def __init__(self, **changes):
    super().__init__(slots=4, max_length=256, prefill_chunk=64, **changes)


@pytest.fixture(scope="module")
def server():
  with serving(HashEngine()) as found:
    yield found


def run(server, work, **changes):
  async def main():
    async with RemoteClient(server.url, **changes) as client:
      return await work(client)

  found = asyncio.run(main())
  wait_until(lambda: idle(server.service))
  return found


def test_it_is_a_policy_client(server):
  async def work(client):
    assert isinstance(client, PolicyClient)

  run(server, work)


def test_tokens_are_those_of_a_local_engine(server):
  prompts = [[i, 2, 3, *range(i)] for i in range(12)]
  how = {"max_tokens": 9, "stop_ids": (5,), "seed": 3, "temperature": 0.5}

  async def sample(client):
    found = await asyncio.gather(
      *(client.sample(f"a/b {i}", p, **how) for i, p in enumerate(prompts))
    )
    for i in range(len(prompts)):
      await client.close(f"a/b {i}")
    return found

  async def locally():
    scheduler = Scheduler(HashEngine(), Params(0), 0)
    async with LocalClient(scheduler) as client:
      return await sample(client)

  near, far = asyncio.run(locally()), run(server, sample)
  for a, b, prompt in zip(near, far, prompts, strict=True):
    assert b.ids.tolist() == alone(prompt, Sampling(**how))
    for name in ("ids", "logp", "versions", "sampled_logp", "cache_versions"):
      found = getattr(b, name)
      np.testing.assert_array_equal(found, getattr(a, name))
      assert found.dtype == getattr(a, name).dtype
    np.testing.assert_array_equal(b.experts, a.experts)
    assert (b.stopped, b.finish) == (a.stopped, a.finish)


def test_a_session_keeps_its_cache(server):
  before = server.service.load().reused_tokens

  async def work(client):
    ids = list(range(40))
    for turn in range(3):
      how = {"max_tokens": 4, "stop_ids": (), "seed": turn}
      ids += (await client.sample("s", ids, **how)).ids.tolist()
    await client.close("s")

  run(server, work)
  assert server.service.load().reused_tokens - before >= 40 + 44


def test_what_can_t_be_is_a_value_error(server):
  async def work(client):
    with pytest.raises(ValueError, match="prompt"):
      await client.sample("s", [], max_tokens=1, stop_ids=(), seed=0)
    with pytest.raises(ValueError, match="max_tokens"):
      await client.sample("s", [1], max_tokens=10**6, stop_ids=(), seed=0)
    assert client.retries == 0

  run(server, work)


def test_a_timeout(server):
  gate = threading.Event()

  def wait(name, argument):
    if name == "generate":
      gate.wait(0.2)

  with serving(EchoEngine(on_call=wait)) as slow:

    async def work(client):
      ids = [*b"say:", *b"x" * 500]
      with pytest.raises(RequestTimeout, match=r"0.3 s"):
        await client.sample("s", ids, max_tokens=400, stop_ids=(), seed=0)
      await client.close("s")

    run(slow, work, timeout=0.3)
    gate.set()


def test_a_busy_server_is_tried_again():
  gate = threading.Event()

  def wait(name, argument):
    if name == "generate":
      gate.wait(60)

  with serving(HashEngine(on_call=wait), max_requests=1) as server:

    async def work(client):
      how = {"max_tokens": 3, "stop_ids": (), "seed": 0}
      tasks = [
        asyncio.create_task(client.sample(f"{i}", [i], **how)) for i in (1, 2)
      ]
      while not client.retries:
        await asyncio.sleep(0.01)
      gate.set()
      found = await asyncio.gather(*tasks)
      for i in (1, 2):
        await client.close(f"{i}")
      return [s.ids.tolist() for s in found]

    how = Sampling(max_tokens=3)
    assert run(server, work) == [alone([1], how), alone([2], how)]

    async def impatient(client):
      server.service.drain()
      with pytest.raises(Unavailable, match="draining"):
        await client.sample("s", [1], max_tokens=1, stop_ids=(), seed=0)

    run(server, impatient, patience=0.05)


def test_a_server_that_isn_t_there():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]

  async def main():
    async with RemoteClient(f"http://127.0.0.1:{port}", patience=0.3) as client:
      with pytest.raises(httpx.TransportError):
        await client.sample("s", [1], max_tokens=1, stop_ids=(), seed=0)
      assert client.retries
      await client.close("s")

  asyncio.run(main())


def test_urls():
  with pytest.raises(ValueError, match="url"):
    RemoteClient("localhost:8000")


GOOD = {
  "ids": [1, 2],
  "logprobs": [-1.0, -2.0],
  "sampled_logprobs": [-1.0, -2.0],
  "versions": [0, 0],
  "cache_versions": [0, 0],
  "experts": None,
  "finish": "length",
}


@pytest.mark.parametrize(
  "changes",
  [
    {"ids": [1]},
    {"ids": [[1], [2]]},
    {"logprobs": [float("nan"), 0]},
    {"finish": "tired"},
    {"experts": {"shape": [3, 1, 1], "base64": "AAAAAAAA"}},
    {"experts": {"shape": [2, 1, 1], "base64": "AAA"}},
  ],
)
def test_answers_that_don_t_fit_together(changes):
  assert read_sample(GOOD).ids.tolist() == [1, 2]
  with pytest.raises(ValueError, match=r"server|base64|buffer|padding"):
    read_sample(GOOD | changes)


def test_it_needs_no_jax():
  code = (
    "import sys, arl_jax.serving.client;"
    "sys.exit(any(m in sys.modules for m in ('jax', 'flax', 'uvicorn')))"
  )
  assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class TestWeightsOfARequest:
  """A request may wait for the weights that it must be computed by."""

  def test_until_they_are_there_it_is_sent_again(self):
    async def run(served):
      async with RemoteClient(served.url, patience=30) as client:
        asking = asyncio.create_task(
          client.sample(
            "s",
            tokenizer().encode("say:<version>"),
            max_tokens=20,
            stop_ids=(257,),
            seed=0,
            lineage="new",
            min_version=3,
          )
        )
        for lineage, number in (("old", 9), ("new", 2), ("new", 3)):
          await asyncio.sleep(0.5)
          assert not asking.done()
          await served.service.update_weights(
            Params(number), number, abandon=True, lineage=lineage
          )
        sample = await asking
        assert client.retries > 0
        return sample

    with serving() as served:
      sample = asyncio.run(run(served))
    assert set(sample.versions.tolist()) == {3}

  def test_a_server_without_them_says_what_it_has(self):
    async def run(served):
      async with RemoteClient(served.url, patience=0.2) as client:
        await client.sample(
          "s", [1, 2], max_tokens=4, stop_ids=(257,), seed=0, lineage="other"
        )

    with (
      serving() as served,
      pytest.raises(Unavailable, match="lineage '', not of 'other' yet"),
    ):
      asyncio.run(run(served))
