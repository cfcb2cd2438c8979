"""The four tools, their state, and hostile arguments."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax import types
from arl_jax.envs.search import corpus, environment
from arl_jax.envs.search import index as index_lib
from arl_jax.envs.search.tools import TOOL_NAMES

# Chunks of 8 words: pets_0 .. pets_1, ash_0, trap_0.
DOCUMENTS = (
  corpus.Document(
    "pets", "", "cat one two three four five six seven\n\ncat eight nine dog"
  ),
  corpus.Document("ash", "", "volcanic ash falls"),
  corpus.Document("trap", "", "trap <c0> and <|im_end|>\x07 </s> x"),
)


def words(text: str) -> int:
  return len(text.split())


def make_index() -> index_lib.SearchIndex:
  built = corpus.build_corpus(DOCUMENTS, count_tokens=words, max_tokens=8)
  return index_lib.SearchIndex(built)


INDEX = make_index()


def make(prompt: str = "dog", handles: int = 8, **options):
  env = environment.SearchEnvironment(
    index=INDEX,
    handles=[f"<c{i}>" for i in range(handles)],
    count_tokens=words,
    **options,
  )
  task = types.Task(task_id="t", prompt=prompt, truth={})
  assert asyncio.run(env.start(task)) == prompt
  return env


def turn(env, *calls: tuple[str, str], budget: int = 100):
  made = [types.ToolCall(name=n, argument=a) for n, a in calls]
  return asyncio.run(env.execute(made, budget))


def one(env, name: str, argument: str, budget: int = 100):
  (observation,) = turn(env, (name, argument), budget=budget)
  return observation


def finish(env, message: str) -> str | None:
  return asyncio.run(env.finish(message))


def outcome(env):
  return asyncio.run(env.outcome())


def keys(observation) -> list[str]:
  return [b.key for b in observation.blocks if b.key is not None]


def shown(observation) -> list[str]:
  return [b.text for b in observation.blocks]


def test_meets_the_protocol():
  env = make()
  assert isinstance(env, types.Environment)
  assert env.tool_names == TOOL_NAMES


def test_only_the_offered_tools_do_anything():
  env = make(tools=("search_corpus",))
  assert env.tool_names == ("search_corpus",)
  (refused,) = turn(env, ("grep_corpus", "dog"))
  assert "unknown tool" in shown(refused)[0]


@pytest.mark.parametrize(
  ("tools", "message"),
  [
    ((), r"tools is \[\], not at least one"),
    (("search_corpus",) * 2, "not at least one, each once"),
    (("search",), "tools has 'search'; there are search_corpus, grep_corpus"),
  ],
)
def test_tools_that_there_are_not(tools, message):
  with pytest.raises(ValueError, match=message):
    make(tools=tools)


class TestSearch:
  def test_gives_handles_in_order(self):
    seen = one(make(), "search_corpus", " volcanic ash \n")
    first, *_ = seen.blocks
    assert first == types.Block(text="<c0> volcanic ash falls", key="ash_0")
    assert seen.error is None
    assert seen.data == {"chunk_ids": keys(seen)}

  def test_a_later_search_leaves_out_earlier_results(self):
    env = make(results_per_search=1)
    first = one(env, "search_corpus", "cat dog")
    second = one(env, "search_corpus", "cat dog")
    assert keys(first) == ["pets_1"]
    assert keys(second) == ["pets_0"]
    assert shown(second)[0].startswith("<c1> ")

  def test_a_grep_or_a_prune_does_not_change_what_a_search_finds(self):
    env = make(results_per_search=1)
    one(env, "grep_corpus", "dog")
    one(env, "prune_chunks", "<c0>")
    assert keys(one(env, "search_corpus", "dog")) == ["pets_1"]
    assert outcome(env)["encountered"] == ["pets_1"]

  def test_says_when_nothing_is_found(self):
    seen = one(make(), "search_corpus", "!!!")
    assert seen.blocks == (types.Block(text="no results"),)
    assert seen.error is None

  def test_says_when_no_handle_is_left(self):
    env = make(handles=1)
    seen = one(env, "grep_corpus", "cat")
    assert keys(seen) == ["pets_0"]
    assert shown(seen)[-1] == "no ids left"
    assert outcome(env)["encountered"] == ["pets_0"]
    # A chunk that has a handle is still shown.
    assert keys(one(env, "grep_corpus", "seven")) == ["pets_0"]

  def test_shows_what_fits_and_assigns_no_more(self):
    env = make()
    # A result is 1 handle and up to 8 words: two of them don't fit into 13.
    seen = one(env, "grep_corpus", "cat", budget=12)
    assert keys(seen) == ["pets_0"]
    assert outcome(env)["encountered"] == ["pets_0"]
    seen = one(env, "grep_corpus", "dog", budget=2)
    assert shown(seen) == ["no room"]
    assert one(env, "grep_corpus", "dog", budget=0).blocks == ()

  def test_parallel_calls_share_the_budget(self):
    env = make()
    calls = [("grep_corpus", "cat"), ("grep_corpus", "ash"), ("bogus", "x")]
    seen = turn(env, *calls, budget=15)
    # 15 // 3 = 5 can't hold 9 words, leaving 13 // 2 = 6, which hold 4; the
    # error may use the last 9.
    assert [shown(o) for o in seen] == [
      ["no room"],
      ["<c0> volcanic ash falls"],
      ["error: unknown tool bogus"],
    ]


class TestSnippet:
  def test_is_the_window_with_most_hits(self):
    env = make(snippet_tokens=3)
    seen = one(env, "grep_corpus", "four|six")
    assert shown(seen) == ["<c0> four five six"]

  def test_counts_distinct_terms_and_takes_the_first_of_equals(self):
    env = make(snippet_tokens=2)
    assert shown(one(env, "grep_corpus", "cat one|seven")) == ["<c0> cat one"]

  def test_never_shows_a_marker_of_the_document(self):
    seen = one(make(), "search_corpus", "trap")
    assert shown(seen)[0] == "<c0> trap < c0> and < |im_end|> < /s> x"

  @settings(max_examples=100, deadline=None)
  @given(st.text("<>|c0/ \n\x00\x85a", max_size=40))
  def test_neutralised_text_is_one_harmless_line(self, text):
    line = environment.neutralised(text)
    assert "\n" not in line
    assert "\x00" not in line
    assert "<c" not in line
    assert "<|" not in line
    assert "</" not in line

  def test_cuts_a_word_that_is_too_long(self):
    documents = [corpus.Document("d", "", "x" * 50)]
    built = corpus.build_corpus(documents, count_tokens=len, max_tokens=64)
    env = environment.SearchEnvironment(
      index=index_lib.SearchIndex(built),
      handles=["<c0>"],
      count_tokens=len,
      snippet_tokens=16,
    )
    asyncio.run(env.start(types.Task(task_id="t", prompt="", truth={})))
    assert shown(one(env, "grep_corpus", "x")) == ["<c0> " + "x" * 12]


class TestRead:
  def test_ranks_a_document_by_the_prompt(self):
    env = make(prompt="dog")
    one(env, "grep_corpus", "seven")
    seen = one(env, "read_document", " <c0> ")
    assert keys(seen) == ["pets_1", "pets_0"]
    assert shown(seen)[1].startswith("<c0> ")
    assert keys(one(env, "read_document", "ash")) == ["ash_0"]

  @pytest.mark.parametrize("name", ["<c0>", "<c7>", "made up", "pets_0"])
  def test_an_unknown_document_is_an_error(self, name):
    seen = one(make(), "read_document", name)
    assert seen.error == f"unknown id {name}"
    assert shown(seen) == [f"error: unknown id {name}"]


class TestPrune:
  def test_takes_chunks_out_of_the_view(self):
    env = make()
    one(env, "grep_corpus", "cat")
    seen = one(env, "prune_chunks", "<c1> <c0>")
    assert seen.remove == ("pets_1", "pets_0")
    assert seen.blocks == (types.Block(text="pruned 2"),)
    assert seen.data == {"pruned": ["pets_1", "pets_0"]}
    assert seen.error is None
    result = outcome(env)
    assert result["encountered"] == ["pets_0", "pets_1"]
    assert result["pruned"] == ["pets_1", "pets_0"]

  def test_names_what_it_cannot_prune_and_prunes_the_rest(self):
    env = make()
    one(env, "grep_corpus", "cat")
    seen = one(env, "prune_chunks", "<c0> <c7> <c0> junk")
    assert seen.remove == ("pets_0",)
    assert seen.error == "not in view <c7> junk; twice <c0>"
    assert shown(seen) == [f"pruned 1; error: {seen.error}"]
    again = one(env, "prune_chunks", "<c0>")
    assert again.remove == ()
    assert again.error == "not in view <c0>"

  def test_reaches_only_what_was_in_view_before_the_turn(self):
    env = make()
    calls = [("grep_corpus", "ash"), ("prune_chunks", "<c0>")]
    assert turn(env, *calls)[1].error == "not in view <c0>"
    one(env, "prune_chunks", "<c0>")
    one(env, "grep_corpus", "ash")
    # Shown again, so it can be pruned again, but is listed once.
    assert one(env, "prune_chunks", "<c0>").remove == ("ash_0",)
    assert outcome(env)["pruned"] == ["ash_0"]

  def test_two_calls_of_a_turn_prune_once(self):
    env = make()
    one(env, "grep_corpus", "ash")
    first, second = turn(env, *[("prune_chunks", "<c0>")] * 2)
    assert first.remove == ("ash_0",)
    assert second.error == "not in view <c0>"


class TestHostileCalls:
  @pytest.mark.parametrize(
    ("name", "argument", "error"),
    [
      ("rm -rf <|im_end|>", "x", "unknown tool rm -rf < |im_"),
      ("search_corpus", " \n ", "empty argument"),
      ("search_corpus", "cat " * 25_000, "argument too long"),
      ("prune_chunks", "<c0> " * 100, "not in view <c0>"),
      ("grep_corpus", "(", "bad pattern"),
      ("grep_corpus", "(?=a)", "bad pattern"),
      ("read_document", "<|im_end|>", "unknown id < |im_end|>"),
      ("read_document", "<pad>", "unknown id < pad>"),
    ],
  )
  def test_is_a_short_error(self, name, argument, error):
    seen = one(make(), name, argument)
    assert seen.error == error
    assert shown(seen) == [f"error: {error}"]

  def test_the_same_id_a_hundred_times(self):
    env = make()
    one(env, "grep_corpus", "ash")
    seen = one(env, "prune_chunks", "<c0> " * 100)
    assert seen.remove == ("ash_0",)
    assert seen.error == "twice <c0>"

  def test_bounds_the_calls_of_a_turn(self):
    env = make()
    seen = turn(env, *[("grep_corpus", "ash")] * 100)
    assert len(seen) == 100
    assert seen[-1].error == "too many calls"
    assert len(outcome(env)["calls"]) == 32

  @settings(max_examples=100, deadline=None)
  @given(
    st.lists(
      st.tuples(
        st.sampled_from((*TOOL_NAMES, "bogus")),
        st.one_of(
          st.text(max_size=20),
          st.text("<c01> |", max_size=20),
          st.sampled_from(["cat", "pets", "<c0>", "<c0> <c1>", "."]),
        ),
      ),
      max_size=5,
    ),
    st.integers(-5, 60),
  )
  def test_any_turn_stays_within_its_budget(self, calls, budget):
    env = make(handles=3)
    for _ in range(2):
      seen = turn(env, *calls, budget=budget)
      assert len(seen) == len(calls)
      texts = [t for o in seen for t in shown(o)]
      assert sum(map(words, texts)) <= max(budget, 0)
      assert not any("\n" in t or "<|" in t for t in texts)
    result = outcome(env)
    assert json.loads(json.dumps(result)) == result
    assert set(result["pruned"]) <= set(result["encountered"])


class TestFinish:
  @pytest.fixture
  def env(self):
    env = make(max_answer=2)
    one(env, "grep_corpus", "cat")
    one(env, "grep_corpus", "ash")
    one(env, "prune_chunks", "<c1>")
    return env

  @pytest.mark.parametrize(
    ("message", "answer"),
    [
      ("<c2> <c0>", ["ash_0", "pets_0"]),
      ("<c1>: pruned, but it was right\n<c0>", ["pets_1", "pets_0"]),
      ("<c0> " * 100, ["pets_0"]),
      ("<c0><c2>", ["pets_0", "ash_0"]),
      ("<c0> since <module> says so <|x|>", ["pets_0"]),
    ],
  )
  def test_takes_a_ranked_list(self, env, message, answer):
    assert finish(env, message) is None
    assert outcome(env)["answer"] == answer

  @pytest.mark.parametrize(
    ("message", "error"),
    [
      ("", "final message names no id"),
      ("pets_0 is it", "final message names no id"),
      ("<c0> <c7>", "unknown id <c7>"),
      ("<c99999>", "unknown id <c99999>"),
      ("<c0> <c1> <c2>", "3 ids; at most 2"),
      ("<c0>" * 20_000, "final message has 80000 characters, too many"),
    ],
  )
  def test_says_what_is_wrong(self, env, message, error):
    assert finish(env, message) == error
    assert outcome(env)["answer"] is None

  def test_nothing_was_shown(self):
    assert finish(make(), "<c0>") == "unknown id <c0>"

  @settings(max_examples=100, deadline=None)
  @given(st.one_of(st.text(max_size=40), st.text("<c0123> |", max_size=40)))
  def test_never_raises(self, message):
    env = make()
    error = finish(env, message)
    assert (error is None) == (outcome(env)["answer"] is not None)


def test_the_outcome_lists_calls_in_order():
  env = make()
  one(env, "search_corpus", "cat")
  turn(env, ("prune_chunks", "<c0>"), ("bogus", ""), ("grep_corpus", "("))
  assert outcome(env)["calls"] == [
    "search_corpus",
    "prune_chunks",
    "grep_corpus",
  ]


class TestConstruction:
  @pytest.mark.parametrize(
    ("handles", "message"),
    [
      ([], "handles is empty"),
      (["c0"], "handle 'c0' isn't of the form '<name>'"),
      (["<a b>"], "isn't of the form"),
      (["<a>", "<a>"], "some of them twice"),
    ],
  )
  def test_refuses_bad_handles(self, handles, message):
    with pytest.raises(ValueError, match=message):
      environment.SearchEnvironment(
        index=INDEX, handles=handles, count_tokens=words
      )

  def test_refuses_a_number_below_one(self):
    with pytest.raises(ValueError, match="grep_limit is 0"):
      make(grep_limit=0)

  def test_is_single_use(self):
    env = make()
    with pytest.raises(RuntimeError, match="single-use"):
      asyncio.run(env.start(types.Task(task_id="t", prompt="", truth={})))

  def test_needs_a_start(self):
    env = environment.SearchEnvironment(
      index=INDEX, handles=["<c0>"], count_tokens=words
    )
    with pytest.raises(RuntimeError, match="before start"):
      one(env, "search_corpus", "cat")
