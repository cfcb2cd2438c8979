"""What is due gets scored once, with every task, whatever dies meanwhile."""

import dataclasses
import functools
import http.server
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.evaluation import evaluator as evaluator_lib
from arl_jax.evaluation.best import load_best, policy_shapes
from arl_jax.evaluation.evaluator import Evaluator
from arl_jax.evaluation.schedule import Schedule
from arl_jax.evaluation.score_folder import ScoreFolder
from arl_jax.evaluation.scores import ScoreLog, path_of, read, valid
from arl_jax.model import transformer
from arl_jax.problems.problem import make_problem
from arl_jax.records import from_json
from arl_jax.rollout.engine import Engine
from arl_jax.runtime import local_rollouts
from arl_jax.runtime.config import Config
from arl_jax.runtime.local_rollouts import LocalRollouts, heldout_jobs
from arl_jax.weights import Publisher, Subscriber
from tests import made_up_corpus

ROOT = pathlib.Path(__file__).parents[2]
TASKS = 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  path = tmp_path_factory.mktemp("corpus")
  made_up_corpus.write(path)
  return path


def configured(corpus, run_dir):
  c = Config(run_dir=str(run_dir), keep_checkpoints=1)
  c.corpus.path = str(corpus)
  c.corpus.vocab_size, c.corpus.chunk_tokens = 800, 24
  c.tasks.train, c.tasks.heldout, c.tasks.clue_words = 24, TASKS, 2
  c.search.handles = 16
  c.agent.max_turns = 3
  m = c.model
  m.layers, m.width, m.head_dim, m.expert_width = 1, 32, 8, 32
  m.mtp_heads = 0
  c.engine.max_concurrent_decodes, c.engine.prefill_rows = 8, 4
  c.weights.folder = str(run_dir / "weights")
  c.cluster.evaluate_every = 2
  c.resolve()
  return c


@pytest.fixture(scope="module")
def problem(corpus, tmp_path_factory):
  return make_problem(configured(corpus, tmp_path_factory.mktemp("unused")))


@pytest.fixture
def config(corpus, tmp_path):
  run_dir = tmp_path / "run"
  run_dir.mkdir()
  return configured(corpus, run_dir)


@pytest.fixture(scope="module")
def model(corpus, problem, tmp_path_factory):
  config = configured(corpus, tmp_path_factory.mktemp("unused"))
  size = problem.renderer.tokenizer.vocab_size
  return dataclasses.replace(config.model, vocab_size=size)


def params_of(model, number):
  return transformer.init(model, jax.random.key(number))


class Beats:
  def __init__(self):
    self.counters = Counter()

  def progress(self):
    pass

  def count(self, name, amount=1.0):
    self.counters[name] += amount


def follow(config, problem, until, seconds=60.0):
  """Runs an evaluator until `until` holds of what it left."""
  limit, beats = time.monotonic() + seconds, Beats()

  def should_stop():
    assert time.monotonic() < limit, "it took too long"
    path = path_of(config.run_dir)
    return until(read(path) if path.exists() else [])

  evaluator = Evaluator(config, problem, beats, should_stop)
  try:
    evaluator.follow()
  finally:
    evaluator.close()
  return beats


def asked_often():
  """A condition that holds from the 30th time on."""
  times = itertools.count(1)
  return lambda _: next(times) >= 30


def lines(config):
  return [
    (e.version, e.lineage, e.abandoned, bool(e.skipped))
    for e in read(path_of(config.run_dir))
  ]


def trajectories(config, version):
  path = path_of(config.run_dir).with_name(f"{version}.jsonl")
  groups = [from_json(json.loads(x)) for x in path.read_text().splitlines()]
  return [g.episodes[0] for g in groups]


def sampled(episodes):
  return [s.ids.tolist() for e in episodes for s in e.segments]


@pytest.fixture(scope="module")
def engine(corpus, model, tmp_path_factory):
  config = configured(corpus, tmp_path_factory.mktemp("unused"))
  return Engine(model, config.engine, max_length=config.agent.token_budget + 1)


@pytest.fixture(autouse=True)
def impatient(monkeypatch, engine):
  # One engine compiles once; it keeps nothing from one scheduler to the next.
  monkeypatch.setattr(local_rollouts, "Engine", lambda *_, **__: engine)
  monkeypatch.setattr(evaluator_lib, "_POLL_SECONDS", 0.05)
  monkeypatch.setattr(evaluator_lib, "_WAIT_SECONDS", 0.05)


def test_each_second_version_from_the_seeds_of_every_other(
  config, problem, model
):
  publisher = Publisher(config.weights.folder, ["a"], dtype=None)
  publisher.publish(params_of(model, 0), 0)
  publisher.wait()
  beats = follow(config, problem, lambda found: len(found) == 1)
  assert beats.counters["evaluations"] == 1
  assert beats.counters["episodes"] == TASKS
  assert beats.counters["sampled_tokens"] > TASKS
  # It falls behind: 2 is passed over, and 1, 3 and 5 are never due.
  for number in range(1, 6):
    publisher.publish(params_of(model, number), number)
  publisher.wait()
  follow(config, problem, lambda found: len(found) == 2)
  assert lines(config) == [(0, "a", False, False), (4, "a", False, False)]
  for version in (0, 4):
    episodes = trajectories(config, version)
    # As the learner's process rolls them out with the same weights.
    rollouts = LocalRollouts(config, problem, model)
    right = rollouts.run(
      heldout_jobs(config, problem.heldout),
      params_of(model, version),
      version,
      training=False,
    )
    assert sampled(episodes) == sampled(right)
    for episode in episodes:
      for segment in episode.segments:
        assert set(segment.policy_version[segment.sampled]) == {version}
    entry = next(
      e for e in read(path_of(config.run_dir)) if e.version == version
    )
    mean = np.mean([e.reward.total for e in right])
    assert entry.reward == pytest.approx(mean, abs=1e-12)
    mean, low, high = entry.scores["sampled_tokens"]
    assert low <= mean <= high
    assert mean == np.mean([e.trained_tokens for e in right])
  # Nothing is done twice.
  beats = follow(config, problem, asked_often())
  assert beats.counters["evaluations"] == 0
  assert len(lines(config)) == 2
  publisher.close()


def test_what_a_run_takes_back_is_given_up_and_scored_again(
  config, problem, model
):
  first = Publisher(config.weights.folder, ["a"], dtype=None)
  for number in (0, 2, 4):
    first.publish(params_of(model, number), number)
    first.wait()
    follow(
      config,
      problem,
      lambda found, n=number: found[-1:] and found[-1].version == n,
    )
  # Goes on from the commit of version 3, while the first one still lives.
  second = Publisher(config.weights.folder, ["a", "b"], dtype=None)
  second.publish(params_of(model, 33), 3)
  second.wait()
  follow(config, problem, lambda found: found[-1].abandoned)
  assert lines(config) == [
    (0, "a", False, False),
    (2, "a", False, False),
    (4, "a", True, False),
  ]
  best = path_of(config.run_dir).with_name("best")
  assert not (best / "4").exists()
  second.publish(params_of(model, 44), 4)
  second.wait()
  follow(config, problem, lambda found: len(found) == 4)
  assert lines(config)[-1] == (4, "b", False, False)
  found = valid(read(path_of(config.run_dir)))
  assert [(e.version, e.lineage) for e in found] == [
    *((0, "a"), (2, "a"), (4, "b"))
  ]
  # The best commit has the parameters of the best scores that stand.
  commit = load_best(config.run_dir, model)
  top = max(found, key=lambda e: (e.reward, e.version))
  assert commit.number == commit.record["version"] == top.version
  assert commit.record["lineage"] == top.lineage
  seed = 44 if top.version == 4 else top.version
  for got, right in zip(
    jax.tree.leaves(commit.state),
    jax.tree.leaves(params_of(model, seed)),
    strict=True,
  ):
    np.testing.assert_array_equal(got, right)
  second.close()
  first.close()


class Faulty:
  """A problem whose environments of one task fail a number of times."""

  def __init__(self, problem, failures):
    self._problem, self._failures = problem, failures
    self.failed = 0

  def __getattr__(self, name):
    return getattr(self._problem, name)

  def environment(self, task, seed):
    if task is self.heldout[1] and self.failed < self._failures:
      self.failed += 1
      raise ConnectionError("the index went away")
    return self._problem.environment(task, seed)


def test_a_failure_that_passes_costs_no_task(config, problem, model):
  publisher = Publisher(config.weights.folder, ["a"], dtype=None)
  publisher.publish(params_of(model, 0), 0)
  publisher.close()
  faulty = Faulty(problem, failures=3)  # Two tries a round: the 4th succeeds.
  follow(config, faulty, lambda found: len(found) == 1)
  assert faulty.failed == 3
  assert lines(config) == [(0, "a", False, False)]
  assert len(trajectories(config, 0)) == TASKS


def test_a_failure_that_stays_skips_the_version(config, problem, model):
  publisher = Publisher(config.weights.folder, ["a"], dtype=None)
  publisher.publish(params_of(model, 0), 0)
  publisher.wait()
  faulty = Faulty(problem, failures=10**9)
  follow(config, faulty, lambda found: len(found) == 1)
  (entry,) = read(path_of(config.run_dir))
  assert entry.skipped == (
    f"1 of {TASKS} held-out episodes could not be rolled out; see the log"
  )
  assert not entry.scores
  assert not path_of(config.run_dir).with_name("0.jsonl").exists()
  # The next one is tried.
  publisher.publish(params_of(model, 2), 2)
  publisher.wait()
  follow(config, problem, lambda found: len(found) == 2)
  assert lines(config) == [(0, "a", False, True), (2, "a", False, False)]
  publisher.close()


def test_it_writes_nothing_before_the_run_that_the_queue_names(
  config, problem, model
):
  publisher = Publisher(config.weights.folder, ["old"], dtype=None)
  publisher.publish(params_of(model, 0), 0)
  publisher.close()
  with Queue("new") as queue:
    config.cluster.queue = queue.url
    follow(config, problem, asked_often())
    assert queue.asked > 3
    assert not path_of(config.run_dir).parent.exists()
    queue.lineage = "old"
    follow(config, problem, lambda found: len(found) == 1)


def test_no_run_directory_is_said(config, problem, model, tmp_path):
  publisher = Publisher(config.weights.folder, ["a"], dtype=None)
  publisher.publish(params_of(model, 0), 0)
  publisher.close()
  config.run_dir = str(tmp_path / "elsewhere")
  with pytest.raises(FileNotFoundError, match=r"run_dir .*elsewhere isn't"):
    follow(config, problem, lambda _: False)


def test_a_second_evaluator_waits_for_the_first(tmp_path):
  folder = tmp_path / "evaluation"

  def opened():
    return ScoreFolder(folder, quota_bytes=None, identity={}, patience=0.3)

  first = opened()
  with pytest.raises(TimeoutError, match=r"waited 0\.3 s for another evaluato"):
    opened()
  first.close()
  opened().close()


def test_due_is_the_newest_multiple_that_is_there(tmp_path):
  params = {"w": jnp.zeros(3)}
  schedule = Schedule(tmp_path / "w", 3)
  assert schedule.look() is None
  publisher = Publisher(tmp_path / "w", ["a"], dtype=None)
  (tmp_path / "evaluation").mkdir()
  log = ScoreLog(path_of(tmp_path))

  def due(last, **given):
    publisher.publish({"w": params["w"] + last}, last)
    publisher.wait()
    published = schedule.look()
    if log.lineage is None:
      log.switch(published.lineage, published.since)
    found = schedule.due(published, log, **given)
    return None if found is None else found.number

  assert due(1) is None
  assert due(3) == 3
  assert due(5) == 3
  version = schedule.due(schedule.look(), log)
  assert due(6, given_up={version}) == 6
  assert due(7) == 6
  log.add(*schedule.due(schedule.look(), log), {"reward": [0, 0, 0]}, 1.0)
  assert due(8) is None
  assert due(9) == 9
  publisher.close()


# Processes.


class Queue:
  """Takes beats, and says which lineage the run has."""

  def __init__(self, lineage):
    self.lineage, self.beats, self.asked = lineage, [], 0
    queue = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):
        queue.asked += 1
        self._answer({"state": "running", "lineage": queue.lineage})

      def do_POST(self):
        size = int(self.headers["Content-Length"])
        queue.beats.append(json.loads(self.rfile.read(size)))
        self._answer({})

      def _answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

      def log_message(self, *_):
        pass

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
    self._thread = threading.Thread(target=self._server.serve_forever)

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *_):
    self._server.shutdown()
    self._thread.join()
    self._server.server_close()


CHILD = """
import json, pathlib, sys
from arl_jax.evaluation import evaluator
from arl_jax.actors.config import from_json
from arl_jax.runtime.config import Config
config = from_json(Config, json.loads(pathlib.Path(sys.argv[1]).read_text()))
evaluator.run(config, 0, lambda: pathlib.Path(sys.argv[2]).exists())
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_killed_at_any_moment_it_scores_each_version_once(
  config, problem, model, tmp_path
):
  publisher = Publisher(config.weights.folder, ["a"], dtype=None)
  stop, path = tmp_path / "stop", path_of(config.run_dir)
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}

  def started():
    return subprocess.Popen(
      [sys.executable, "-c", CHILD, tmp_path / "config.json", stop],
      cwd=ROOT,
      env=environment,
      stderr=subprocess.PIPE,
      text=True,
    )

  def wait(process, condition):
    limit = time.monotonic() + 120
    while not condition():
      assert process.poll() is None, process.stderr.read()[-3000:]
      assert time.monotonic() < limit, "it took too long"
      time.sleep(0.01)

  def scored(count):
    return path.exists() and path.read_text().count('"scores"') == count

  def committing():
    return any(path.parent.glob("best/*.partial"))

  draw = random.Random(0)
  with Queue("a") as queue:
    config.cluster.queue = queue.url
    config.cluster.beat_seconds = 0.2
    resolved = json.dumps(dataclasses.asdict(config))
    (tmp_path / "config.json").write_text(resolved)
    for count, number in enumerate((0, 2), start=1):
      publisher.publish(params_of(model, number), number)
      publisher.wait()
      process = started()
      reached = functools.partial(scored, count)
      wait(process, lambda done=reached: committing() or done())
      # Between the first file of a version and a while after its line.
      time.sleep(draw.uniform(0, 0.2))
      process.send_signal(signal.SIGKILL)
      process.communicate()
      process = started()
      wait(process, reached)
      stop.touch()
      _, err = process.communicate(timeout=60)
      assert process.returncode == 0, err[-3000:]
      stop.unlink()
    publisher.close()
    beat = queue.beats[-1]
  assert (beat["role"], beat["index"]) == ("evaluator", 0)
  # None, if the line was written before the kill.
  assert beat["counters"].get("evaluations", 0) <= 1
  assert [e[:2] for e in lines(config)] == [(0, "a"), (2, "a")]
  for version in (0, 2):
    assert len(trajectories(config, version)) == TASKS
  assert not list(path.parent.rglob("*.tmp"))
  assert not list(path.parent.rglob("*.partial"))
  commit = load_best(config.run_dir, model)
  assert commit.number in (0, 2)


def test_the_subscriber_s_shapes_are_the_engine_s(config, model):
  publisher = Publisher(config.weights.folder, ["a"])
  publisher.publish(params_of(model, 1), 0)
  publisher.close()
  subscriber = Subscriber(config.weights.folder, policy_shapes(model))
  for leaf in jax.tree.leaves(subscriber.fetch().params):
    # Rounded by the publication, widened again.
    assert leaf.dtype == jnp.float32
    assert leaf.devices() == {jax.devices()[0]}
  subscriber.close()
