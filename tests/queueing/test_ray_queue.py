"""What passes the queue in a group's place, and what is asked of Ray."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl_jax.cluster.config import ClusterConfig
from arl_jax.cluster.ray_config import RayConfig
from arl_jax.queueing import ray_queue
from arl_jax.queueing.client import ActorQueue, LearnerQueue
from arl_jax.queueing.group_queue import GroupQueue
from arl_jax.queueing.ray_client import RayActorQueue, RayLearnerQueue
from arl_jax.queueing.transport import actor_queue, learner_queue
from arl_jax.types import Episode, Group, Reward, Segment, StopReason, Task
from tests.queueing import leased_groups


def segment(versions, sampled, trainable):
  count = len(versions)
  return Segment(
    ids=np.arange(count, dtype=np.int32),
    roles=np.zeros(count, np.uint8),
    sampled=np.array(sampled, bool),
    behaviour_logp=np.zeros(count, np.float32),
    policy_version=np.array(
      [v if s else -1 for v, s in zip(versions, sampled, strict=True)], np.int32
    ),
    trainable=trainable,
  )


def group_of(*rollouts):
  """Of segments, each (versions, sampled, trainable), for each rollout."""
  return Group(
    group_id="0/t0",
    task=Task(task_id="t0", prompt="p" * 1000, truth={"answer": [7]}),
    episodes=tuple(
      Episode(
        task_id="t0",
        rollout_index=i,
        segments=tuple(segment(*values) for values in segments),
        events=(),
        stop_reason=StopReason.ANSWERED,
        outcome={"found": 1},
        turns=1,
        reward=Reward(total=float(i)),
      )
      for i, segments in enumerate(rollouts)
    ),
  )


tokens = st.lists(
  st.tuples(st.integers(0, 9), st.booleans()), min_size=0, max_size=6
)
segments = st.lists(st.tuples(tokens, st.booleans()), min_size=0, max_size=3)


@given(st.lists(segments, min_size=2, max_size=4), st.integers(0, 9))
def test_the_queue_decides_the_same_about_an_outline(rollouts, version):
  group = group_of(
    *(
      [([v for v, _ in ts], [s for _, s in ts], free) for ts, free in rollout]
      for rollout in rollouts
    )
  )
  said = ray_queue.outline(group)
  assert [e.oldest_version for e in said.episodes] == [
    e.oldest_version for e in group.episodes
  ]
  fates = []
  for one in (group, said):
    queue = GroupQueue(lease_seconds=60)
    queue.begin(leased_groups.start(tasks=1, version=version, group_size=4))
    (lease,) = queue.lease("a", 1)
    fates.append(queue.deliver("a", lease, one))
  assert fates[0] == fates[1]


def test_an_outline_holds_no_text_and_two_tokens_at_most():
  versions = [3, 1, 2, 5, 4]
  sampled = [True, True, True, False, True]
  said = ray_queue.outline(group_of([(versions, sampled, True)], []))
  assert said.task.prompt == ""
  assert said.task.truth == {}
  assert said.episodes[0].outcome == {}
  (cut,) = said.episodes[0].segments
  # 5 wasn't sampled: the oldest is 1, at place 1, and the newest 4, at 4.
  assert cut.ids.tolist() == [1, 4]
  assert cut.policy_version.tolist() == [1, 4]
  assert said.rewards.tolist() == [0.0, 1.0]


def test_another_group_behind_a_reference_is_refused():
  group = group_of([([1, 2], [True, True], True)], [])
  said = ray_queue.outline(group)
  reference = ray_queue.GroupReference(
    group_id=said.group_id,
    task=said.task,
    episodes=said.episodes,
    reference=None,
  )
  assert ray_queue.whole(reference, group) is group
  other = group_of([([1, 3], [True, True], True)], [])
  for wrong in (other, said.task, None):
    with pytest.raises(ValueError, match="isn't that group"):
      ray_queue.whole(reference, wrong)


def test_groups_are_held_until_they_are_fetched():
  host = ray_queue.Host(None)
  group = group_of([], [])
  with host.hold([group, group]) as keys:
    assert len({*keys}) == 2
    assert host.hand_over(keys[0]) == (True, group)
  with pytest.raises(KeyError):
    host.hand_over(keys[0])


def test_groups_go_over_http_in_processes_that_ray_did_not_start():
  cluster = ClusterConfig(queue="http://127.0.0.1:1")
  assert isinstance(learner_queue(cluster), LearnerQueue)
  assert isinstance(actor_queue(cluster, 0), ActorQueue)


def test_groups_go_through_ray_where_it_is_wanted():
  pytest.importorskip("ray")
  cluster = ClusterConfig(queue="http://127.0.0.1:1")
  ray_queue.set_host(ray_queue.Host(None))
  try:
    assert isinstance(learner_queue(cluster), RayLearnerQueue)
    assert isinstance(actor_queue(cluster, 0), RayActorQueue)
    cluster.ray.object_store = False
    assert isinstance(actor_queue(cluster, 0), ActorQueue)
  finally:
    ray_queue.set_host(None)


@pytest.mark.parametrize(
  ("text", "resources"),
  [
    ("", {}),
    ("CPU=4", {"CPU": 4}),
    ("CPU=0.5, GPU=8", {"CPU": 0.5, "GPU": 8}),
    ("TPU=4,TPU-v6e-8-head=1", {"TPU": 4, "TPU-v6e-8-head": 1}),
  ],
)
def test_resources(text, resources):
  assert RayConfig(learner=text).resources("learner") == resources


@pytest.mark.parametrize(
  "text",
  [
    *("CPU", "CPU=", "CPU=x", "CPU=-1", "CPU=nan", "CPU=inf", "CPU=1.5"),
    *("=1", "C PU=1", "CPU=1,CPU=1", "CPU=1e9", "x" * 101 + "=1"),
  ],
)
def test_resources_that_cannot_be(text):
  cluster = ClusterConfig(ray=RayConfig(server=text))
  with pytest.raises(ValueError, match=r"cluster\.ray\.server has '"):
    cluster.validate()


def test_a_client_address_is_refused():
  with pytest.raises(ValueError, match=r"cluster\.ray\.address is 'ray://"):
    ClusterConfig(ray=RayConfig(address="ray://head:10001")).validate()


def test_fields_of_the_configuration_are_plain():
  assert dataclasses.asdict(ClusterConfig())["ray"]["learner"] == "CPU=1"
