"""Episodes that wait at a time in one actor process.

  python -m benchmarks.actor_load

An actor rolls out groups whose replies a server, in another process, holds back
until all episodes wait for one: as they do while slow models or tools work.
Then memory is read, and for some seconds how much later than asked a timer
fires: what every episode's next step waits for at least. At last the server
replies, and all groups are delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
from absl import app, flags, logging

from arl_jax.actors.config import ActorConfig
from arl_jax.actors.environments import LocalEnvironments
from arl_jax.actors.replicas import Replicas
from arl_jax.actors.role import Actor, allow_files
from arl_jax.chat.renderer import Renderer, usage_symbols
from arl_jax.chat.tokenizer import Tokenizer
from arl_jax.cluster.config import ClusterConfig
from arl_jax.queueing.group_queue import Lease
from arl_jax.types import Group, Observation, Reward, Task

_SMOKE = flags.DEFINE_bool("smoke", False, "Few episodes, for a second.")
_EPISODES = flags.DEFINE_integer("episodes", 10_000, "That wait at a time.")
_SERVER = flags.DEFINE_string("server", "", "Be the server; replies with this.")

_AIM_BYTES = 2 << 30
_GROUP = 8
_LAG_STEP = 0.01


class _Server(asyncio.Protocol):
  """HTTP with as little as the clients need, to leave the cores to the actor.

  Attributes:
    waiting: connections whose request is held back.
  """

  waiting: list[asyncio.Transport]
  reply: bytes
  released = False

  def connection_made(self, transport: Any) -> None:
    self._transport, self._data = transport, b""

  def data_received(self, data: bytes) -> None:
    self._data += data
    head, found, body = self._data.partition(b"\r\n\r\n")
    if not found:
      return
    length = 0
    for line in head.split(b"\r\n")[1:]:
      name, _, value = line.partition(b":")
      if name.lower() == b"content-length":
        length = int(value)
    if len(body) < length:
      return
    self._data = b""
    if head.startswith(b"GET /waiting"):
      self._answer(b"%d" % len(self.waiting))
    elif head.startswith(b"GET /release"):
      _Server.released = True
      for transport in self.waiting:
        transport.write(self.reply)
      self.waiting.clear()
      self._answer(b"{}")
    elif not head.startswith(b"POST"):
      self._answer(b"{}")
    elif self.released:
      self._transport.write(self.reply)
    else:
      self.waiting.append(self._transport)

  def _answer(self, body: bytes) -> None:
    self._transport.write(_http(body))


def _http(body: bytes) -> bytes:
  return (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(body)
  ) + body


async def _serve(ids: list[int]) -> None:
  n = len(ids)
  tokens = {
    "ids": ids,
    **{name: [-1.0] * n for name in ("logprobs", "sampled_logprobs")},
    **{name: [0] * n for name in ("versions", "cache_versions")},
    "experts": None,
    "finish": "stop_id",
  }
  answer = json.dumps({"choices": [{"tokens": tokens}]}).encode()
  _Server.reply, _Server.waiting = _http(answer), []
  server = await asyncio.get_running_loop().create_server(
    _Server, "127.0.0.1", 0, backlog=4096
  )
  print(server.sockets[0].getsockname()[1], flush=True)
  # Until the actor's process is gone.
  await asyncio.to_thread(sys.stdin.read)


class _Environment:
  tool_names = ("look",)

  async def start(self, task: Task) -> str:
    return task.prompt

  async def execute(self, calls: Sequence[Any], token_budget: int):
    return [Observation() for _ in calls]

  async def finish(self, message: str) -> None:
    return None

  async def outcome(self) -> dict[str, Any]:
    return {}


class _Problem:
  """A prompt of about 200 tokens."""

  heldout: tuple[Task, ...] = ()

  def __init__(self, config: ActorConfig, groups: int):
    prompt = " ".join(["the quick brown fox and the lazy dog"] * 25)
    self.renderer = Renderer(
      Tokenizer.train(
        [prompt],
        vocab_size=60,
        symbols=usage_symbols(config.agent.token_budget),
      )
    )
    self.train = [
      Task(task_id=f"{i}", prompt=prompt, truth={}) for i in range(groups)
    ]

  def environment(self, task: Task, seed: int) -> _Environment:
    return _Environment()

  def reward(self, task: Task, episode: Any) -> Reward:
    return Reward(total=1.0)

  def digests(self) -> dict[str, str]:
    return {}


class _Queue:
  """Hands out each task once; counts what comes back."""

  def __init__(self, groups: int):
    self._left = [
      Lease(
        lineage="a",
        number=i,
        attempt=1,
        task_id=f"{i}",
        epoch=0,
        group_size=_GROUP,
        version=0,
      )
      for i in reversed(range(groups))
    ]
    self.episodes = 0
    self.all_done = asyncio.Event()
    self._groups = groups

  async def lease(self, most: int) -> list[Lease]:
    if not self._left:
      await asyncio.sleep(3)
    return [self._left.pop() for _ in range(min(most, len(self._left)))]

  async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
    return []

  async def give_back(self, leases: Sequence[Lease]) -> None:
    pass

  async def deliver(self, lease: Lease, group: Group | None) -> str:
    assert group is not None
    self.episodes += len(group.episodes)
    self._groups -= 1
    if not self._groups:
      self.all_done.set()
    return "ready"


class _Signs:
  def __init__(self) -> None:
    self.counts: defaultdict[str, float] = defaultdict(float)

  def progress(self) -> None:
    pass

  def count(self, name: str, amount: float = 1.0) -> None:
    self.counts[name] += amount


@contextlib.asynccontextmanager
async def _server(ids: list[int]) -> AsyncIterator[str]:
  command = [sys.executable, "-m", "benchmarks.actor_load"]
  process = subprocess.Popen(
    [*command, f"--server={json.dumps(ids)}"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdin is not None
  assert process.stdout is not None
  try:
    port = await asyncio.to_thread(process.stdout.readline)
    yield f"http://127.0.0.1:{int(port)}"
  finally:
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


async def _lags(seconds: float) -> list[float]:
  """How much later than asked a timer fires, in ms, again and again."""
  lags = []
  end = time.perf_counter() + seconds
  while (began := time.perf_counter()) < end:
    await asyncio.sleep(_LAG_STEP)
    lags.append(1000 * (time.perf_counter() - began - _LAG_STEP))
  return lags


def _resident() -> int:
  with open("/proc/self/statm", encoding="utf-8") as file:
    return int(file.read().split()[1]) * resource.getpagesize()


async def _measure(episodes: int, lag_seconds: float) -> dict[str, Any]:
  groups = episodes // _GROUP
  config = ActorConfig(cluster=ClusterConfig(episodes=episodes))
  problem, queue, signs = _Problem(config, groups), _Queue(groups), _Signs()
  before = _resident()
  answer = [*problem.renderer.text("fox"), problem.renderer.end]
  async with (
    _server(answer) as url,
    Replicas([url], requests=episodes) as replicas,
    httpx.AsyncClient(base_url=url, timeout=60.0) as http,
  ):
    environments = LocalEnvironments(problem, call_seconds=600.0)
    actor = Actor(config, problem, queue, replicas, environments, signs)
    began = time.perf_counter()
    running = asyncio.create_task(actor.run(queue.all_done.is_set))
    async with asyncio.timeout(300.0):
      while int((await http.get("/waiting")).text) < groups * _GROUP:
        assert not running.done(), running
        await asyncio.sleep(0.2)
    filled = time.perf_counter() - began
    lags = await _lags(lag_seconds)
    held = _resident()
    began = time.perf_counter()
    await http.get("/release")
    async with asyncio.timeout(300.0):
      await queue.all_done.wait()
    emptied = time.perf_counter() - began
    await running
  assert queue.episodes == groups * _GROUP, signs.counts
  return {
    "episodes": groups * _GROUP,
    "resident_mib": round(held / 2**20),
    "kib_per_episode": round((held - before) / 2**10 / episodes, 1),
    "lag_p50_ms": round(float(np.percentile(lags, 50)), 2),
    "lag_p99_ms": round(float(np.percentile(lags, 99)), 2),
    "fill_s": round(filled, 2),
    "empty_s": round(emptied, 2),
    "peak_mib": round(
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    ),
  }


def main(argv: list[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  episodes = 64 if _SMOKE.value else _EPISODES.value
  allow_files(episodes + 256)
  if _SERVER.value:
    asyncio.run(_serve(json.loads(_SERVER.value)))
    return
  figures = asyncio.run(_measure(episodes, 1.0 if _SMOKE.value else 10.0))
  wanted = episodes - episodes % _GROUP
  report = {
    "name": "actor_load",
    "figures": figures,
    "limits": {"cpus": os.cpu_count()},
    "aims": {
      "episodes": [">=", wanted],
      "peak_mib": ["<=", _AIM_BYTES >> 20],
    },
    "met": figures["episodes"] >= wanted
    and figures["peak_mib"] <= _AIM_BYTES >> 20,
  }
  print(json.dumps(report))


if __name__ == "__main__":
  app.run(main)
