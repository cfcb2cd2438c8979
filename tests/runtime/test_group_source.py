"""Where a step's groups come from, without a policy."""

import json
import types

import numpy as np
import pytest

from arl_jax.agents.harness import derive_seed
from arl_jax.records import to_json
from arl_jax.runtime.config import Config
from arl_jax.runtime.group_source import LocalGroups, Replay
from arl_jax.types import Episode, Reward, StopReason, Task


def tasks(n):
  return tuple(
    Task(
      task_id=f"t{i}",
      prompt="?",
      truth={},
      provenance={"source": "even" if i % 2 == 0 else "odd"},
    )
    for i in range(n)
  )


@pytest.fixture
def config():
  found = Config(seed=7)
  found.rl.tasks_per_step, found.rl.group_size = 3, 2
  return found


def scored(job):
  return Episode(
    task_id=job.task.task_id,
    rollout_index=job.rollout_index,
    segments=(),
    events=(),
    stop_reason=StopReason.ANSWERED,
    outcome={},
    turns=1,
    seed=job.seed,
    reward=Reward(total=float(job.rollout_index)),
  )


def local(config, count=8, rollout=None):
  problem = types.SimpleNamespace(train=tasks(count))
  return LocalGroups(
    config, problem, rollout or (lambda jobs: [scored(job) for job in jobs])
  )


def names(batch):
  return [group.group_id for group in batch.groups]


def test_each_task_once_an_epoch_by_seeds_of_the_version(config):
  config.rl.epochs = 1
  source = local(config)
  batches = [source.take(step, version=10 + step) for step in (1, 2, 3)]
  assert [len(b.groups) for b in batches] == [3, 3, 2]
  assert [b.ended for b in batches] == [False, False, True]
  ids = [n.partition("/")[2] for b in batches for n in names(b)]
  assert sorted(ids) == sorted(t.task_id for t in tasks(8))
  for version, batch in zip((11, 12, 13), batches, strict=True):
    for group in batch.groups:
      for i, episode in enumerate(group.episodes):
        right = derive_seed(7, group.task.task_id, i, version)
        assert episode.seed == right


def test_rewards_see_the_epoch(config):
  source = local(config, count=3)
  for epoch in range(3):
    for group in source.take(epoch + 1, 0).groups:
      assert group.task.provenance["epoch"] == epoch
      assert group.task.provenance["source"] in ("even", "odd")


def test_a_position_is_gone_on_from(config):
  whole, first, second = local(config), local(config), local(config)
  wanted = [names(whole.take(step, 0)) for step in range(1, 7)]
  found = [names(first.take(step, 0)) for step in range(1, 3)]
  batch = first.take(3, 0)
  found.append(names(batch))
  ledger = json.loads(json.dumps(batch.ledger))
  second.begin("lineage", 0, ledger, ())
  found += [names(second.take(step, 0)) for step in range(4, 7)]
  assert found == wanted


def test_what_failed_is_left_out_and_two_make_a_group(config):
  config.rl.group_size = 3

  def rollout(jobs):
    done = [scored(job) for job in jobs]
    # One of the first group, two of the second, none of the third.
    for gone in (1, 3, 5):
      done[gone] = None
    return done

  batch = local(config, rollout=rollout).take(1, 0)
  assert [len(g.episodes) for g in batch.groups] == [2, 3]
  assert [e.rollout_index for e in batch.groups[0].episodes] == [0, 2]


def test_sources_come_by_weight(config):
  config.rl.mixture = "even=2,odd=1"
  batch = local(config, 12).take(1, 0)
  kinds = [g.task.provenance["source"] for g in batch.groups]
  assert sorted(kinds) == ["even", "even", "odd"]
  config.rl.mixture = "none=1"
  with pytest.raises(ValueError, match="names source 'none'"):
    local(config, 12)


def test_what_is_learned_is_left_out(config):
  config.rl.skip_above = 0.4
  # Every group's mean is 0.5: after one epoch nothing is left.
  source = local(config, 6)
  assert [len(source.take(step, 0).groups) for step in (1, 2)] == [3, 3]
  last = source.take(3, 0)
  assert last.ended
  assert not last.groups


class TestRecorded:
  def write(self, folder, step, *groups):
    (folder / "groups").mkdir(exist_ok=True)
    text = "".join(json.dumps(to_json(g)) + "\n" for g in groups)
    (folder / "groups" / f"{step:06d}.jsonl").write_text(text)

  def test_steps_come_as_recorded_and_end(self, tmp_path, config):
    recorded = [local(config).take(1, 0), local(config, 5).take(1, 0)]
    for step, batch in enumerate(recorded, 1):
      self.write(tmp_path, step, *batch.groups)
    source = Replay(str(tmp_path))
    found = [source.take(step, 0) for step in (1, 2)]
    assert [names(b) for b in found] == [names(b) for b in recorded]
    assert [b.ended for b in found] == [False, True]
    for a, b in zip(found[0].groups, recorded[0].groups, strict=True):
      np.testing.assert_array_equal(a.rewards, b.rewards)
      assert [e.seed for e in a.episodes] == [e.seed for e in b.episodes]

  def test_no_groups_is_one_line(self, tmp_path):
    with pytest.raises(ValueError, match="holds no recorded groups"):
      Replay(str(tmp_path))

  def test_something_else_in_a_file(self, tmp_path):
    self.write(tmp_path, 1)
    path = tmp_path / "groups" / "000001.jsonl"
    path.write_text(json.dumps(to_json(tasks(1)[0])) + "\n")
    with pytest.raises(ValueError, match="no group"):
      Replay(str(tmp_path)).take(1, 0)


def test_tasks_beside_the_mixture_fill_no_step(config):
  config.rl.mixture, config.rl.tasks_per_step = "odd=1", 8
  found = [group.task.task_id for group in local(config).take(1, 0).groups]
  assert sorted(found) == ["t1", "t3", "t5", "t7"]


def test_an_early_end_says_why(config, caplog):
  config.rl.epochs, config.rl.skip_below = 2, 9.0
  source = local(config, 2, lambda jobs: [None for _ in jobs])
  batches = [source.take(step, 0) for step in (1, 2, 3)]
  assert [b.ended for b in batches] == [False, False, True]
  assert [b.drops["task_given_up"] for b in batches] == [2, 4, 4]
  assert "no tasks are left at step 3 of 100: rl.epochs is 2" in caplog.text
  assert "rl.skip_below" in caplog.text
  assert "rollouts of 4 failed" in caplog.text


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '"\\ud800"', "\xff"])
def test_a_damaged_recording_is_named(tmp_path, line):
  (tmp_path / "groups").mkdir()
  path = tmp_path / "groups" / "000001.jsonl"
  path.write_bytes(line.encode("latin-1") + b"\n")
  with pytest.raises(ValueError, match=r"000001\.jsonl holds what is no group"):
    Replay(str(tmp_path)).take(1, 0)
