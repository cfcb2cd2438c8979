"""What goes wrong with clients, requests and engines ends in a code."""

import asyncio
import os
import random

import grpc
import pytest

from arl_jax.rollout.request import Sampling
from arl_jax.rollout.scheduler import Scheduler, SchedulerConfig
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.grpc_service import ORCHESTRATOR, ROLLOUT, build
from arl_jax.serving.proto import jetstream_pb2, rollout_pb2
from arl_jax.serving.service import Service
from tests.rollout.fake_engine import FakeEngine, Params, alone
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
  until,
)

_METHODS = (
  f"/{ORCHESTRATOR}/Decode",
  f"/{ORCHESTRATOR}/HealthCheck",
  f"/{ROLLOUT}/Generate",
  f"/{ROLLOUT}/Abort",
  f"/{ROLLOUT}/Load",
)
# Bad bytes may be good ones by chance, which a busy server then refuses.
_EXPECTED = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}


async def still_serves(channel):
  call = decode(channel, ids=[4, 2], max_tokens=4)
  ids = [i async for r in call for i in r.stream_content.samples[0].token_ids]
  sampling = Sampling(max_tokens=4, temperature=0.0, stop_ids=Letters.eos_ids)
  assert ids == alone([4, 2], sampling)
  assert (await health(channel)).is_live


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
      call = channel.unary_stream(_METHODS[0])
      request = jetstream_pb2.DecodeRequest(
        max_tokens=40, token_content={"token_ids": [1]}
      )
      body = request.SerializeToString()
      code, _ = await failure(call(body, timeout=0.2))
      gate.open()
      await until(lambda: not service._opened)
      return code

  assert asyncio.run(main()) == "DEADLINE_EXCEEDED"


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


# Bytes that mean nothing.


def _valid_bodies():
  yield jetstream_pb2.DecodeRequest(
    max_tokens=3, token_content={"token_ids": [1, 2, 3]}, num_samples=2
  )
  yield jetstream_pb2.DecodeRequest(
    max_tokens=3, text_content={"text": "HALLO"}, has_bos=True
  )
  sampling = {
    "max_tokens": 3,
    "temperature": 0.5,
    "stop_strings": ["zz"],
    "logit_bias": {1: 2.0},
    "stop_ids": [5],
  }
  # Not `session`: sessions stay, by design, until they are closed.
  yield rollout_pb2.GenerateRequest(
    token_ids={"ids": [1, 2]}, sampling=sampling, n=2, timeout=30.0, version=0
  )
  yield rollout_pb2.GenerateRequest(text="HALLO", sampling=sampling)
  yield rollout_pb2.AbortRequest(request_ids=["a", "b"])


def _mutated(body, draw):
  body = bytearray(body)
  for _ in range(draw.randint(1, 4)):
    at = draw.randrange(len(body) + 1)
    match draw.randrange(4):
      case 0:
        del body[at:]
      case 1:
        body[at:at] = draw.randbytes(draw.randint(1, 8))
      case 2:
        del body[at : at + draw.randint(1, 4)]
      case 3 if at < len(body):
        body[at] ^= 1 << draw.randrange(8)
  return bytes(body)


def test_a_thousand_malformed_requests_leave_the_server_whole():
  draw = random.Random(int(os.environ.get("ARL_FUZZ_SEED", "0")))
  valid = [m.SerializeToString() for m in _valid_bodies()]
  bodies = [draw.randbytes(draw.randint(0, 64)) for _ in range(300)]
  bodies += [_mutated(draw.choice(valid), draw) for _ in range(700)]
  codes = {}

  async def send(channel, body):
    path = draw.choice(_METHODS)
    try:
      # As a stream, whatever the method: one answer is a stream, too.
      async for _ in channel.unary_stream(path)(body, timeout=60):
        pass
      code, details = "OK", ""
    except grpc.aio.AioRpcError as error:
      code, details = error.code().name, error.details() or ""
    assert "Traceback" not in details
    assert "\n" not in details
    codes[code] = codes.get(code, 0) + 1

  async def main():
    async with served() as (service, channel):
      for i in range(0, len(bodies), 50):
        await asyncio.gather(
          *(send(channel, body) for body in bodies[i : i + 50])
        )
      assert service.load().state == "serving"
      for slot in service._scheduler._slots:
        # A mutated body may name a session.
        if slot.session is not None:
          service.close_session(slot.session)
      await still_serves(channel)

  asyncio.run(main())
  assert codes.keys() <= _EXPECTED, codes
  assert codes["INVALID_ARGUMENT"] > 300
  assert codes["OK"] > 50


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
