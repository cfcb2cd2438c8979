"""A tiny problem whose environments and rewards do as they are told."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time

from arl_jax.actors.worker_messages import MOST_BYTES
from arl_jax.chat import tokenizer as tok
from arl_jax.chat.renderer import Renderer, usage_symbols
from arl_jax.types import Block, Observation, Reward, Task

WORDS = "pid child sleep hang die raise print nan huge fox dog 0123456789"


class Environment:
  """Tool "run": its argument says what to do."""

  tool_names = ("run", "look")

  def __init__(self, seed: int):
    self._seed = seed
    self._done: list[str] = []

  async def start(self, task: Task) -> str:
    if task.truth.get("start") == "raise":
      raise ConnectionError("no sandbox")
    return task.prompt

  async def execute(self, calls, token_budget):
    return [await self._run(c.argument, token_budget) for c in calls]

  async def _run(self, what: str, budget: int) -> Observation:
    self._done.append(what)
    text, data = what, {"budget": budget, "seed": self._seed}
    if what == "pid":
      text = str(os.getpid())
    elif what == "child":
      # Not reaped by anybody: what tools start must end with the worker.
      command = [sys.executable, "-c", "import time; time.sleep(600)"]
      text = str(subprocess.Popen(command).pid)
    elif what == "sleep":
      await asyncio.sleep(600)
    elif what == "hang":
      time.sleep(600)
    elif what == "die":
      os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
      raise ConnectionError("sandbox died")
    elif what == "print":
      print("{}", flush=True)
    elif what == "nan":
      data["x"] = math.nan
    elif what == "huge":
      text = "x" * MOST_BYTES
    return Observation(
      blocks=(Block(text=text, key="k"), Block(text="dog")),
      remove=("old",),
      error="bad" if what == "bad" else None,
      data=data,
    )

  async def finish(self, message: str) -> str | None:
    return None if "fox" in message else "no fox"

  async def outcome(self):
    return {"done": list(self._done)}


class Problem:
  """Twelve tasks; a task's truth says what its reward does."""

  def __init__(self, config):
    if config.corpus.path == "broken":
      raise ValueError("this problem can't be made")
    tokenizer = tok.Tokenizer.train(
      [WORDS], vocab_size=70, symbols=["run", "look", *usage_symbols(320)]
    )
    self.renderer = Renderer(tokenizer)
    self.train = tuple(
      Task(task_id=f"t{i}", prompt="fox dog", truth={"reward": float(i)})
      for i in range(12)
    )
    self.heldout = ()
    self._name = config.corpus.path

  def environment(self, task, seed):
    return Environment(seed)

  def reward(self, task, episode):
    wanted = task.truth.get("reward", 0.0)
    if wanted == "hang":
      time.sleep(600)
    if wanted == "raise":
      raise KeyError("judge")
    if wanted == "nan":
      wanted = math.nan
    return Reward(total=wanted, parts={"turns": float(episode.turns)})

  def digests(self):
    return {"corpus": self._name}
