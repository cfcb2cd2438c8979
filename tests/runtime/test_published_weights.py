"""A run publishes its weights from the first version on."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from arl_jax.model import transformer
from arl_jax.observability.progress import Progress
from arl_jax.observability.run_directory import RunDirectory
from arl_jax.runtime.config import Config
from arl_jax.runtime.trainer import Trainer
from arl_jax.sharding import shapes
from arl_jax.types import Task
from arl_jax.weights import Subscriber
from arl_jax.weights.storage import Storage

PROBLEM = types.SimpleNamespace(
  renderer=types.SimpleNamespace(
    tokenizer=types.SimpleNamespace(vocab_size=64)
  ),
  train=(Task(task_id="1", prompt="?", truth={}),),
  digests=dict,
)


@pytest.fixture
def config(tmp_path):
  found = Config(smoke=True)
  found.model.layers = 1
  found.weights.folder = str(tmp_path / "weights")
  found.weights.dtype = "float32"
  found.warm_start.steps = 0
  found.warm_start.opening_steps = 0
  found.resolve()
  return found


def opened(config, tmp_path, mode):
  resolved = dataclasses.asdict(config)
  return RunDirectory.open(
    tmp_path / "run", config=resolved, data={}, mode=mode
  )


def held_by(trainer):
  return [np.array(x) for x in jax.tree.leaves(trainer.learner.state.params)]


def assert_fetched(subscriber, trainer, number, params):
  fetched = subscriber.fetch()
  assert fetched.version.number == number
  assert fetched.version.lineage == trainer._store.lineage[-1]
  for found, right in zip(jax.tree.leaves(fetched.params), params, strict=True):
    assert found.tobytes() == right.tobytes()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_version_0_comes_first_and_a_resumed_run_begins_with_a_base(
  config, tmp_path
):
  folder = tmp_path / "weights"
  with (
    Progress() as progress,
    opened(config, tmp_path, "new") as run,
  ):
    trainer = Trainer(config, PROBLEM, run, progress)
    like = shapes(transformer.specs(trainer.model))
    subscriber = Subscriber(folder, like)
    fresh = held_by(trainer)
    assert_fetched(subscriber, trainer, 0, fresh)
    trainer._publish()
    trainer.commit()
    trainer._publish()
    trainer.close()
    assert_fetched(subscriber, trainer, 2, fresh)
  with (
    Progress() as progress,
    opened(config, tmp_path, "resume") as run,
  ):
    trainer = Trainer(config, PROBLEM, run, progress)
    assert len(trainer._store.lineage) == 2
    # Version 2 is given up: the commit was of version 1.
    assert_fetched(subscriber, trainer, 1, fresh)
    (place,) = Storage(folder).places()
    assert Storage(folder).manifest(place).base is None
    trainer.close()
  subscriber.close()


def test_another_run_at_the_same_place_is_refused(
  config, tmp_path, monkeypatch
):
  monkeypatch.setattr("arl_jax.weights.owner._BEATS", 100)
  with Progress() as progress, opened(config, tmp_path / "one", "new") as run:
    trainer = Trainer(config, PROBLEM, run, progress)
    with (
      opened(config, tmp_path / "two", "new") as other,
      pytest.raises(OSError, match="publishes to"),
    ):
      Trainer(config, PROBLEM, other, progress)
    trainer.close()
