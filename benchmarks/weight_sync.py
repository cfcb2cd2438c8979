"""Size and time of weight sync after real RL steps on SmolLM2-135M.

  make models && python -m benchmarks.weight_sync

Groups are sampled with the weights that were published last; a step of CISPO
and AdamW in float32 follows, then the next version goes to a folder as bfloat16
and a subscriber takes it in. Reported are, for two learning rates, the
difference's share of all bytes and the words that stay as they are (the worst
of all steps); times against writing (to the disk) and reading the same bytes as
one plain file in the same folder; and the longest gap between two decode steps
while a version is fetched, verified, laid out and swapped in (the median over
all syncs, and the longest), against two of the steps without that and a copy of
the weights. On a CPU, decoding and all of that share its cores.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from arl_jax import checkpoints, losses, model, sharding
from arl_jax.learner import (
  Experience,
  Learner,
  LearnerConfig,
  OptimizerConfig,
)
from arl_jax.model import ModelConfig
from arl_jax.rollout.engine import Engine
from arl_jax.rollout.engine_config import EngineConfig
from arl_jax.rollout.request import Request, Sampling
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.runtime.host_memory import keep_freed_memory
from arl_jax.types import NO_VERSION, Role, Sample, Segment
from arl_jax.weights import Publisher, Subscriber
from configs import smollm2_135m

_SMOKE = flags.DEFINE_bool("smoke", False, "A tiny random model; no figures.")
_FOLDER = flags.DEFINE_string("folder", "", "Where to publish; a new folder.")

_MODEL = pathlib.Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")
_RATES = (1e-6, 1e-5)
_STEPS = 5
_REPEATS = 3
_GROUPS, _GROUP_SIZE, _PROMPT, _SAMPLED = 4, 4, 16, 48
_DECODING = 8


def _policy() -> tuple[ModelConfig, Any]:
  if _SMOKE.value:
    config = ModelConfig(
      vocab_size=256,
      width=32,
      layers=2,
      heads=2,
      head_dim=16,
      experts=0,
      dense_width=64,
    )
    return config, model.init(config, jax.random.key(0))
  if not _MODEL.exists():
    raise FileNotFoundError(f"{_MODEL} is missing; `make models` downloads it")
  config = smollm2_135m.model()
  return config, checkpoints.load(_MODEL, dtype=jnp.float32)[1]


class _Server:
  """An engine that takes in what a subscriber fetches."""

  def __init__(self, engine: Engine, folder: pathlib.Path):
    self.engine = engine
    # Published bfloat16, widened: CPUs are slow at it.
    like = sharding.shapes(model.specs(engine.model))
    self.subscriber = Subscriber(folder, like)
    fetched = self.subscriber.fetch()
    self.params = self._placed(fetched.params)
    number = fetched.version.number
    self.scheduler = Scheduler(engine, self.params, number)
    self._background = ThreadPoolExecutor(1)
    self.sync()  # Compiles, where nothing has yet.

  def _placed(self, params: Any) -> Any:
    placed = self.engine.place(jax.tree.map(jnp.asarray, params))
    return jax.block_until_ready(placed)

  def close(self) -> None:
    self._background.shutdown()
    self.subscriber.close()

  def experiences(self, seed: int) -> list[Experience]:
    """Groups of rollouts, rewarded by the share of even ids."""
    draw = np.random.default_rng(seed)
    requests = []
    for group in range(_GROUPS):
      prompt = draw.integers(0, self.engine.model.vocab_size, _PROMPT).tolist()
      for i in range(_GROUP_SIZE):
        how = Sampling(max_tokens=_SAMPLED, seed=1000 * seed + 10 * group + i)
        name = f"{seed}/{group}/{i}"
        requests.append((prompt, self.scheduler.submit(name, prompt, how)))
    while self.scheduler.busy:
      self.scheduler.step()
    samples = [(prompt, _sample(request)) for prompt, request in requests]
    rewards = np.array([np.mean(s.ids % 2 == 0) for _, s in samples])
    advantages = np.concatenate(
      [losses.group_advantages(g) for g in rewards.reshape(_GROUPS, -1)]
    )
    return [
      Experience(segments=(_segment(*one),), advantage=float(a))
      for one, a in zip(samples, advantages, strict=True)
    ]

  def sync(self) -> tuple[float, list[float], list[float]]:
    """Takes in the newest version while requests are decoded.

    Returns:
      Seconds from asking to serving; seconds between the ends of decode steps
      without that, and during it.
    """
    for i in range(_DECODING):
      self._submit(f"load {i}")
    gaps = self._gaps()
    for _ in range(4):  # Prefill.
      next(gaps)
    before = [next(gaps) for _ in range(12)]
    began = time.perf_counter()
    job = self._background.submit(self._fetch)
    during = []
    while not job.done():
      during.append(next(gaps))
    version, params = job.result()
    self.scheduler.update_weights(params, version, caches="keep")
    self.params = params
    during += [next(gaps) for _ in range(3)]
    seconds = time.perf_counter() - began
    for i in range(_DECODING):
      self.scheduler.close(f"load {i}")
    return seconds, before, during

  def _fetch(self) -> tuple[int, Any]:
    fetched = self.subscriber.fetch()
    return fetched.version.number, self._placed(fetched.params)

  def _submit(self, session: str) -> None:
    self.scheduler.submit(session, [1, 2, 3], Sampling(max_tokens=400))

  def _gaps(self) -> Iterator[float]:
    last = time.perf_counter()
    while True:
      for ended in self.scheduler.step():
        self._submit(ended.session)
      now = time.perf_counter()
      yield now - last
      last = now


def _sample(request: Request) -> Sample:
  if request.result is None:
    raise RuntimeError(f"a rollout failed: {request.error}")
  return request.result


def _segment(prompt: list[int], sample: Sample) -> Segment:
  new = len(sample.ids)
  sampled = np.arange(len(prompt) + new) >= len(prompt)
  known = np.zeros(len(prompt), np.float32)
  return Segment(
    ids=np.concatenate([prompt, sample.ids]).astype(np.int32),
    roles=np.where(sampled, Role.SAMPLED, Role.PROMPT).astype(np.uint8),
    sampled=sampled,
    behaviour_logp=np.concatenate([known, sample.logp]).astype(np.float32),
    policy_version=np.concatenate(
      [np.full(len(prompt), NO_VERSION), sample.versions]
    ).astype(np.int32),
  )


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
  began = time.perf_counter()
  result = run()
  return time.perf_counter() - began, result


def _words(params: Any) -> list[np.ndarray]:
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  return [np.asarray(x).view(np.uint16) for x in jax.tree.leaves(rounded)]


def _engine(config: ModelConfig, params: Any) -> Engine:
  rows = _GROUPS * _GROUP_SIZE
  engine = Engine(
    config,
    EngineConfig(
      max_concurrent_decodes=rows, prefill_rows=rows, decode_steps=1
    ),
    max_length=512,
  )
  if not _SMOKE.value:
    engine.warm_up(engine.place(params))
  return engine


def _after_steps(
  engine: Engine, params: Any, rate: float, folder: pathlib.Path
) -> dict[str, list[float]]:
  """Figures of each step at a learning rate."""
  learner = Learner(
    engine.model,
    params,
    LearnerConfig(row_length=64, microbatch_tokens=1024, microbatches=1),
    OptimizerConfig(learning_rate=rate, warmup_steps=0),
  )
  publisher = Publisher(folder, ["benchmark"])
  publisher.publish(learner.state.params, 0)
  publisher.wait()
  server = _Server(engine, folder)
  found: dict[str, list[float]] = {}
  size = sum(x.nbytes for x in _words(params))
  for step in range(_STEPS):
    old = _words(learner.state.params)
    assert learner.step(server.experiences(step))["skipped"] == 0
    same = [
      np.count_nonzero(a == b)
      for a, b in zip(old, _words(learner.state.params), strict=True)
    ]
    number = learner.publish()
    publish_s, _ = _timed(
      functools.partial(_publish, publisher, learner.state.params, number)
    )
    sync_s, before, during = server.sync()
    held = server.subscriber.held
    assert held == publisher.newest, (held, publisher.newest)
    for name, value in {
      "delta_share": _bytes(folder, number) / size,
      "unchanged_share": sum(same) / (size / 2),
      "publish": publish_s,
      "sync": sync_s,
      "decode_step": statistics.median(before),
      "pause": max(during),
    }.items():
      found.setdefault(name, []).append(value)
  server.close()
  publisher.close()
  return found


def _publish(publisher: Publisher, params: Any, number: int) -> None:
  publisher.publish(params, number)
  publisher.wait()


def _bytes(folder: pathlib.Path, number: int) -> int:
  """Of one version, its manifest included."""
  (found,) = (folder / "versions").glob(f"*-{number:010d}")
  return sum(path.stat().st_size for path in found.iterdir())


def _against_raw(params: Any, folder: pathlib.Path) -> dict[str, float]:
  """Seconds of bases and differences, and of plain files of as many bytes.

  Differences are those of a step of Adam at 1e-6, by its signs.
  """
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params
  )
  raw = np.concatenate([x.reshape(-1) for x in _words(params)])
  plain = folder / "plain"
  times: dict[str, list[float]] = {}

  def write() -> None:
    with plain.open("wb") as file:
      file.write(raw.data)
      file.flush()
      os.fsync(file.fileno())

  def read() -> np.ndarray:
    return np.fromfile(plain, np.uint16)

  kinds = {"base": Publisher(folder / "bases", ["base"], base_every=1)}
  kinds["delta"] = Publisher(folder / "deltas", ["delta"], base_every=1000)
  readers = {
    "base": Subscriber(folder / "bases", like),
    "delta": Subscriber(folder / "deltas", like),
  }
  move = jax.jit(lambda p: jax.tree.map(lambda x: x + 1e-6 * jnp.sign(x), p))
  for number in range(_REPEATS + 1):
    runs: dict[str, Callable[[], Any]] = {"raw_write": write, "raw_read": read}
    for kind, publisher in kinds.items():
      runs[f"publish_{kind}"] = functools.partial(
        _publish, publisher, params, number
      )
      runs[f"apply_{kind}"] = readers[kind].fetch
    for name, run in runs.items():
      seconds, _ = _timed(run)
      if number:
        times.setdefault(name, []).append(seconds)
    params = jax.block_until_ready(move(params))
  for kind, publisher in kinds.items():
    readers[kind].close()
    publisher.close()
  return {name: statistics.median(values) for name, values in times.items()}


def main(argv: list[str]) -> None:
  del argv
  keep_freed_memory()
  config, params = _policy()
  figures: dict[str, float] = {}
  with tempfile.TemporaryDirectory(dir=_FOLDER.value or None) as temporary:
    folder = pathlib.Path(temporary)
    times = _against_raw(params, folder)
    engine = _engine(config, params)
    found = {
      f"{rate:.0e}": _after_steps(engine, params, rate, folder / f"{rate:.0e}")
      for rate in _RATES
    }
  copies = [
    _timed(lambda: jax.block_until_ready(_copied(params)))[0] for _ in range(6)
  ]
  copy = statistics.median(copies[1:])
  for name, values in found.items():
    figures[f"delta_share_{name}"] = round(max(values["delta_share"]), 4)
    for step, share in enumerate(values["delta_share"], 1):
      figures[f"delta_share_{name}_step_{step}"] = round(share, 4)
    unchanged = min(values["unchanged_share"])
    figures[f"unchanged_words_{name}"] = round(unchanged, 4)
    figures[f"publish_seconds_{name}"] = _median(values["publish"])
    figures[f"sync_under_load_seconds_{name}"] = _median(values["sync"])
  for name in ("publish_base", "publish_delta", "apply_base", "apply_delta"):
    raw = times["raw_write" if "publish" in name else "raw_read"]
    figures[f"{name}_seconds"] = round(times[name], 3)
    figures[f"{name}_over_raw"] = round(times[name] / raw, 2)
  every = [x for values in found.values() for x in values["decode_step"]]
  pauses = [x for values in found.values() for x in values["pause"]]
  allowed = 2 * statistics.median(every) + copy
  figures["decode_step_seconds"] = _median(every)
  figures["pause_seconds"] = _median(pauses)
  figures["longest_pause_seconds"] = round(max(pauses), 4)
  figures["pause_over_allowed"] = round(statistics.median(pauses) / allowed, 3)
  limits = {"delta_share_1e-06": 0.05, "pause_over_allowed": 1.0}
  report = {
    "name": "weight_sync",
    "figures": figures,
    "limits": {
      "raw_write_seconds": round(times["raw_write"], 3),
      "raw_read_seconds": round(times["raw_read"], 3),
      "copy_seconds": round(copy, 4),
      "allowed_pause_seconds": round(allowed, 4),
    },
    "aims": {name: ["<=", limit] for name, limit in limits.items()},
    "met": all(figures[name] <= limit for name, limit in limits.items()),
  }
  print(json.dumps(report))


@jax.jit
def _copied(params: Any) -> Any:
  return jax.tree.map(jnp.copy, params)


def _median(values: list[float]) -> float:
  return round(statistics.median(values), 4)


if __name__ == "__main__":
  app.run(main)
