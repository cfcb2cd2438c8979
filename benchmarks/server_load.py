"""256 concurrent HTTP requests against the bare engine loop.

  python -m benchmarks.server_load

Requests of mixed lengths are served twice by one engine with the same weights:
by a scheduler that is driven in a plain loop, and through HTTP, as streams, to
clients in a process of their own (which shares this machine's cores). Both give
the same numbers of tokens. Times to the first token and between tokens are
those that clients see, waiting for a slot included. The model is SmolLM2-135M's
shape in float32; weights are fresh, since speed doesn't depend on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jax
import numpy as np
from absl import app, flags

from arl_jax import model
from arl_jax.model import ModelConfig
from arl_jax.rollout.engine import Engine, EngineConfig
from arl_jax.rollout.request import Sampling
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.runtime.host_memory import keep_freed_memory
from arl_jax.serving.config import ServingConfig
from arl_jax.serving.server import Server
from arl_jax.serving.service import Service
from configs import smollm2_135m

_SMOKE = flags.DEFINE_bool("smoke", False, "A tiny model and few requests.")
_REPEATS = flags.DEFINE_integer("repeats", 2, "Of both ways, in turns.")
_CLIENT = flags.DEFINE_string("client", "", "Address: be the clients of it.")
_VOCAB = flags.DEFINE_integer("vocab", 0, "Of the prompts of --client.")

_AIM = 0.9
_MAX_LENGTH = 128
_TINY = ModelConfig(
  vocab_size=512, width=64, heads=4, kv_heads=2, head_dim=16, expert_width=32
)


class _Letters:
  """Text is no part of this: a token is a letter."""

  eos_ids: tuple[int, ...] = ()

  def encode(self, text: str) -> list[int]:
    return [ord(c) for c in text]

  def decode(self, ids: list[int]) -> str:
    return "".join(chr(32 + i % 64) for i in ids)

  def piece(self, token: int) -> str:
    return self.decode([token])


def _requests(vocab_size: int, smoke: bool) -> list[tuple[list[int], int]]:
  """Prompts of 8 to 64 tokens, of which each wants 8 to 48 more."""
  draw = np.random.default_rng(0)
  count = 16 if smoke else 256
  return [
    (
      draw.integers(0, vocab_size, draw.integers(8, 65)).tolist(),
      int(draw.integers(8, 49)),
    )
    for _ in range(count)
  ]


def _bare(scheduler: Scheduler, requests: list[tuple[list[int], int]]) -> float:
  """Seconds of the loop alone."""
  began = time.perf_counter()
  for i, (ids, tokens) in enumerate(requests):
    scheduler.submit(f"{i}", ids, Sampling(max_tokens=tokens, seed=i))
  while scheduler.busy:
    for request in scheduler.step():
      assert request.result is not None
      scheduler.close(request.session)
  return time.perf_counter() - began


@contextlib.contextmanager
def _served(engine: Engine, placed: Any) -> Iterator[str]:
  service = Service(
    lambda: Scheduler(engine, placed, 0),
    engine,
    _Letters(),
    ServingConfig(port=0, grpc_port=-1, drain_seconds=1.0),
  )
  server = Server(service, model="smollm2", chat_format=None)
  stop, bound = threading.Event(), threading.Event()
  thread = threading.Thread(
    target=lambda: asyncio.run(server.run(stop.is_set, bound.set))
  )
  thread.start()
  bound.wait()
  while service.load().state == "starting":
    time.sleep(0.01)
  try:
    yield f"http://127.0.0.1:{server.http_port}"
  finally:
    stop.set()
    thread.join()


def _http(engine: Engine, placed: Any) -> dict[str, Any]:
  """What clients in another process see."""
  with _served(engine, placed) as url:
    command = [sys.executable, "-m", "benchmarks.server_load"]
    flags_ = [f"--client={url}", f"--vocab={engine.vocab_size}"]
    smoke = [f"--smoke={_SMOKE.value}"]
    done = subprocess.run(
      [*command, *flags_, *smoke], capture_output=True, text=True, check=False
    )
  if done.returncode:
    raise RuntimeError(f"clients failed: {done.stderr[-2000:]}")
  return json.loads(done.stdout)


async def _clients(url: str, requests: list[tuple[list[int], int]]) -> Any:
  """All requests at once."""
  limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
  first: list[float] = []
  between: list[float] = []
  counts: list[int] = []

  async def ask(http: httpx.AsyncClient, index: int) -> None:
    ids, tokens = requests[index]
    body = {"prompt": ids, "max_tokens": tokens, "seed": index, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    sent = last = time.perf_counter()
    seen = False
    async with http.stream("POST", "/v1/completions", json=body) as response:
      async for line in response.aiter_lines():
        if not line.startswith("data: {"):
          continue
        part = json.loads(line[6:])
        now = time.perf_counter()
        if not part["choices"]:
          counts.append(part["usage"]["completion_tokens"])
        elif seen:
          between.append(now - last)
        else:
          first.append(now - sent)
          seen = True
        last = now

  async with httpx.AsyncClient(
    base_url=url, timeout=None, limits=limits
  ) as http:
    began = time.perf_counter()
    await asyncio.gather(*(ask(http, i) for i in range(len(requests))))
    seconds = time.perf_counter() - began
  return {
    "seconds": seconds,
    "tokens": sum(counts),
    "first": first,
    "between": between,
  }


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
  return {
    f"{name}_p{p}_s": round(float(np.percentile(values, p)), 4)
    for p in (50, 99)
  }


def main(argv: list[str]) -> None:
  del argv
  if _CLIENT.value:
    requests = _requests(_VOCAB.value, _SMOKE.value)
    print(json.dumps(asyncio.run(_clients(_CLIENT.value, requests))))
    return
  keep_freed_memory()
  config = _TINY if _SMOKE.value else smollm2_135m.model()
  engine = Engine(
    config,
    EngineConfig(
      max_concurrent_decodes=4 if _SMOKE.value else 64,
      prefill_rows=8,
      prefill_chunk=32,
    ),
    max_length=_MAX_LENGTH,
  )
  placed = engine.place(model.init(config, jax.random.key(0)))
  engine.warm_up(placed)
  requests = _requests(config.vocab_size, _SMOKE.value)
  tokens = sum(n for _, n in requests)
  bare: list[float] = []
  served: list[dict[str, Any]] = []
  for _ in range(_REPEATS.value):
    bare.append(_bare(Scheduler(engine, placed, 0), requests))
    served.append(_http(engine, placed))
    assert served[-1]["tokens"] == tokens
  seconds = statistics.median(s["seconds"] for s in served)
  limit = statistics.median(bare)
  first = [x for s in served for x in s["first"]]
  between = [x for s in served for x in s["between"]]
  ratio = limit / seconds
  report = {
    "name": "server_load",
    "figures": {
      "requests": len(requests),
      "tokens_per_s": round(tokens / seconds, 1),
      "over_bare_loop": round(ratio, 3),
      **_percentiles("first_token", first),
      **_percentiles("between_parts", between),
    },
    "limits": {
      "bare_loop_tokens_per_s": round(tokens / limit, 1),
      "slots": engine.slots,
      "cpus": os.cpu_count(),
      "seconds_bare": [round(x, 2) for x in bare],
      "seconds_http": [round(s["seconds"], 2) for s in served],
    },
    "aims": {"over_bare_loop": [">=", _AIM]},
    "met": ratio >= _AIM,
  }
  print(json.dumps(report))


if __name__ == "__main__":
  app.run(main)
