"""Failures of infrastructure, interruption, order."""

import asyncio
import dataclasses

import numpy as np
import pytest

from arl_jax.actors.jobs import Interrupted, Job, run_jobs
from arl_jax.agents.harness import AgentConfig
from arl_jax.chat import tokenizer as tok
from arl_jax.chat.renderer import Renderer
from arl_jax.types import Observation, Reward, Sample, StopReason, Task

RENDERER = Renderer(
  tok.Tokenizer.train(["the lazy dog and the quick fox"], vocab_size=40)
)
AGENT = AgentConfig()


class Env:
  tool_names = ("look",)

  def __init__(self, fails: bool, outcome=None):
    self._fails, self._outcome = fails, outcome or {}

  async def start(self, task):
    if self._fails:
      raise ConnectionError("sandbox died")
    await asyncio.sleep(0)
    return task.prompt

  async def execute(self, calls, token_budget):
    return [Observation() for _ in calls]

  async def finish(self, message):
    return None

  async def outcome(self):
    return self._outcome


class Problem:
  """Fails as often as `failures` says, by task."""

  def __init__(
    self, failures=(), reward_fails=False, outcome=None, reward=None
  ):
    self.outcome, self.made_up = outcome, reward
    self.renderer = RENDERER
    self.failures = dict(failures)
    self.reward_fails = reward_fails
    self.made = 0
    self.running = self.most = 0

  def environment(self, task, seed):
    self.made += 1
    left = self.failures.get(task.task_id, 0)
    self.failures[task.task_id] = left - 1
    return Env(left > 0, self.outcome)

  def reward(self, task, episode):
    if self.reward_fails:
      raise TimeoutError("judge")
    if self.made_up is not None:
      return self.made_up
    return Reward(total=float(task.task_id))


class Client:
  def __init__(self):
    self.open = self.most = 0
    self.calls = 0
    self.closed = []

  async def sample(self, session, ids, **_):
    self.open += 1
    self.calls += 1
    self.most = max(self.most, self.open)
    await asyncio.sleep(0.001)
    self.open -= 1
    ids = np.array([*RENDERER.text("fox"), RENDERER.end], np.int32)
    n = len(ids)
    return Sample(
      ids=ids,
      logp=np.zeros(n, np.float32),
      versions=np.zeros(n, np.int32),
      stopped=True,
    )

  async def close(self, session):
    self.closed.append(session)


def jobs(n: int):
  return [
    Job(task=Task(task_id=str(i), prompt="dog", truth={}), rollout_index=i,
        seed=i)
    for i in range(n)
  ]  # fmt: skip


def run(n: int, problem=None, client=None, **options):
  client = client or Client()
  return asyncio.run(
    run_jobs(
      jobs(n),
      problem or Problem(),
      lambda job: client,
      AGENT,
      **{"concurrency": 4, "training": True, **options},
    )
  )


def test_results_are_scored_and_in_order():
  episodes = run(9)
  assert [e.task_id for e in episodes] == [str(i) for i in range(9)]
  assert [e.reward.total for e in episodes] == list(range(9))
  assert [e.rollout_index for e in episodes] == list(range(9))


def test_no_job_is_no_result():
  assert run(0) == []


def test_a_failure_is_tried_again_in_a_fresh_environment():
  problem = Problem({"1": 1})
  episodes = run(3, problem)
  assert all(e is not None for e in episodes)
  assert episodes[1].stop_reason is StopReason.ANSWERED
  assert problem.made == 4


def test_what_fails_again_is_left_out_and_never_scored():
  episodes = run(3, Problem({"1": 99}))
  assert episodes[1] is None
  assert [e.reward.total for e in episodes if e] == [0, 2]


def test_a_reward_that_fails_is_no_zero():
  assert run(2, Problem(reward_fails=True)) == [None, None]


@pytest.mark.parametrize(
  "reward",
  [
    1.0,
    Reward(total=float("nan")),
    Reward(total=10**400),
    Reward(total=0.0, parts={"a": float("inf")}),
    Reward(total=0.0, parts={"a": None}),
  ],
)
def test_a_reward_that_is_no_number_is_no_reward(reward):
  assert run(2, Problem(reward=reward)) == [None, None]


@pytest.mark.parametrize("outcome", [{"x": {1}}, {"x": float("nan")}])
def test_an_outcome_that_could_not_be_written_is_infrastructure(outcome):
  assert run(2, Problem(outcome=outcome)) == [None, None]


def test_a_client_that_cannot_be_made_is_infrastructure_too():
  def client_of(job):
    raise ConnectionError("no server")

  episodes = asyncio.run(
    run_jobs(jobs(2), Problem(), client_of, AGENT, concurrency=1, training=True)
  )
  assert episodes == [None, None]


def test_no_more_than_the_slots_are_in_flight():
  client = Client()
  run(12, client=client, concurrency=3)
  assert client.most <= 3
  assert len(client.closed) == 12


def test_progress_counts_what_is_done():
  seen = []
  run(5, Problem({"2": 99}), on_done=seen.append)
  assert seen == [1, 2, 3, 4]


class TestStopping:
  def test_at_once(self):
    client = Client()
    with pytest.raises(Interrupted):
      run(5, client=client, should_stop=lambda: True)
    assert client.calls == 0

  def test_in_the_middle_everything_is_given_back(self):
    client = Client()
    done = []
    with pytest.raises(Interrupted):
      run(
        20,
        client=client,
        concurrency=2,
        on_done=done.append,
        should_stop=lambda: len(done) >= 4,
      )
    assert 4 <= client.calls < 20
    assert len(client.closed) == client.calls

  def test_an_error_of_the_caller_is_not_swallowed(self):
    def broken(done):
      raise ValueError("display")

    with pytest.raises(BaseExceptionGroup) as error:
      run(3, on_done=broken)
    assert error.value.subgroup(ValueError)


def test_the_seed_of_a_job_reaches_the_episode():
  assert [e.seed for e in run(3)] == [0, 1, 2]
  assert dataclasses.replace(jobs(1)[0], seed=3).seed == 3
