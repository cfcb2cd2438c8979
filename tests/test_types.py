"""Records: validation, JSON and what must be expressible."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from arl_jax import records, types
from arl_jax.types import Role, StopReason


def segment(n: int = 4, sampled=(2, 3), version: int = 0, **fields):
  mask = np.zeros(n, np.bool_)
  mask[list(sampled)] = True
  arrays = {
    "ids": np.arange(n, dtype=np.int32),
    "roles": np.where(mask, Role.SAMPLED, Role.PROMPT).astype(np.uint8),
    "sampled": mask,
    "behaviour_logp": np.where(mask, -0.5, 0).astype(np.float32),
    "policy_version": np.where(mask, version, -1).astype(np.int32),
  }
  return types.Segment(**{**arrays, **fields})


def episode(*segments, **fields):
  defaults = {
    "task_id": "t",
    "rollout_index": 0,
    "segments": segments,
    "events": (),
    "stop_reason": StopReason.ANSWERED,
    "outcome": {},
    "turns": 1,
  }
  return types.Episode(**{**defaults, **fields})


def task(**fields):
  return types.Task(**{"task_id": "t", "prompt": "p", "truth": {}, **fields})


def through_json(record):
  return records.from_json(json.loads(json.dumps(records.to_json(record))))


def assert_same_segment(a: types.Segment, b: types.Segment):
  for field in dataclasses.fields(types.Segment):
    x, y = getattr(a, field.name), getattr(b, field.name)
    if isinstance(x, np.ndarray):
      assert x.dtype == y.dtype, field.name
      assert x.shape == y.shape, field.name
      # Bytes, so that -0.0 and the last bit count.
      assert x.tobytes() == y.tobytes(), field.name
    else:
      assert x == y, field.name
      assert type(x) is type(y), field.name


@st.composite
def segments(draw, parent=None):
  n = draw(st.integers(0, 12))
  sampled = draw(hnp.arrays(np.bool_, n))
  finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
  logp = draw(hnp.arrays(np.float32, n, elements=finite))
  versions = draw(hnp.arrays(np.int32, n, elements=st.integers(0, 2**31 - 1)))
  experts = draw(
    st.none()
    | hnp.arrays(np.int32, (n, 2, 2), elements=st.integers(-1, 7)).filter(
      lambda x: x.size
    )
  )
  return types.Segment(
    ids=draw(hnp.arrays(np.int32, n, elements=st.integers(0, 2**31 - 1))),
    roles=draw(hnp.arrays(np.uint8, n, elements=st.integers(0, 3))),
    sampled=sampled,
    behaviour_logp=np.where(sampled, logp, np.float32(0)),
    policy_version=np.where(sampled, versions, np.int32(-1)),
    parent=parent,
    reason=draw(st.sampled_from(["start", "prune", "summary"])),
    agent=draw(st.text(max_size=5)),
    trainable=draw(st.booleans()),
    temperature=draw(st.floats(0.1, 2)),
    experts=experts,
  )


class TestJson:
  @settings(deadline=None)
  @given(segments(), segments(parent=0))
  def test_a_segment_comes_back_bit_for_bit(self, root, child):
    back = through_json(episode(root, child))
    assert len(back.segments) == 2
    for a, b in zip((root, child), back.segments, strict=True):
      assert_same_segment(a, b)

  @pytest.mark.parametrize("shape", [(0, 2, 2), (4, 0, 2)])
  def test_experts_without_elements_keep_their_shape(self, shape):
    n = shape[0]
    experts = np.zeros(shape, np.int32)
    recorded = segment(n, sampled=(), experts=experts)
    (back,) = through_json(episode(recorded)).segments
    assert_same_segment(recorded, back)

  def test_every_field_of_a_group_comes_back(self):
    reward = types.Reward(total=0.1, parts={"recall": 1 / 3})
    event = types.Event(turn=2, kind="rewrite", data={"removed": [[1, 2]]})
    one = episode(
      events=(event,),
      stop_reason=StopReason.CONTEXT_FULL,
      outcome={"answer": None, "pruned": ["a"]},
      turns=3,
      seed=7,
      rollout_index=5,
      reward=reward,
    )
    made = task(truth={"relevant": ["a", "b"]}, provenance={"seed": 1})
    group = types.Group(group_id="1/t", task=made, episodes=(one,))
    back = through_json(group)
    assert back == group
    assert through_json(made) == made
    assert through_json(one) == one

  @pytest.mark.parametrize("reason", list(StopReason))
  def test_every_stop_reason_comes_back(self, reason):
    assert through_json(episode(stop_reason=reason)).stop_reason is reason

  def test_numpy_values_in_free_fields_become_plain(self):
    one = episode(
      outcome={"n": np.int64(3), "x": np.float32(0.1), "v": np.arange(2)}
    )
    assert through_json(one).outcome == {"n": 3, "x": 0.1, "v": [0, 1]}

  @pytest.mark.parametrize("record", [task(), episode(segment())])
  def test_a_record_says_version_and_kind(self, record):
    data = records.to_json(record)
    assert data["schema_version"] == types.SCHEMA_VERSION
    assert data["kind"] == type(record).__name__

  @pytest.mark.parametrize("version", [0, 2, None, "1"])
  def test_another_schema_version_is_refused(self, version):
    data = {**records.to_json(task()), "schema_version": version}
    with pytest.raises(ValueError, match="schema_version"):
      records.from_json(data)

  def test_a_missing_schema_version_is_refused(self):
    data = records.to_json(task())
    del data["schema_version"]
    with pytest.raises(ValueError, match="schema_version None"):
      records.from_json(data)

  @pytest.mark.parametrize("kind", ["Segment", None, "", "Tasks", [], {}])
  def test_an_unknown_kind_is_refused(self, kind):
    with pytest.raises(ValueError, match="kind"):
      records.from_json({**records.to_json(task()), "kind": kind})

  @pytest.mark.parametrize(
    "path",
    [
      (),
      ("task",),
      ("episodes", 0),
      ("episodes", 0, "segments", 0),
      ("episodes", 0, "events", 0),
      ("episodes", 0, "reward"),
    ],
  )
  def test_missing_and_surplus_fields_are_refused(self, path):
    one = episode(
      segment(),
      events=(types.Event(turn=0, kind="final"),),
      reward=types.Reward(total=1.0),
    )
    group = types.Group(group_id="g", task=task(), episodes=(one,))
    required = {
      (): "group_id",
      ("task",): "prompt",
      ("episodes", 0): "outcome",
      ("episodes", 0, "segments", 0): "sampled",
      ("episodes", 0, "events", 0): "kind",
      ("episodes", 0, "reward"): "total",
    }[path]

    def edited(edit):
      data = json.loads(json.dumps(records.to_json(group)))
      at = data
      for step in path:
        at = at[step]
      edit(at)
      return data

    with pytest.raises(ValueError, match=required):
      records.from_json(edited(lambda at: at.pop(required)))
    with pytest.raises(ValueError, match="surplus"):
      records.from_json(edited(lambda at: at.update(surplus=1)))

  @pytest.mark.parametrize(
    ("field", "value"),
    [
      ("segments", None),
      ("segments", 3),
      ("events", [3]),
      ("stop_reason", "nonsense"),
      ("reward", 3),
      ("reward", []),
    ],
  )
  def test_a_field_of_another_form_is_a_value_error(self, field, value):
    data = records.to_json(episode(segment()))
    data[field] = value
    with pytest.raises(ValueError):  # noqa: PT011 - several messages
      records.from_json(data)

  @pytest.mark.parametrize(
    ("field", "value"),
    [
      ("ids", [0.5, 1, 2, 3]),
      ("ids", [2**40, 1, 2, 3]),
      ("roles", [-1, 0, 0, 0]),
      ("roles", [300, 0, 0, 0]),
      ("sampled", ["False", True, True, True]),
      ("ids", [1, 2, 3]),
      ("behaviour_logp", [0, 0, None, 0]),
    ],
  )
  def test_an_array_that_would_be_changed_is_a_value_error(self, field, value):
    data = records.to_json(episode(segment()))
    data["segments"][0][field] = value
    with pytest.raises(ValueError):  # noqa: PT011 - several messages
      records.from_json(data)

  @pytest.mark.parametrize("data", [[], None, "x", 3])
  def test_what_is_no_object_is_a_value_error(self, data):
    with pytest.raises(ValueError):  # noqa: PT011 - any message
      records.from_json(data)


class TestSegment:
  @pytest.mark.parametrize(
    ("field", "value"),
    [
      ("roles", np.zeros(3, np.uint8)),
      ("roles", np.zeros(4, np.int32)),
      ("ids", np.zeros(4, np.int64)),
      ("sampled", np.zeros(4, np.int32)),
      ("behaviour_logp", np.zeros(4, np.float64)),
      ("behaviour_logp", np.zeros((4, 1), np.float32)),
      ("policy_version", np.zeros(5, np.int32)),
    ],
  )
  def test_wrong_arrays_are_named(self, field, value):
    whole = dataclasses.asdict(segment())
    with pytest.raises(ValueError, match=rf"Segment\.{field}"):
      types.Segment(**{**whole, field: value})

  def test_ids_of_two_axes_are_refused(self):
    with pytest.raises(ValueError):  # noqa: PT011 - any message
      segment(ids=np.zeros((2, 2), np.int32))

  @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
  def test_log_probs_are_finite(self, value):
    logp = np.array([0, 0, value, 0], np.float32)
    with pytest.raises(ValueError, match="behaviour_logp"):
      segment(behaviour_logp=logp)

  def test_a_sampled_token_has_a_version(self):
    with pytest.raises(ValueError, match="policy_version"):
      segment(version=types.NO_VERSION)

  @pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
  def test_temperature_is_positive(self, temperature):
    with pytest.raises(ValueError, match="temperature"):
      segment(temperature=temperature)

  @pytest.mark.parametrize("shape", [(3, 1, 2), (4, 1), (4,)])
  def test_experts_are_of_every_token(self, shape):
    with pytest.raises(ValueError, match="experts"):
      segment(experts=np.zeros(shape, np.int32))

  def test_an_empty_segment_is_fine(self):
    assert len(segment(0, sampled=())) == 0

  def test_nothing_of_a_frozen_agent_is_trained(self):
    assert segment().trained.sum() == 2
    assert segment(trainable=False).trained.sum() == 0
    # The origin is still known.
    assert segment(trainable=False).sampled.sum() == 2


class TestEpisode:
  @pytest.mark.parametrize("parent", [0, 1, -1, 5])
  def test_a_parent_comes_first(self, parent):
    with pytest.raises(ValueError, match="parent"):
      episode(segment(parent=parent))

  def test_a_chain_of_summaries(self):
    chain = [segment(version=3)]
    for i in range(4):
      chain.append(
        segment(6, sampled=(5,), version=4 + i, parent=i, reason="summary")
      )
    made = episode(*chain)
    assert made.trained_tokens == 2 + 4
    assert made.oldest_version == 3
    back = through_json(made)
    assert [s.parent for s in back.segments] == [None, 0, 1, 2, 3]
    assert back.trained_tokens == made.trained_tokens

  def test_a_prune_trains_carried_tokens_once(self):
    roles = np.array([0, 1, 1, 2, 3], np.uint8)
    first = segment(5, sampled=(1, 2), version=1, roles=roles)
    # The carried tokens keep their role, but are not sampled here.
    second = segment(
      5, sampled=(4,), version=2, roles=np.array([0, 1, 1, 3, 1], np.uint8),
      parent=0, reason="prune",
    )  # fmt: skip
    made = episode(first, second)
    assert made.trained_tokens == 3
    assert made.oldest_version == 1
    assert (second.roles == Role.SAMPLED).sum() == 3

  def test_a_frozen_sub_agent_is_not_trained(self):
    main = segment(version=9)
    helper = segment(
      version=2, parent=0, agent="reader", reason="subagent", trainable=False
    )
    after = segment(version=9, parent=0, reason="summary")
    made = episode(main, helper, after)
    assert made.trained_tokens == 4
    # The frozen agent's old version doesn't make the episode stale.
    assert made.oldest_version == 9
    assert episode(helper_root := segment(trainable=False)).trained_tokens == 0
    assert episode(helper_root).oldest_version == types.NO_VERSION

  def test_no_segment_at_all(self):
    assert episode().trained_tokens == 0
    assert episode().oldest_version == types.NO_VERSION

  def test_infrastructure_says_nothing_about_the_policy(self):
    unscorable = {r for r in StopReason if not r.scorable}
    assert unscorable == {StopReason.CANCELLED, StopReason.INFRASTRUCTURE}


class TestGroup:
  def test_holds_one_task(self):
    with pytest.raises(ValueError, match=r"group g .* task other"):
      types.Group(
        group_id="g", task=task(), episodes=(episode(task_id="other"),)
      )

  def test_rewards_in_order(self):
    episodes = tuple(
      episode(rollout_index=i, reward=types.Reward(total=x))
      for i, x in enumerate((0.5, -1, 2))
    )
    group = types.Group(group_id="g", task=task(), episodes=episodes)
    np.testing.assert_array_equal(group.rewards, [0.5, -1, 2])
    assert group.rewards.dtype == np.float64

  def test_an_unscored_episode_has_no_reward(self):
    group = types.Group(group_id="g", task=task(), episodes=(episode(),))
    with pytest.raises(ValueError, match="unscored"):
      _ = group.rewards


USER_CODE = """
import asyncio
import sys
import numpy as np
from arl_jax import types

class Echo:
  tool_names = ("echo",)
  async def start(self, task):
    return task.prompt
  async def execute(self, calls, token_budget):
    return [types.Observation(blocks=(types.Block(text=c.argument),))
            for c in calls]
  async def finish(self, message):
    return None
  async def outcome(self):
    return {}

class Client:
  async def sample(self, session, ids, *, max_tokens, stop_ids, seed,
                   temperature=1.0):
    one = np.ones(1, np.int32)
    return types.Sample(ids=one, logp=np.zeros(1, np.float32), versions=one,
                        stopped=True)
  async def close(self, session):
    pass

class Nothing:
  pass

assert isinstance(Echo(), types.Environment)
assert isinstance(Client(), types.PolicyClient)
assert not isinstance(Nothing(), types.Environment)
assert not isinstance(Nothing(), types.PolicyClient)
heavy = {"jax", "flax", "optax", "tantivy", "orbax"} & set(sys.modules)
assert not heavy, heavy
"""


def test_user_code_meets_the_protocols_with_types_alone():
  done = subprocess.run(
    [sys.executable, "-c", USER_CODE], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
