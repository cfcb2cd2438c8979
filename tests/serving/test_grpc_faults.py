"""What goes wrong with clients, requests and engines ends in a code."""

import asyncio
import pathlib
import subprocess
import sys

import grpc
import pytest

from arl_jax.rollout.scheduler import Scheduler, SchedulerConfig
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.grpc_service import ORCHESTRATOR, build
from arl_jax.serving.proto import jetstream_pb2
from arl_jax.serving.service import Service
from tests.rollout.fake_engine import FakeEngine, Params
from tests.serving.grpc_serving import (
  Gate,
  Letters,
  abort,
  decode,
  failure,
  generate,
  health,
  load,
  messages,
  served,
  still_serves,
  until,
)

_ROOT = pathlib.Path(__file__).parents[2]
# Clients that go.


@pytest.mark.parametrize("ask", [decode, generate])
def test_client_gone_in_mid_stream_frees_its_slots(ask):
  gate = Gate()
  many = {decode: {"num_samples": 3}, generate: {"n": 3}}[ask]

  async def main():
    async with served(FakeEngine(on_call=gate)) as (service, channel):
      call = ask(channel, ids=[1], max_tokens=40, **many)
      gate.open(2)
      await call.read()
      await until(lambda: service.load().running)
      call.cancel()
      # The engine's thread sleeps in a step until then.
      await until(lambda: service._commands.qsize() >= 3)
      gate.open()
      await until(lambda: not service.load().running)
      assert service.load().sampled_tokens < 3 * 40
      await still_serves(channel)

  asyncio.run(main())


def test_connection_cut_in_mid_stream_frees_its_slot():
  gate = Gate()

  async def main():
    async with served(FakeEngine(on_call=gate)) as (service, channel):
      target = f"127.0.0.1:{service.grpc_port}"
      async with grpc.aio.insecure_channel(target) as other:
        call = generate(other, ids=[1], max_tokens=40)
        gate.open(1)
        await call.read()
        await until(lambda: service.load().running)
      gate.open()
      await until(lambda: not service._opened)
      await still_serves(channel)

  asyncio.run(main())


def test_a_clients_deadline_ends_its_request():
  gate = Gate()

  async def main():
    async with served(FakeEngine(on_call=gate)) as (service, channel):
      call = channel.unary_stream(f"/{ORCHESTRATOR}/Decode")
      request = jetstream_pb2.DecodeRequest(
        max_tokens=40, token_content={"token_ids": [1]}
      )
      body = request.SerializeToString()
      code, _ = await failure(call(body, timeout=0.2))
      gate.open()
      await until(lambda: not service._opened)
      return code

  assert asyncio.run(main()) == "DEADLINE_EXCEEDED"


# Servers that go.


_SERVER = """
import asyncio
from tests.rollout.fake_engine import FakeEngine
from tests.serving.grpc_serving import Gate, served

async def main():
  gate = Gate()
  gate.open(1)
  async with served(FakeEngine(on_call=gate)) as (service, _):
    print(service.grpc_port, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_server_killed_in_mid_request_is_unavailable():
  """Clients know by that code that another try may help."""
  server = subprocess.Popen(
    [sys.executable, "-c", _SERVER],
    stdout=subprocess.PIPE,
    text=True,
    cwd=_ROOT,
  )

  async def main():
    port = int(await asyncio.to_thread(server.stdout.readline))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
      calls = [generate(channel, ids=[1], max_tokens=40)]
      await calls[0].read()
      assert (await calls[0].read()).part.token_ids
      # This one waits for the engine.
      calls.append(generate(channel, ids=[2], max_tokens=40))
      await calls[1].read()
      server.kill()
      return [await failure(call) for call in calls]

  try:
    failures = asyncio.run(main())
  finally:
    server.kill()
    server.communicate()
  assert [code for code, _ in failures] == ["UNAVAILABLE"] * 2


# Errors of the service.


def test_a_request_that_takes_too_long_says_so():
  gate = Gate()

  async def main():
    async with served(FakeEngine(on_call=gate)) as (service, channel):
      service.pause()
      refused = await failure(generate(channel, ids=[1], timeout=0.05))
      service.resume()
      gate.open()
      return refused

  code, details = asyncio.run(main())
  assert code == "DEADLINE_EXCEEDED"
  assert "took more than 0.05 s" in details


def test_too_many_requests_are_refused_at_once():
  gate = Gate()

  async def main():
    engine = FakeEngine(slots=1, on_call=gate)
    async with served(engine, max_requests=2) as (service, channel):
      service.pause()
      # Two of three find room; it is given back.
      refused = [await failure(generate(channel, ids=[3], n=3))]
      await until(lambda: not service._opened)
      service.resume()
      calls = [generate(channel, ids=[i]) for i in (1, 2)]
      for call in calls:
        await call.read()
      refused.append(await failure(decode(channel, ids=[3], max_tokens=2)))
      gate.open()
      for call in calls:
        async for _ in messages(call):
          pass
      return refused

  for code, details in asyncio.run(main()):
    assert code == "RESOURCE_EXHAUSTED"
    assert "max_requests is 2" in details


def test_a_full_queue_of_the_scheduler_is_overload():
  gate = Gate()

  async def main():
    engine = FakeEngine(slots=1, on_call=gate)
    limits = SchedulerConfig(max_waiting=0)
    async with served(engine, scheduler=limits) as (service, channel):
      first = generate(channel, ids=[1], max_tokens=40)
      gate.open(1)
      await until(lambda: service.load().running == 1)
      # The engine's thread submits between two steps.
      second = generate(channel, ids=[2])
      await second.read()
      gate.open()
      refused = await failure(second)
      async for _ in messages(first):
        pass
      return refused

  code, details = asyncio.run(main())
  assert code == "RESOURCE_EXHAUSTED"
  assert "max_waiting is 0" in details


def test_a_draining_or_stopped_server_is_unavailable():
  async def main():
    async with served() as (service, channel):
      service.drain()
      draining = await failure(decode(channel, ids=[1], max_tokens=2))
      service.resume()
      await still_serves(channel)
      service.stop(60)
      stopped = await failure(generate(channel, ids=[1]))
      return draining, stopped

  for code, details in asyncio.run(main()):
    assert code == "UNAVAILABLE"
    assert "drain" in details or "stopped" in details


def test_a_request_that_cannot_be_computed_has_one_line_and_no_trace():
  engine = FakeEngine()
  engine.poison = {13}

  async def main():
    async with served(engine) as (_, channel):
      refused = await failure(generate(channel, ids=[13]))
      await still_serves(channel)
      return refused

  code, details = asyncio.run(main())
  assert code == "INTERNAL"
  assert "its logits aren't finite" in details
  assert "\n" not in details
  assert "Traceback" not in details


def test_a_failure_nobody_foresaw_says_nothing_of_the_inside(caplog):
  class Broken(Letters):
    def decode(self, ids):
      raise KeyError("a secret of the inside")

  async def main():
    async with served(tokenizer=Broken()) as (_, channel):
      refused = await failure(generate(channel, text="AB"))
      assert (await health(channel)).is_live
      return refused

  code, details = asyncio.run(main())
  assert (code, details) == ("INTERNAL", "the server failed at this request")


# Who may ask.


def test_only_the_token_lets_in():
  async def main():
    async with served(token="s3cret") as (_, channel):
      refused = [
        await failure(load(channel)),
        await failure(abort(channel, "x")),
        await failure(decode(channel, ids=[1], max_tokens=2)),
      ]
      for value in ("Bearer", "Bearer s3cre", "Basic s3cret", "s3cret", ""):
        metadata = (("authorization", value),)
        refused.append(await failure(load(channel, metadata=metadata)))
      refused.append(
        await failure(
          generate(channel, ids=[1], metadata=(("authorization", "Bearer x"),))
        )
      )
      right = (("authorization", "Bearer s3cret"),)
      assert (await load(channel, metadata=right)).state == "serving"
      async for _ in generate(channel, ids=[1], metadata=right):
        pass
      # Whoever watches over servers has no token.
      assert (await health(channel)).is_live
      return refused

  refused = asyncio.run(main())
  assert {code for code, _ in refused} == {"UNAUTHENTICATED"}
  assert not any("s3cret" in details for _, details in refused)


def test_a_taken_port_is_an_error():
  async def main():
    async with served() as (service, _):
      with pytest.raises(OSError, match="can't listen on"):
        build(service, port=service.grpc_port)

  asyncio.run(main())


def test_nothing_is_served_beyond_loopback_without_a_token():
  config = ServingConfig()
  config.validate()
  assert config.host == "127.0.0.1"
  config.host = "0.0.0.0"
  with pytest.raises(ValueError, match="token_file"):
    config.validate()


def test_bodies_beyond_the_limit_are_refused():
  async def main():
    async with served(max_body_bytes=1000) as (_, channel):
      refused = await failure(decode(channel, text="A" * 2000, max_tokens=2))
      await still_serves(channel)
      return refused

  assert asyncio.run(main())[0] == "RESOURCE_EXHAUSTED"


def test_what_is_said_of_a_huge_field_is_short():
  async def main():
    async with served() as (_, channel):
      huge = {"max_tokens": 2, "ids": [1]}
      return [
        await failure(decode(channel, lora_adapter_id="€" * 100_000, **huge)),
        await failure(decode(channel, text="~" * 100_000, max_tokens=2)),
        await failure(generate(channel, ids=[1], version=-(2**62))),
      ]

  for code, details in asyncio.run(main()):
    assert code == "INVALID_ARGUMENT"
    assert len(details) <= 500


def test_a_stopping_server_lets_calls_end():
  gate = Gate()

  async def main():
    engine = FakeEngine(on_call=gate)
    service = Service(
      lambda: Scheduler(engine, Params(0), 0),
      engine,
      Letters(),
      ServingConfig(),
    )
    service.start()
    server, port = build(service, port=0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
      await until(lambda: service.load().state == "serving")
      call = generate(channel, ids=[1], max_tokens=9)
      await call.read()
      stopping = asyncio.create_task(server.stop(60))
      await asyncio.sleep(0)
      gate.open()
      parts = [response.part async for response in messages(call)]
      await stopping
      service.stop(60)
      return parts, await failure(health(channel))

  parts, (code, _) = asyncio.run(main())
  assert sum(len(p.token_ids) for p in parts) == 9
  assert code == "UNAVAILABLE"
