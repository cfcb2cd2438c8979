"""JetStream's service as its clients see it."""

import asyncio
import functools
import threading

import grpc
import jax
import numpy as np
import pytest
from google.protobuf import descriptor_pb2

from arl_jax.model import ModelConfig, init, token_logprobs
from arl_jax.rollout.engine import Engine, EngineConfig
from arl_jax.rollout.request import Sampling
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.grpc_service import build
from arl_jax.serving.proto import jetstream_pb2
from arl_jax.serving.service import Service
from tests.rollout.fake_engine import FakeEngine, Params, alone
from tests.serving.grpc_serving import (
  PATIENCE,
  Letters,
  decode,
  failure,
  health,
  served,
  until,
)

_GREEDY = {"temperature": 0.0, "stop_ids": Letters.eos_ids}


async def collected(call):
  """Tokens, texts and messages of each sample."""
  ids, texts, messages = [], [], 0
  async for response in call:
    assert response.WhichOneof("content") == "stream_content"
    samples = response.stream_content.samples
    ids = ids or [[] for _ in samples]
    texts = texts or ["" for _ in samples]
    # Theirs read the first one of every message.
    assert len(samples) == len(ids) >= 1
    for i, sample in enumerate(samples):
      ids[i] += sample.token_ids
      texts[i] += sample.text
    messages += 1
  return ids, texts, messages


def test_token_content_is_continued_greedily_a_burst_a_message():
  async def main():
    async with served(FakeEngine(burst=3)) as (_, channel):
      return await collected(decode(channel, ids=[3, 1, 4], max_tokens=20))

  ids, texts, messages = asyncio.run(main())
  assert ids == [alone([3, 1, 4], Sampling(max_tokens=20, **_GREEDY))]
  # As JetStream answers clients that tokenize: they didn't ask for text.
  assert texts == [""]
  assert 1 < messages < len(ids[0])


def test_text_content_is_answered_with_text_and_its_tokens():
  tokenizer = Letters()

  async def main(text):
    async with served(tokenizer=tokenizer) as (_, channel):
      return await collected(decode(channel, text=text, max_tokens=30))

  for text in ("HALLO", "好€🦜", "A"):
    ids, texts, _ = asyncio.run(main(text))
    sampling = Sampling(max_tokens=30, **_GREEDY)
    assert ids == [alone(tokenizer.encode(text), sampling)]
    assert texts == [tokenizer.decode(ids[0])]


def test_samples_are_as_many_as_asked_for():
  async def main(number):
    async with served() as (_, channel):
      call = decode(channel, ids=[5], max_tokens=9, num_samples=number)
      return await collected(call)

  for number in (0, 1, 3, 7):
    ids, _, _ = asyncio.run(main(number))
    expected = [
      alone([5], Sampling(max_tokens=9, **_GREEDY).choice(i))
      for i in range(number or 1)
    ]
    assert ids == expected


def test_a_mark_of_the_beginning_is_added_unless_there_is_one():
  class Marked(Letters):
    bos_id = 7

  async def main(**fields):
    async with served(tokenizer=Marked()) as (_, channel):
      return await collected(decode(channel, max_tokens=5, **fields))

  sampling = Sampling(max_tokens=5, **_GREEDY)
  for fields, prompt in (
    ({"text": "09"}, [7, 0, 9]),
    ({"text": "09", "has_bos": True}, [0, 9]),
    # Whoever sends tokens sends all of them.
    ({"ids": [0, 9]}, [0, 9]),
  ):
    assert asyncio.run(main(**fields))[0] == [alone(prompt, sampling)]


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"max_tokens": 4}, "content is missing"),
    ({"ids": [1]}, "max_tokens is 0, not >= 1"),
    ({"ids": [1], "max_tokens": -3}, "max_tokens is -3"),
    ({"ids": [64], "max_tokens": 4}, "64, which isn't in the vocabulary of 64"),
    ({"ids": [-1], "max_tokens": 4}, "-1, which isn't"),
    ({"ids": [1] * 48, "max_tokens": 1}, "token_content.token_ids has 48 ids"),
    ({"ids": [1] * 40, "max_tokens": 9}, "max_tokens 9 must fit into 48"),
    ({"token_content": {}, "max_tokens": 1}, "token_ids has 0 ids"),
    ({"text_content": {}, "max_tokens": 1}, "text_content.text is 0 tokens"),
    ({"text": "A" * 48, "max_tokens": 1}, "text_content.text is 48 tokens"),
    ({"text": "~", "max_tokens": 1}, "text_content.text: the text '~'"),
    ({"ids": [1], "max_tokens": 1, "num_samples": -1}, "num_samples is -1"),
    ({"ids": [1], "max_tokens": 1, "num_samples": 200}, "in 0..128"),
    ({"ids": [1], "max_tokens": 1, "lora_adapter_id": "x"}, "lora_adapter_id"),
  ],
)
def test_bad_requests_name_their_field(fields, said):
  async def main():
    async with served() as (_, channel):
      code, details = await failure(decode(channel, **fields))
      assert (await health(channel)).is_live
      return code, details

  code, details = asyncio.run(main())
  assert code == "INVALID_ARGUMENT"
  assert said in details
  assert "Traceback" not in details


def test_health_follows_the_service():
  loaded = threading.Event()

  def make():
    assert loaded.wait(PATIENCE)
    return Scheduler(engine, Params(0), 0)

  engine = FakeEngine()

  async def main():
    service = Service(make, engine, Letters(), ServingConfig())
    service.start()
    server, port = build(service, port=0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
      # Clients wait for it: nothing can be decoded yet.
      assert not (await health(channel)).is_live
      assert (await failure(decode(channel, ids=[1])))[0] == "UNAVAILABLE"
      loaded.set()
      await until(lambda: service.load().state == "serving")
      assert (await health(channel)).is_live
      service.drain()
      assert (await health(channel)).is_live
      service.stop(PATIENCE)
      assert not (await health(channel)).is_live
    await server.stop(0)

  asyncio.run(main())


def test_fields_have_the_published_numbers():
  """As the published interface has them; any other number is another wire."""
  file = descriptor_pb2.FileDescriptorProto()
  jetstream_pb2.DESCRIPTOR.CopyToProto(file)
  numbers = {}

  def visit(message, path):
    name = f"{path}{message.name}"
    numbers[name] = {f.name: f.number for f in message.field}
    for inner in message.nested_type:
      visit(inner, f"{name}.")

  for message in file.message_type:
    visit(message, "")
  assert file.package == "jetstream_proto"
  assert [s.name for s in file.service] == ["Orchestrator"]
  assert [m.name for m in file.service[0].method] == ["Decode", "HealthCheck"]
  assert numbers == {
    "DecodeRequest": {
      "max_tokens": 4,
      "text_content": 5,
      "token_content": 6,
      "metadata": 7,
      "num_samples": 8,
      "lora_adapter_id": 9,
      "has_bos": 10,
    },
    "DecodeRequest.TextContent": {"text": 1},
    "DecodeRequest.TokenContent": {"token_ids": 1},
    "DecodeRequest.Metadata": {"start_time": 1},
    "DecodeResponse": {"initial_content": 2, "stream_content": 3},
    "DecodeResponse.InitialContent": {},
    "DecodeResponse.StreamContent": {"samples": 1},
    "DecodeResponse.StreamContent.Sample": {"text": 1, "token_ids": 2},
    "HealthCheckRequest": {},
    "HealthCheckResponse": {"is_live": 1},
  }


def test_bytes_of_an_older_client_are_understood():
  """By hand: session_cache = 1, priority = 3, max_tokens = 4, tokens = 6."""
  body = (
    b"\x0a\x04abcd" + b"\x18\x02" + b"\x20\x05" + b"\x32\x04\x0a\x02\x03\x09"
  )

  async def main():
    async with served() as (_, channel):
      call = channel.unary_stream("/jetstream_proto.Orchestrator/Decode")
      return b"".join([message async for message in call(body)])

  answer = asyncio.run(main())
  # Concatenated messages merge: repeated samples follow one another.
  merged = jetstream_pb2.DecodeResponse.FromString(answer)
  ids = [i for s in merged.stream_content.samples for i in s.token_ids]
  assert ids == alone([3, 9], Sampling(max_tokens=5, **_GREEDY))


@pytest.mark.slow
def test_a_real_engine_decodes_the_most_probable_tokens():
  config = ModelConfig(
    vocab_size=64, width=32, heads=4, kv_heads=2, head_dim=8, mtp_heads=0
  )
  params = init(config, jax.random.key(0))
  shapes = EngineConfig(
    max_concurrent_decodes=2, prefill_rows=1, prefill_chunk=4, decode_steps=2
  )
  engine = Engine(config, shapes, max_length=32)

  async def main():
    async with served(engine, engine.place(params)) as (_, channel):
      return await collected(decode(channel, ids=[3, 1, 4, 1], max_tokens=8))

  ((ids,), _, _) = asyncio.run(main())
  assert len(ids) == 8 or ids[-1] in Letters.eos_ids
  score = jax.jit(functools.partial(token_logprobs, config=config))
  row = np.array([3, 1, 4, 1, *ids], np.int32)
  for position in range(4, len(row)):
    # Every token in its place: what was sampled is the most probable one.
    tried = np.tile(row, (config.vocab_size, 1))
    tried[:, position] = np.arange(config.vocab_size)
    logp, _ = score(params, input_ids=tried)
    assert np.asarray(logp)[:, position].argmax() == row[position]
