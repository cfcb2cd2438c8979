"""The search reward against published constants and golden values."""

import dataclasses
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl_jax import types
from arl_jax.rewards import search

GOLDENS = json.loads(
  (
    pathlib.Path(__file__).parents[1]
    / "testdata"
    / "losses"
    / "search_rewards.json"
  ).read_text()
)

TRUTH = {"answer": "x", "relevant": ["a", "b", "c"], "answer_chunks": ["c"]}
# {a, b} are one fact, {c} another.
FACTS = {**TRUTH, "facts": [["a", "b"], ["c"]]}


def task(truth=TRUTH) -> types.Task:
  return types.Task(task_id="t", prompt="p", truth=truth)


def episode(
  answer=None,
  encountered=(),
  calls=(),
  turns=1,
  stop=types.StopReason.ANSWERED,
) -> types.Episode:
  return types.Episode(
    task_id="t",
    rollout_index=0,
    segments=(),
    events=(),
    stop_reason=stop,
    outcome={
      "answer": answer,
      "encountered": list(encountered),
      "calls": list(calls),
      "pruned": [],
    },
    turns=turns,
  )


@pytest.mark.parametrize("golden", GOLDENS, ids=range(len(GOLDENS)))
def test_equals_the_goldens(golden):
  found = golden["output"][:1] if golden["final_answer_in_output"] else []
  truth = {
    "answer": "x",
    "relevant": golden["relevant"],
    "answer_chunks": found,
  }
  calls = [
    search.PRUNE_TOOL if call == "prune" else call
    for call in golden["tool_calls"]
  ]
  reward = search.SearchReward(beta=golden["beta"], floor=golden["floor"])(
    task(truth),
    episode(golden["output"], golden["encountered"], calls, golden["turns"]),
  )
  names = {"precision": "output_precision", "recall": "output_recall"}
  expected = dict(golden["expected"])
  assert reward.total == pytest.approx(expected.pop("reward"), abs=1e-12)
  for name, value in expected.items():
    assert reward.parts[names.get(name, name)] == pytest.approx(value), name
  assert reward.parts["malformed"] == 0


class TestPieces:
  def test_f_beta_weighs_recall(self):
    # 17 · (1/4 · 1) / (16 · 1/4 + 1) = 4.25 / 5.
    assert search.f_beta(0.25, 1.0, 4.0) == pytest.approx(0.85)
    # 17 · (1 · 1/4) / (16 + 1/4) = 4.25 / 16.25.
    assert search.f_beta(1.0, 0.25, 4.0) == pytest.approx(0.2615384615)
    assert search.f_beta(0.0, 0.0, 4.0) == 0.0

  def test_prunes_cost_beyond_a_streak_of_three(self):
    prune = [search.PRUNE_TOOL]
    assert search.prune_penalty(prune * 3) == 0.0
    assert search.prune_penalty(prune * 4) == pytest.approx(0.1)
    assert search.prune_penalty(prune * 3 + ["x"] + prune * 3) == 0.0
    assert search.prune_penalty(prune * 100) == 0.5
    assert search.prune_penalty([]) == 0.0

  def test_turns_cost_linearly_between_64_and_128(self):
    assert search.turn_penalty(0) == search.turn_penalty(64) == 0.0
    assert search.turn_penalty(96) == pytest.approx(0.25)
    assert search.turn_penalty(128) == search.turn_penalty(999) == 0.5


class TestReward:
  def test_doing_nothing_has_no_reward(self):
    nothing = search.SearchReward()(task(), episode([]))
    assert nothing.total == 0.0
    assert nothing.parts == {
      "f_beta": 0.0,
      "output_recall": 0.0,
      "output_precision": 0.0,
      "trajectory_recall": 0.0,
      "answer_found": 0.0,
      "prune_penalty": 0.0,
      "turn_penalty": 0.0,
      "malformed": 0.0,
    }

  def test_seeing_everything_and_answering_nothing_is_not_perfect(self):
    reward = search.SearchReward()(task(), episode([], "abc"))
    assert reward.total == pytest.approx(0.3)

  def test_the_best_is_two(self):
    reward = search.SearchReward()(task(), episode(["a", "b", "c"], "abc"))
    assert reward.total == pytest.approx(2.0)

  def test_naming_everything_costs_precision(self):
    wide = search.SearchReward()(
      task(), episode([*"abc", *map(str, range(9))], "abc")
    )
    # P = 3 / 12, R = 1: F is 0.85, so 0.7 · 0.85 + 0.3 + 1.
    assert wide.total == pytest.approx(1.895)

  def test_recall_counts_facts_where_there_are_some(self):
    reward = search.SearchReward(beta=1.0)(task(FACTS), episode(["a"], "ab"))
    # One of two facts; the only chunk named is relevant. F1 = 2/3.
    assert reward.parts["output_recall"] == 0.5
    assert reward.parts["output_precision"] == 1.0
    assert reward.parts["trajectory_recall"] == 0.5
    assert reward.total == pytest.approx(0.7 * 2 / 3 + 0.3 * 0.5)

  def test_the_answer_may_count_when_merely_seen(self):
    seen = episode(["a"], "ac")
    assert search.SearchReward()(task(), seen).parts["answer_found"] == 0.0
    switched = search.SearchReward(answer_in="encountered")
    assert switched(task(), seen).parts["answer_found"] == 1.0

  def test_penalties_stop_at_the_floor(self):
    long = episode([], "a", [search.PRUNE_TOOL] * 20, turns=128)
    # r_pre is 0.3 / 3 = 0.1, penalties 1.0.
    assert search.SearchReward()(task(), long).total == 1e-3

  @pytest.mark.parametrize(
    "stop",
    [
      types.StopReason.MALFORMED,
      types.StopReason.TURN_LIMIT,
      types.StopReason.CONTEXT_FULL,
    ],
  )
  def test_no_answer_has_the_malformed_reward(self, stop):
    reward = search.SearchReward()(task(), episode(None, "abc", stop=stop))
    assert reward.total == -0.5
    assert reward.parts["malformed"] == 1.0
    assert reward.parts["trajectory_recall"] == 1.0

  def test_an_answer_of_an_episode_that_was_cut_off_does_not_count(self):
    cut = episode(["a"], "a", stop=types.StopReason.TURN_LIMIT)
    reward = search.SearchReward()(task(), cut)
    assert (reward.total, reward.parts["f_beta"]) == (-0.5, 0.0)

  @pytest.mark.parametrize(
    "stop", [types.StopReason.CANCELLED, types.StopReason.INFRASTRUCTURE]
  )
  def test_refuses_what_says_nothing_about_the_policy(self, stop):
    with pytest.raises(ValueError, match="only scorable episodes"):
      search.SearchReward()(task(), episode(["a"], "a", stop=stop))

  @pytest.mark.parametrize(
    ("truth", "message"),
    [
      ({"answer_chunks": []}, r"truth\['relevant'\] of task t is None"),
      ({"relevant": "abc"}, "is 'abc', not a list"),
      ({"relevant": [], "answer_chunks": []}, "is empty"),
      ({"relevant": ["a"]}, r"truth\['answer_chunks'\] of task t is None"),
    ],
  )
  def test_refuses_unusable_truth(self, truth, message):
    with pytest.raises(ValueError, match=message):
      search.SearchReward()(task(truth), episode(["a"], "a"))

  def test_refuses_an_answered_episode_without_an_answer(self):
    with pytest.raises(ValueError, match="ended answered, but"):
      search.SearchReward()(task(), episode(None))

  @pytest.mark.parametrize(
    ("field", "value"), [("beta", 0.0), ("answer_in", "x"), ("turn_limit", 64)]
  )
  def test_refuses_fields_out_of_range(self, field, value):
    with pytest.raises(ValueError, match=f"{field} is "):
      search.SearchReward(**{field: value})
    assert dataclasses.replace(search.SearchReward(), beta=2.0).beta == 2.0

  @given(
    st.lists(st.sampled_from("abcxyz"), max_size=6),
    st.sets(st.sampled_from("abcxyz")),
    st.lists(st.sampled_from(["prune_chunks", "search_corpus"]), max_size=20),
    st.integers(0, 200),
  )
  def test_stays_in_its_range(self, answer, encountered, calls, turns):
    made = episode(answer, encountered, calls, turns)
    reward = search.SearchReward()(task(FACTS), made)
    assert 0.0 <= reward.total <= 2.0
    assert reward == search.SearchReward()(task(FACTS), made)


def test_beta_is_annealed_from_epoch_to_epoch():
  # 4 to 2 in four epochs: 4, 3.5, 3, 2.5, 2, 2.
  reward = search.SearchReward(beta=4, final_beta=2, beta_epochs=4)
  done = episode(answer=["a", "x"], encountered=["a", "x"])
  for epoch, beta in enumerate((4, 3.5, 3, 2.5, 2, 2)):
    drawn = dataclasses.replace(task(), provenance={"epoch": epoch})
    parts = reward(drawn, done).parts
    assert parts["f_beta"] == search.f_beta(1 / 2, 1 / 3, beta)
  # One that isn't trained on is scored alike at any time.
  assert reward(task(), done).parts["f_beta"] == search.f_beta(1 / 2, 1 / 3, 4)


@pytest.mark.parametrize(
  ("field", "value"),
  [("final_beta", 0), ("final_beta", float("nan")), ("beta_epochs", 0)],
)
def test_what_beta_can_t_be_annealed_by_is_refused(field, value):
  with pytest.raises(ValueError, match=field):
    search.SearchReward(**{field: value})
