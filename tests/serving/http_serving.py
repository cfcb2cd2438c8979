"""HTTP servers over a scripted engine, with a tokenizer of bytes."""

import asyncio
import contextlib
import functools
import threading
import time

import httpx

from arl_jax.chat.formats import format_of
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.tokenizer_files import Parts
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.rollout.scheduler_config import SchedulerConfig
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.server import Server
from arl_jax.serving.service import Service
from tests.rollout.fake_engine import FakeEngine, Params

MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
# Seconds that anything may take.
PATIENCE = 60


@functools.cache
def tokenizer():
  """A token a byte, and marks behind them."""
  # How byte-level tokenizers write bytes as characters.
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [b for b in range(256) if b not in plain]
  letters = {b: chr(b) for b in plain}
  letters |= {b: chr(256 + n) for n, b in enumerate(others)}
  vocab = {letters[b]: b for b in range(256)}
  added = [
    {
      "id": 256 + i,
      "content": mark,
      "special": i < 2,
      "single_word": False,
      "lstrip": False,
      "rstrip": False,
      "normalized": False,
    }
    for i, mark in enumerate(MARKS)
  ]
  byte_level = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
  }
  spec = {
    "version": "1.0",
    "added_tokens": added,
    "pre_tokenizer": byte_level,
    "decoder": byte_level,
    "model": {"type": "BPE", "vocab": vocab, "merges": []},
  }
  return PretrainedTokenizer(
    Parts(
      path="bytes",
      spec=spec,
      size=256 + len(MARKS),
      eos_ids=(257,),
      bos_id=None,
      template=None,
      special={},
    )
  )


def echo(version, prefix, seed, index):
  """Says again what came last in the prompt, with its marks, then ends.

  What follows "say:", if that is in it; "<seed>" stands for the seed.
  """
  prompt = prefix[: len(prefix) - index]
  text = tokenizer().decode(prompt, skip_special=False)
  text = text.removesuffix("<|im_start|>assistant\n").removesuffix("\n")
  text = text.removesuffix("<|im_end|>")
  _, marked, wanted = text.rpartition("say:")
  text = wanted if marked else text.rpartition("<|im_start|>user\n")[2]
  text = text.replace("<seed>", str(seed)).replace("<version>", str(version))
  reply = [*tokenizer().encode(text, allow_special=True), 257]
  return reply[index]


class EchoEngine(FakeEngine):
  vocab_size = 260

  def __init__(self, **changes):
    super().__init__(
      **{
        "slots": 4,
        "max_length": 2048,
        "prefill_chunk": 512,
        "burst": 3,
        "sample": echo,
        **changes,
      }
    )


@contextlib.contextmanager
def serving(
  engine=None, *, subscriber=None, scheduler=None, version=0, token="", **config
):
  """A server in a thread; gives it, with `url` and `service`."""
  engine = engine or EchoEngine()
  changes = {"port": 0, "grpc_port": -1, "drain_seconds": 0.5, **config}
  service = Service(
    lambda: Scheduler(
      engine,
      Params(version),
      version,
      config=SchedulerConfig(**(scheduler or {})),
      detokenize=tokenizer().decode,
    ),
    engine,
    tokenizer(),
    ServingConfig(**changes),
  )
  server = Server(
    service,
    model="tiny",
    chat_format=format_of(tokenizer(), "qwen"),
    subscriber=subscriber,
  )
  stop, bound = threading.Event(), threading.Event()
  failures = []

  def run():
    try:
      asyncio.run(server.run(stop.is_set, bound.set))
    except BaseException as error:
      failures.append(error)
    finally:
      bound.set()

  thread = threading.Thread(target=run)
  thread.start()
  assert bound.wait(PATIENCE)
  server.service = service
  server.url = f"http://127.0.0.1:{server.http_port}"
  try:
    wait_until(lambda: service.load().state != "starting")
    yield server
  finally:
    stop.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
  assert not failures, failures
  assert not engine.violations


def wait_until(true):
  limit = time.monotonic() + PATIENCE
  while not true():
    assert time.monotonic() < limit, "waited for too long"
    time.sleep(0.005)


def idle(service):
  """Nothing runs, waits or belongs to anybody."""
  load = service.load()
  return not (load.running or load.waiting or load.slots_in_use)


def post(server, path, body=None, **more):
  return httpx.post(
    server.url + path,
    json={} if body is None else body,
    timeout=PATIENCE,
    **more,
  )
