"""Bytes that mean nothing, to every method."""

import asyncio
import os
import random

import grpc

from arl_jax.serving.grpc_service import ORCHESTRATOR, ROLLOUT
from arl_jax.serving.proto import jetstream_pb2, rollout_pb2
from tests.serving.grpc_serving import served, still_serves

_METHODS = (
  f"/{ORCHESTRATOR}/Decode",
  f"/{ORCHESTRATOR}/HealthCheck",
  f"/{ROLLOUT}/Generate",
  f"/{ROLLOUT}/Abort",
  f"/{ROLLOUT}/Load",
)
# Bad bytes may be good ones by chance, which a busy server then refuses.
_EXPECTED = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}


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
