import itertools

import pytest

from arl_jax.rollout.request import Sampling
from tests.rollout.fake_engine import FakeEngine, Params, alone
from tests.rollout.serving import (
  Clock,
  assert_right,
  drain,
  letters,
  make_scheduler,
  prompt,
  serve,
  submit,
)


def test_turns_compute_only_what_is_new():
  scheduler = make_scheduler()
  ids = prompt(6)
  for turn in range(3):
    before = scheduler.prefilled_tokens
    request = serve(scheduler, "a", ids, max_tokens=4, seed=turn)
    assert_right(request)
    assert scheduler.prefilled_tokens - before == (5 if turn else 6)
    ids = [*ids, *request.result.ids.tolist(), *prompt(5, 10 + turn)]
  assert scheduler.reused_tokens == 10 + 19
  assert scheduler.slots_in_use == 1


def test_one_token_is_always_computed():
  scheduler = make_scheduler()
  first = serve(scheduler, "a", prompt(9))
  before = scheduler.prefilled_tokens
  second = serve(scheduler, "a", prompt(9))
  assert scheduler.prefilled_tokens - before == 1
  assert first.result.ids.tolist() == second.result.ids.tolist()


def test_rewritten_context_reuses_what_is_common():
  scheduler = make_scheduler()
  ids = prompt(16)
  serve(scheduler, "a", ids)
  pruned = [*ids[:4], *ids[10:], 5]
  before = scheduler.prefilled_tokens
  assert_right(serve(scheduler, "a", pruned))
  assert scheduler.prefilled_tokens - before == len(pruned) - 4


def test_new_session_copies_the_longest_prefix():
  engine = FakeEngine()
  scheduler = make_scheduler(engine)
  serve(scheduler, "a", prompt(8))
  serve(scheduler, "b", [*prompt(16), 9])
  before = scheduler.prefilled_tokens
  assert_right(serve(scheduler, "c", [*prompt(16), 7]))
  assert scheduler.prefilled_tokens - before == 1
  assert engine.of("copy")[-1] == (1, 2, 16)


@pytest.mark.parametrize("window", [0, 5])
def test_group_computes_its_prompt_once(window):
  engine = FakeEngine(window=window)
  scheduler = make_scheduler(engine)
  group = [
    submit(scheduler, f"s{i}", prompt(21), seed=i, max_tokens=9)
    for i in range(4)
  ]
  drain(scheduler)
  for request in group:
    assert_right(request)
  assert scheduler.prefilled_tokens == 21 + 3
  assert scheduler.reused_tokens == 3 * 20


@pytest.mark.parametrize("window", [0, 5])
def test_different_prompts_share_their_beginning(window):
  scheduler = make_scheduler(FakeEngine(window=window))
  asked = [
    submit(scheduler, f"s{i}", prompt(18) + prompt(9, i + 1)) for i in range(4)
  ]
  drain(scheduler)
  for request in asked:
    assert_right(request)
  assert scheduler.prefilled_tokens <= 18 + 4 * 9 + 4


@pytest.mark.parametrize("how", ["cancel", "timeout", "close", "failure"])
def test_followers_go_on_without_their_leader(how):
  clock = Clock()
  engine = FakeEngine()
  scheduler = make_scheduler(engine, clock=clock)
  leader = submit(scheduler, "lead", prompt(22), timeout=5)
  followers = [submit(scheduler, f"s{i}", prompt(22), seed=i) for i in range(3)]
  scheduler.step()
  assert all(f.leader is leader for f in followers)
  if how == "cancel":
    scheduler.cancel(leader)
  elif how == "timeout":
    clock.now = 6
  elif how == "close":
    scheduler.close("lead")
  else:
    slot = leader.slot

    def fail(name, argument):
      if name == "extend" and slot in argument:
        raise OSError("device lost")

    engine.on_call = fail
  drain(scheduler)
  for request in followers:
    assert_right(request)
  assert leader.result is None
  # One of them leads the others.
  assert scheduler.prefilled_tokens < 3 * 22


def test_idle_session_that_was_away_longest_gives_up_its_slot():
  scheduler = make_scheduler()
  for i in range(4):
    serve(scheduler, f"s{i}", prompt(6, i))
  serve(scheduler, "s0", prompt(7))
  assert (scheduler.slots_in_use, scheduler.evicted) == (4, 0)
  assert_right(serve(scheduler, "new", prompt(6, 9)))
  assert (scheduler.slots_in_use, scheduler.evicted) == (4, 1)
  owners = {slot.session for slot in scheduler._slots}
  assert owners == {"s0", "new", "s2", "s3"}
  # It comes back and computes everything again.
  before = scheduler.prefilled_tokens
  assert_right(serve(scheduler, "s1", prompt(6, 1)))
  assert scheduler.prefilled_tokens - before == 6


def test_requests_of_one_session_at_once_have_a_slot_each():
  scheduler = make_scheduler()
  requests = [submit(scheduler, "a", prompt(6, i)) for i in range(3)]
  scheduler.step()
  assert scheduler.slots_in_use == 3
  drain(scheduler)
  for request in requests:
    assert_right(request)
  scheduler.close("a")
  assert scheduler.slots_in_use == 0


@pytest.mark.parametrize("window", [0, 3])
def test_cancelled_prefill_leaves_no_false_cache(window):
  scheduler = make_scheduler(FakeEngine(window=window, slots=1))
  known = prompt(16)
  serve(scheduler, "a", known)
  request = submit(scheduler, "a", [*known[:14], *prompt(20, 1)])
  scheduler.step()
  scheduler.cancel(request)
  for length in (16, 13, 10, 2):
    assert_right(serve(scheduler, "a", [*known[:length], 5]))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("steps", [1, 2])
def test_layers_with_a_window_are_not_believed_after_a_cut(
  slots, steps, drafts
):
  """What a slot forgot stays forgotten when its context becomes shorter."""
  for shared, wanted in itertools.product(range(16, 22), range(10, 22)):
    engine = FakeEngine(window=3, slots=slots, drafts=drafts)
    scheduler = make_scheduler(engine)
    context = serve(scheduler, "a", prompt(16)).context
    session = "a" if slots == 1 else "b"
    cut = submit(scheduler, session, [*context[:shared], 63])
    for _ in range(steps):
      scheduler.step()
    scheduler.cancel(cut)
    assert_right(serve(scheduler, session, [*context[:wanted], 62]))


def test_cancelled_before_its_first_chunk():
  engine = FakeEngine(window=3, slots=2)
  for wanted in range(10, 22):
    scheduler = make_scheduler(engine)
    context = serve(scheduler, "a", prompt(16)).context
    other = submit(scheduler, "b", prompt(4, 1), max_tokens=40)
    scheduler.step()
    # It is placed, but waits for others to share its call.
    cut = submit(scheduler, "a", [*context[:20], 63])
    scheduler.step()
    assert cut.cached == 20
    scheduler.cancel(cut)
    again = submit(scheduler, "a", [*context[:wanted], 62])
    drain(scheduler)
    assert_right(again)
    assert_right(other)


@pytest.mark.parametrize("drafts", [False, True])
def test_burst_cut_by_a_stop_string_leaves_a_true_cache(drafts):
  for end, back in itertools.product(range(1, 9), range(9)):
    engine = FakeEngine(window=3, burst=5, drafts=drafts)
    scheduler = make_scheduler(engine, detokenize=letters)
    ids = prompt(16)
    free = alone(ids, Sampling(max_tokens=12, seed=1))
    text = letters(free[end - 1 : end + 1])
    request = serve(scheduler, "a", ids, max_tokens=12, stop_strings=(text,))
    kept = len(request.context) - back
    assert_right(serve(scheduler, "a", [*request.context[:kept], 62]))


@pytest.mark.parametrize("drafts", [False, True])
def test_drafts_have_what_they_need(drafts):
  scheduler = make_scheduler(FakeEngine(drafts=drafts))
  group = [
    submit(scheduler, f"s{i}", [*prompt(13), i], seed=i) for i in range(6)
  ]
  drain(scheduler)
  for request in group:
    assert_right(request)


# Versions.


def test_new_weights_make_held_caches_worthless():
  scheduler = make_scheduler()
  serve(scheduler, "a", prompt(9))
  scheduler.update_weights(Params(7), 7)
  before = scheduler.prefilled_tokens
  for session in ("a", "b"):
    request = serve(scheduler, session, prompt(9))
    assert_right(request)
    assert set(request.result.versions) == {7}
    assert set(request.result.cache_versions) == {7}
  # Only what the first of them computed is used again.
  assert scheduler.prefilled_tokens - before == 9 + 1


@pytest.mark.parametrize("caches", ["recompute", "keep"])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_new_weights_amid_requests(caches, steps):
  scheduler = make_scheduler()
  requests = [
    submit(scheduler, f"s{i}", prompt(5 + 6 * i, i), max_tokens=12)
    for i in range(6)
  ]
  for _ in range(steps):
    scheduler.step()
  scheduler.update_weights(Params(3), 3, caches)
  running = [r for r in requests if r.result is None]
  begun = [r for r in running if r.cached]
  drain(scheduler)
  for request in requests:
    assert_right(request)
  mixed = [r for r in running if r.result.cache_versions[-1] == 0]
  assert mixed == (begun if caches == "keep" else [])
  assert all(r.result.versions[-1] == 3 for r in running)
  # A new turn on a mixed cache computes all of it.
  done = scheduler.prefilled_tokens
  longer = [*requests[0].context, 5]
  assert_right(serve(scheduler, "s0", longer))
  if requests[0] in mixed:
    assert scheduler.prefilled_tokens - done == len(longer)


@pytest.mark.parametrize("caches", ["recompute", "keep"])
def test_pinned_request_is_of_one_version(caches):
  scheduler = make_scheduler()
  ids = prompt(21)
  # It follows an unpinned one with the same prompt.
  free = submit(scheduler, "free", ids, max_tokens=12)
  pinned = submit(scheduler, "pinned", ids, max_tokens=20, version=0)
  scheduler.step()
  scheduler.update_weights(Params(1), 1, caches)
  for _ in range(8):
    scheduler.step()
  scheduler.update_weights(Params(2), 2, caches)
  also = submit(scheduler, "also", ids, version=0)
  assert list(scheduler.versions) == [0, 2]
  drain(scheduler)
  for request in (free, pinned, also):
    assert_right(request)
  for request in (pinned, also):
    assert set(request.result.versions) == {0}
    assert set(request.result.cache_versions) == {0}
  assert pinned.result.ids.tolist() == alone(ids, pinned.sampling)
  assert list(scheduler.versions) == [2]
  with pytest.raises(ValueError, match=r"version 0 isn't held .* \[2\]"):
    submit(scheduler, "late", ids, version=0)


def test_cache_of_two_versions_is_of_no_use_to_a_pinned_request():
  scheduler = make_scheduler()
  holder = submit(scheduler, "holder", prompt(4, 1), max_tokens=30, version=0)
  mixed = submit(scheduler, "mixed", prompt(8), max_tokens=12)
  while mixed.sampled < 2:
    scheduler.step()
  scheduler.update_weights(Params(1), 1, "keep")
  while not mixed.result:
    scheduler.step()
  pinned = submit(scheduler, "mixed", [*mixed.context, 3], version=0)
  drain(scheduler)
  for request in (holder, mixed, pinned):
    assert_right(request)
  assert set(mixed.result.versions) == {0, 1}


def test_versions_take_turns():
  scheduler = make_scheduler()
  old = submit(scheduler, "a", prompt(4), max_tokens=20, version=0)
  scheduler.step()
  scheduler.update_weights(Params(1), 1)
  new = submit(scheduler, "b", prompt(4, 1), max_tokens=20)
  drain(scheduler)
  assert_right(old)
  assert_right(new)
  slots = scheduler._limits.of("generate")
  assert all(len(s) == 1 for s in slots)
  both = slots[slots.index([new.slot]) :][:10]
  assert all(a != b for a, b in itertools.pairwise(both))


def test_wrong_updates_are_refused():
  scheduler = make_scheduler()
  serve(scheduler, "a", prompt(9))
  with pytest.raises(ValueError, match="version -1 is older than 0"):
    scheduler.update_weights(Params(-1), -1)
  with pytest.raises(ValueError, match="caches is 'drop'"):
    scheduler.update_weights(Params(1), 1, "drop")
  # The same version again: caches stay.
  scheduler.update_weights(Params(0), 0)
  before = scheduler.prefilled_tokens
  serve(scheduler, "a", prompt(9))
  assert scheduler.prefilled_tokens - before == 1
