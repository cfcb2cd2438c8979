"""Training from files: supervised, or on recorded groups; with checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from arl_jax import checkpoints, losses
from arl_jax.actors.jobs import Interrupted
from arl_jax.chat.pretrained import load_tokenizer
from arl_jax.checkpoints.store import CheckpointStore
from arl_jax.data.conversations import Refused, Segments
from arl_jax.data.mixture import Mixture
from arl_jax.data.sources import open_source
from arl_jax.learner import Experience, Learner, of_group
from arl_jax.model import add_mtp, transformer
from arl_jax.model.config import ModelConfig
from arl_jax.observability import metrics
from arl_jax.observability.metrics import MetricsWriter
from arl_jax.observability.progress import Progress
from arl_jax.observability.run_directory import RunDirectory
from arl_jax.runtime.offline_config import OfflineConfig
from arl_jax.types import Group


class OfflineTrainer:
  """Takes updates from a mixture of files.

  The order of examples follows from the seed and the position alone, so that a
  run resumed from a commit goes on with the same numbers.
  """

  def __init__(
    self,
    config: OfflineConfig,
    data: Data,
    learner: Learner,
    run: RunDirectory,
    progress: Progress,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    fall_back: bool = False,
  ):
    """Goes on from the newest commit of a resumed run.

    Args:
      config: resolved.
      data: of the configuration.
      learner: of the configuration, from `make_learner`.
      run: where everything is written.
      progress: where it is shown.
      should_stop: asked between updates.
      fall_back: an earlier commit will do if the newest is damaged.

    Raises:
      ValueError: the commit can't be used; says why.
      OSError: there is no room for a commit.
    """
    self.config, self._data, self._run = config, data, run
    self._progress, self._should_stop = progress, should_stop
    self.learner, self._done = learner, 0
    self._store = CheckpointStore(
      run.path / "checkpoints",
      keep=config.keep_checkpoints,
      quota_bytes=config.checkpoint_quota or None,
      identity={"model": dataclasses.asdict(learner.model)},
    )
    self._store.check_room(learner.contents)
    if run.resumed and self._store.newest is not None:
      commit = self._store.restore(learner.contents, fall_back=fall_back)
      for message in commit.skipped:
        logging.warning("passed over: %s", message)
      learner.take(commit.state)
      self._done = commit.record["step"]
      data.set_state(commit.record["data"])
    if self._done > config.steps:
      raise ValueError(
        f"steps is {config.steps}, but the run has done {self._done} already"
      )
    if self._done < config.steps:
      check_export(config)
    self._metrics = MetricsWriter(
      run.path, keep=lambda line: line["step"] <= self._done
    )

  def close(self) -> None:
    """Waits for the last checkpoint. Raises OSError if that failed."""
    self._metrics.close()
    self._store.close()

  def train(self) -> dict[str, float]:
    """Runs to the configured number of updates.

    Returns:
      Metrics of the last one, also if it was made before.

    Raises:
      Interrupted: stopped, after a commit.
      OSError: something could not be written.
    """
    config = self.config
    self._progress.phase("training", config.steps, start=self._done)
    values = self._last_metrics()
    for step in range(self._done + 1, config.steps + 1):
      if self._should_stop():
        self._commit()
        raise Interrupted
      values = self.learner.step(self._data.take(config.batch_tokens))
      self.learner.publish()
      self._done = step
      values |= self._data.counters
      self._metrics.write(step, "training", values)
      self._progress.update(step, loss=values.get("loss", 0.0))
      if step % config.checkpoint_every == 0 and step < config.steps:
        self._commit()
    self._commit()
    self._export()
    return values

  def _last_metrics(self) -> dict[str, float]:
    path = self._run.path / "metrics.jsonl"
    lines = metrics.read(path) if path.is_file() else []
    last = lines[-1] if lines else {}
    return {k: v for k, v in last.items() if k not in ("phase", "time", "step")}

  def _export(self) -> None:
    """Writes the model; it appears under its name when it is whole."""
    if not self.config.export or pathlib.Path(self.config.export).exists():
      return
    path = pathlib.Path(self.config.export)
    unfinished = path.with_name(path.name + ".partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    checkpoints.save_hf(
      unfinished,
      self.learner.model,
      self.learner.state.params,
      tokenizer_from=_tokenizer_folder(self.config),
    )
    unfinished.rename(path)

  def _commit(self) -> None:
    record = {
      "step": self._done,
      "version": self.learner.version,
      "data": self._data.get_state(),
    }
    self._store.save(self._done, self.learner.contents, record)


class Data:
  """What updates are made from, at a position."""

  def __init__(self, config: OfflineConfig):
    """Opens every source. Raises ValueError for one that can't be read."""
    self._config = config
    check = functools.partial(_check_group, config=config)
    sources = [open_source(source, check=check) for source in config.sources]
    weights = [source.weight for source in config.sources]
    self._mixture = Mixture(sources, weights, seed=config.seed)
    self._examples = sum(map(len, sources))
    self.digests = {f"sources[{i}]": s.digest for i, s in enumerate(sources)}
    self.vocab_size = 0
    self.counters: dict[str, float] = {"groups_without_signal": 0.0}
    self._experiences: Iterator[list[Experience]] = self._groups()
    if not config.on_groups:
      self.counters = {"examples_refused": 0.0}
      tokenizer = load_tokenizer(config.tokenizer or config.checkpoint)
      self.vocab_size = tokenizer.vocab_size
      self._experiences = self._conversations(tokenizer)

  def get_state(self) -> dict[str, Any]:
    return {"mixture": self._mixture.get_state(), "counters": self.counters}

  def set_state(self, state: dict[str, Any]) -> None:
    self._mixture.set_state(state["mixture"])
    self.counters = dict(state["counters"])

  def take(self, tokens: int) -> list[Experience]:
    """Experience of so many tokens, or up to one example more."""
    taken: list[Experience] = []
    total = 0
    while total < tokens:
      more = next(self._experiences)
      taken += more
      total += sum(len(s) for e in more for s in e.segments)
    return taken

  def _conversations(self, tokenizer: Any) -> Iterator[list[Experience]]:
    def refuse(where: str, refused: Refused) -> None:
      logging.warning("%s: %s", where, refused)
      self.counters["examples_refused"] += 1

    for segment in Segments(
      self._mixture,
      tokenizer,
      max_tokens=self._config.learner.row_length,
      on_refused=refuse,
    ):
      yield [Experience(segments=(segment,), advantage=1.0)]

  def _groups(self) -> Iterator[list[Experience]]:
    config, fruitless = self._config, 0
    for example in self._mixture:
      group: Group = example["group"]
      if losses.has_signal(group.rewards):
        fruitless = 0
        yield of_group(
          group, baseline=config.baseline, normalise_std=config.normalise_std
        )
        continue
      self.counters["groups_without_signal"] += 1
      fruitless += 1
      if fruitless > self._examples:
        raise ValueError(
          f"{fruitless} recorded groups in a row have equal rewards; there is"
          " nothing to learn from them"
        )


def check_export(config: OfflineConfig) -> None:
  """Raises ValueError if the trained model could not be written in the end."""
  if config.export and pathlib.Path(config.export).exists():
    raise ValueError(
      f"export {config.export} exists already; name a folder that doesn't"
    )


def _check_group(group: Group, config: OfflineConfig) -> None:
  """Raises ValueError for one that the learner would stop at."""
  longest, known = config.learner.row_length, config.model.vocab_size
  for segment in (s for e in group.episodes for s in e.segments):
    if segment.trained.any() and len(segment) > longest:
      raise ValueError(
        f"a segment of {len(segment)} tokens is longer than learner.row_length,"
        f" {longest}"
      )
    largest = int(segment.ids.max(initial=0))
    if largest >= known and not config.checkpoint:
      raise ValueError(f"id {largest} is not below model.vocab_size, {known}")


def _tokenizer_folder(config: OfflineConfig) -> str | None:
  """Where an export takes its tokenizer from; a .gguf file has no copy."""
  path = config.tokenizer or config.checkpoint
  return path if path and not path.endswith(".gguf") else None


def make_learner(config: OfflineConfig, data: Data) -> Learner:
  """The learner of a run, before its first update.

  Raises:
    ValueError: a checkpoint that can't be read, or a field that can't be.
  """
  model, params = _policy(config, data.vocab_size)
  return Learner(
    model,
    params,
    config.learner,
    config.optimizer,
    reference=params if config.learner.step.kl_weight else None,
    seed=config.seed,
  )


def _policy(
  config: OfflineConfig, vocab_size: int
) -> tuple[ModelConfig, dict[str, Any]]:
  if not config.checkpoint:
    model = config.model
    if not model.vocab_size:
      model = dataclasses.replace(model, vocab_size=vocab_size)
    params = transformer.init(model, jax.random.key(config.seed))
  else:
    model, params = checkpoints.load(
      config.checkpoint, dtype=jnp.float32, mesh=config.learner.mesh.make()
    )
    model = dataclasses.replace(model, remat=config.remat)
    if config.add_mtp and not model.mtp_heads:
      model, params = add_mtp(model, params, jax.random.key(config.seed))
  if model.vocab_size < max(vocab_size, 1):
    raise ValueError(
      f"the model has {model.vocab_size} ids, its tokenizer {vocab_size}"
    )
  return model, params
