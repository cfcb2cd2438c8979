"""gRPC servers over fake engines, and clients of theirs."""

import asyncio
import contextlib
import threading

import grpc

from arl_jax.rollout.request import Sampling
from arl_jax.rollout.scheduler import Scheduler, SchedulerConfig
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.grpc_service import ORCHESTRATOR, ROLLOUT, build
from arl_jax.serving.proto import jetstream_pb2, rollout_pb2
from arl_jax.serving.service import Service
from tests.rollout.fake_engine import FakeEngine, Params, alone

# Seconds until a test gives up; none waits for so long.
PATIENCE = 30
_CHARACTERS = "".join(map(chr, range(48, 96))) + "äß€好🦜ñöé"


class Letters:
  """48 letters of one token, and the bytes of some longer ones."""

  eos_ids = (63,)
  bos_id = None

  def __init__(self):
    longer = _CHARACTERS[48:].encode()
    self._bytes = [bytes([i]) for i in range(48, 96)]
    self._bytes += [bytes([b]) for b in dict.fromkeys(longer)]
    self._bytes.append(b"")
    assert len(self._bytes) == 64

  def encode(self, text):
    try:
      return [self._bytes.index(bytes([b])) for b in text.encode()]
    except ValueError:
      raise ValueError(f"the text {text!r:.80} has no encoding") from None

  def decode(self, ids):
    return b"".join(self._bytes[i] for i in ids).decode(errors="replace")


class Gate:
  """Lets an engine sample as often as it is told to."""

  def __init__(self):
    self._free = threading.Semaphore(0)

  def __call__(self, name, argument):
    if name == "generate":
      assert self._free.acquire(timeout=PATIENCE)

  def open(self, times=10_000):
    self._free.release(times)


@contextlib.asynccontextmanager
async def served(
  engine=None,
  params=None,
  *,
  token="",
  tokenizer=None,
  scheduler=None,
  patience=PATIENCE,
  **config,
):
  """A service behind gRPC, and a channel to it; nothing is left at the end.

  Where it listens is `service.grpc_port`.
  """
  engine = engine or FakeEngine()
  tokenizer = tokenizer or Letters()

  def make():
    return Scheduler(
      engine,
      params or Params(0),
      0,
      config=scheduler or SchedulerConfig(),
      detokenize=tokenizer.decode,
    )

  service = Service(make, engine, tokenizer, ServingConfig(**config))
  service.start()
  server, port = build(service, token=token, port=0)
  await server.start()
  try:
    service.grpc_port = port
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
      await until(lambda: service.load().state != "starting")
      yield service, channel
      await asyncio.wait_for(unused(service), patience)
  finally:
    await server.stop(0)
    service.stop(PATIENCE)
  assert not getattr(engine, "violations", None)


async def until(right):
  async with asyncio.timeout(PATIENCE):
    while not right():
      await asyncio.sleep(0.005)


async def unused(service):
  """Waits until no request is left, and no slot is held."""

  def idle():
    load = service.load()
    return not (load.running or load.waiting or load.slots_in_use)

  if service.load().state in ("serving", "draining", "drained"):
    await until(idle)
    assert not service._opened
    assert not service._by_request


def decode(channel, **fields):
  """The call of JetStream's Decode; `ids` stand for token_content."""
  if ids := fields.pop("ids", None):
    fields["token_content"] = {"token_ids": ids}
  if text := fields.pop("text", None):
    fields["text_content"] = {"text": text}
  return channel.unary_stream(
    f"/{ORCHESTRATOR}/Decode",
    request_serializer=jetstream_pb2.DecodeRequest.SerializeToString,
    response_deserializer=jetstream_pb2.DecodeResponse.FromString,
  )(jetstream_pb2.DecodeRequest(**fields), timeout=PATIENCE)


def generate(channel, *, ids=None, metadata=None, **fields):
  """The call of Generate."""
  outer = {}
  for name in rollout_pb2.GenerateRequest.DESCRIPTOR.fields_by_name:
    if name in fields:
      outer[name] = fields.pop(name)
  if ids is not None:
    outer["token_ids"] = {"ids": ids}
  outer.setdefault("sampling", {"max_tokens": 6} | fields)
  return channel.unary_stream(
    f"/{ROLLOUT}/Generate",
    request_serializer=rollout_pb2.GenerateRequest.SerializeToString,
    response_deserializer=rollout_pb2.GenerateResponse.FromString,
  )(rollout_pb2.GenerateRequest(**outer), timeout=PATIENCE, metadata=metadata)


def unary(channel, path, request, answer, **more):
  return channel.unary_unary(
    path,
    request_serializer=type(request).SerializeToString,
    response_deserializer=answer.FromString,
  )(request, timeout=PATIENCE, **more)


def health(channel, **more):
  request = jetstream_pb2.HealthCheckRequest()
  path = f"/{ORCHESTRATOR}/HealthCheck"
  return unary(
    channel, path, request, jetstream_pb2.HealthCheckResponse, **more
  )


def load(channel, **more):
  answer = rollout_pb2.LoadResponse
  return unary(
    channel, f"/{ROLLOUT}/Load", rollout_pb2.LoadRequest(), answer, **more
  )


def abort(channel, *request_ids):
  request = rollout_pb2.AbortRequest(request_ids=request_ids)
  answer = rollout_pb2.AbortResponse
  return unary(channel, f"/{ROLLOUT}/Abort", request, answer)


async def messages(call):
  """The next ones of a stream; unlike the call's own iterator after `read`."""
  while (message := await call.read()) is not grpc.aio.EOF:
    yield message


async def failure(call):
  """Code and details of a call that fails."""
  try:
    if hasattr(call, "read"):
      async for _ in messages(call):
        pass
    else:
      await call
  except grpc.aio.AioRpcError as error:
    return error.code().name, error.details()
  raise AssertionError("the call succeeds")


async def still_serves(channel):
  call = decode(channel, ids=[4, 2], max_tokens=4)
  ids = [i async for r in call for i in r.stream_content.samples[0].token_ids]
  sampling = Sampling(max_tokens=4, temperature=0.0, stop_ids=Letters.eos_ids)
  assert ids == alone([4, 2], sampling)
  assert (await health(channel)).is_live
