import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.rollout.request import (
  Overloaded,
  RequestTimeout,
  Sampling,
)
from arl_jax.rollout.scheduler import SchedulerConfig
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


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_samples_are_those_of_the_request_alone(length, window):
  request = serve(
    make_scheduler(FakeEngine(window=window)), "a", prompt(length)
  )
  assert_right(request)
  assert request.result.ids.tolist() == alone(request.ids, request.sampling)
  assert request.result.finish == "length"
  assert request.result.ids.dtype == request.result.versions.dtype == np.int32


def test_stop_id_ends_a_request_and_is_kept():
  free = alone(prompt(5), Sampling(max_tokens=9, seed=1))
  request = serve(
    make_scheduler(), "a", prompt(5), max_tokens=9, stop_ids=(free[4],)
  )
  assert_right(request)
  assert request.result.ids.tolist() == free[: free.index(free[4]) + 1]
  assert request.result.finish == "stop_id"


def test_requests_join_and_leave_a_running_batch():
  scheduler = make_scheduler()
  requests = [
    submit(scheduler, f"s{i}", prompt(3 + i, i), max_tokens=4 + 3 * (i % 4))
    for i in range(9)
  ]
  done = drain(scheduler)
  assert len(done) == 9
  widths = scheduler._limits.of("generate")
  for request in requests:
    assert_right(request)
  # A slot that is free is filled while others go on sampling.
  assert max(map(len, widths)) == 4
  assert len(widths) < 9 * 4


def test_slots_are_given_in_order_of_arrival():
  scheduler = make_scheduler()
  order = [submit(scheduler, f"s{i}", prompt(5, i)) for i in range(12)]
  admitted = []
  while scheduler.busy:
    scheduler.step()
    admitted += [r for r in order if r.slot >= 0 and r not in admitted]
  assert admitted == order


def test_long_prompt_does_not_hold_up_short_ones():
  engine = FakeEngine(prefill_rows=1, slots=3)
  scheduler = make_scheduler(engine)
  long = submit(scheduler, "long", prompt(40), max_tokens=1)
  short = [
    submit(scheduler, f"s{i}", prompt(4, i), max_tokens=1) for i in (1, 2)
  ]
  done = drain(scheduler)
  assert done == [*short, long]
  # Its chunks alternate with theirs.
  assert [next(iter(rows)) for rows in engine.of("extend")][:3] == [0, 1, 2]


@pytest.mark.parametrize("patience", [0, 2])
def test_prefill_waits_only_so_long_for_others(patience):
  engine = FakeEngine()
  config = SchedulerConfig(prefill_patience=patience)
  scheduler = make_scheduler(engine, config=config)
  submit(scheduler, "a", prompt(4), max_tokens=40)
  scheduler.step()
  late = submit(scheduler, "b", prompt(4, 1))
  del engine.calls[:]
  while not late.result:
    scheduler.step()
  names = [name for name, _ in engine.calls]
  assert names.index("extend") == patience
  # And decoding goes on between the chunks of others.
  assert names[names.index("extend") + 2] == "generate"


def test_decoding_goes_on_while_others_prefill():
  engine = FakeEngine()
  scheduler = make_scheduler(engine)
  first = submit(scheduler, "a", prompt(4), max_tokens=9)
  scheduler.step()
  for i in range(3):
    submit(scheduler, f"s{i}", prompt(40, i), max_tokens=1)
  while not first.result:
    scheduler.step()
  assert len(engine.of("extend")) <= len(engine.of("generate")) + 1


# Bounds.


def test_overload_is_refused_at_once():
  scheduler = make_scheduler(config=SchedulerConfig(max_waiting=2))
  for i in range(6):
    submit(scheduler, f"s{i}", prompt(4))
  with pytest.raises(Overloaded, match="6 requests wait for 4 slots"):
    submit(scheduler, "more", prompt(4))
  assert len(drain(scheduler)) == 6
  submit(scheduler, "more", prompt(4))
  drain(scheduler)


@pytest.mark.parametrize(
  ("steps", "said"),
  [(0, "waiting for a slot"), (2, "in prefill"), (12, "decoding")],
)
def test_time_out_says_where_the_request_was(steps, said):
  clock = Clock()
  scheduler = make_scheduler(FakeEngine(slots=1), clock=clock)
  request = submit(scheduler, "a", prompt(32), max_tokens=16, timeout=3)
  for _ in range(steps):
    scheduler.step()
  sampled = request.sampled
  clock.now = 3
  assert scheduler.step() == [request]
  assert isinstance(request.error, RequestTimeout)
  assert said in str(request.error)
  assert f"with {sampled} of 16 tokens" in str(request.error)
  assert (sampled > 0) == (said == "decoding")
  assert scheduler.timed_out == 1
  assert_right(serve(scheduler, "b", prompt(5)))


def test_default_time_out_is_that_of_the_configuration():
  clock = Clock()
  scheduler = make_scheduler(config=SchedulerConfig(timeout=9), clock=clock)
  request = submit(scheduler, "a", prompt(5))
  clock.now = 9
  assert scheduler.step() == [request]
  assert "more than 9 s" in str(request.error)


def test_thousand_cancelled_requests_leave_all_slots():
  scheduler = make_scheduler(FakeEngine(window=5))
  draw = random.Random(0)
  live, kept = [], []
  for i in range(1000):
    ids = prompt(draw.randint(1, 30), draw.randint(0, 20))
    live.append(submit(scheduler, f"s{i % 7}", ids, max_tokens=8, seed=i))
    for _ in range(draw.randint(0, 3)):
      scheduler.step()
    if draw.random() < 0.9:
      scheduler.cancel(live.pop(draw.randrange(len(live))))
    if draw.random() < 0.05:
      scheduler.close(f"s{draw.randint(0, 6)}")
    kept += [r for r in live if r.result]
    live = [r for r in live if not r.result and not r.cancelled]
  drain(scheduler)
  for request in [*kept, *live]:
    assert_right(request)
  for i in range(7):
    scheduler.close(f"s{i}")
  assert scheduler.slots_in_use == 0
  requests = [submit(scheduler, f"t{i}", prompt(5, i)) for i in range(4)]
  scheduler.step()
  assert scheduler.running == 4
  drain(scheduler)
  for request in requests:
    assert_right(request)


def test_closing_cancels_what_the_session_asked():
  scheduler = make_scheduler(FakeEngine(slots=1))
  asked = [submit(scheduler, "a", prompt(5, i)) for i in range(2)]
  other = submit(scheduler, "b", prompt(5))
  scheduler.step()
  assert set(scheduler.close("a")) == set(asked)
  assert scheduler.close("unknown") == []
  assert drain(scheduler) == [other]
  assert all(r.cancelled for r in asked)
  assert scheduler.cancelled == 2
  scheduler.cancel(other)
  assert scheduler.cancelled == 2
  assert_right(other)


# Limits.


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"ids": []}, "ids is empty"),
    ({"ids": [3, 64]}, "ids has 64, .* vocabulary of 64"),
    ({"ids": [-1]}, "ids has -1"),
    ({"ids": [1] * 43}, "43 ids with max_tokens 6 must fit into 48 tokens"),
    ({"max_tokens": 0}, "max_tokens is 0, not >= 1"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": -1.0}, "temperature is -1.0, not 0 or in 0.001"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_p": 0.0}, "top_p is 0.0, not > 0 and <= 1"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**31}, "seed is 2147483648, not in 0..2"),
    ({"stop_ids": (64,)}, "stop_ids is .64,., not of ids in 0..63"),
    ({"stop_ids": (1, 2, 3, 4, 5)}, "5 ids; a request may have 4"),
    ({"logit_bias": {64: 1.0}}, "logit_bias is"),
    ({"logit_bias": {1: math.inf}}, "logit_bias is .* in .10000"),
    ({"forbidden": (-1,)}, "forbidden is"),
    ({"forbidden": tuple(range(64))}, "whole vocabulary"),
    ({"forbidden": (1, 2), "logit_bias": {3: 1.0, 4: 1.0, 5: 1.0}}, "have 5"),
    ({"stop_strings": ("",)}, "stop_strings is"),
    ({"stop_strings": "text"}, "stop_strings is"),
    ({"stop_strings": (b"A",)}, "stop_strings is"),
    ({"temperature": 1e-46}, "temperature is 1e-46"),
    ({"temperature": None}, "temperature is None, not a number"),
    ({"max_tokens": "3"}, "max_tokens is '3', not an integer"),
    ({"seed": 1.5}, "seed is 1.5, not an integer"),
    ({"top_k": 2**40}, "top_k is 1099511627776, not in 0..64"),
    ({"stop_ids": 5}, "stop_ids is 5, not a tuple"),
    ({"forbidden": (1.5,)}, "forbidden is"),
    ({"logit_bias": {3: 1e39}}, "logit_bias is"),
    ({"logit_bias": [(1, 2.0)]}, "logit_bias is"),
    ({"timeout": "1"}, "timeout is '1'"),
    ({"timeout": 0}, "timeout is 0"),
    ({"timeout": math.nan}, "timeout is nan"),
    ({"version": 4}, r"version 4 isn't held .* \[0\]"),
  ],
  ids=str,
)
def test_impossible_requests_are_refused(changes, said):
  scheduler = make_scheduler(detokenize=letters)
  with pytest.raises(ValueError, match=said):
    submit(scheduler, "a", **{"ids": prompt(5), "training": False} | changes)
  assert not scheduler.busy
  assert scheduler.slots_in_use == 0
  # What fits exactly is served.
  assert_right(serve(scheduler, "a", [1] * 42))


@pytest.mark.parametrize(
  "changes",
  [
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"temperature": 0.0},
    {"logit_bias": {1: 1.0}},
    {"forbidden": (1,)},
  ],
  ids=str,
)
def test_training_needs_the_unfiltered_distribution(changes):
  scheduler = make_scheduler()
  (name,) = changes
  with pytest.raises(ValueError, match=f"unfiltered distribution, not {name}"):
    submit(scheduler, "a", prompt(5), **changes)
  request = submit(scheduler, "a", prompt(5), training=False, **changes)
  drain(scheduler)
  assert request.result


@pytest.mark.parametrize(
  ("field", "value"),
  [("max_waiting", -1), ("prefill_patience", -1), ("timeout", math.nan)],
)
def test_impossible_configuration_is_refused_by_name(field, value):
  with pytest.raises(ValueError, match=rf"scheduler\.{field} is {value}"):
    make_scheduler(config=SchedulerConfig(**{field: value}))


# Everything at once.

_ACTIONS = st.lists(
  st.one_of(
    st.tuples(
      st.just("submit"),
      st.integers(0, 5),
      st.integers(1, 30),
      st.integers(0, 2),
      st.integers(1, 12),
      st.sampled_from([None, "oldest", "newest"]),
    ),
    st.tuples(st.just("turn"), st.integers(0, 50), st.integers(0, 4)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 50)),
    st.tuples(st.just("close"), st.integers(0, 5)),
    st.tuples(st.just("update"), st.sampled_from(["recompute", "keep"])),
    st.tuples(st.just("fail"), st.sampled_from(["extend", "generate"])),
  ),
  min_size=20,
  max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(
  actions=_ACTIONS,
  window=st.sampled_from([0, 1, 5]),
  drafts=st.booleans(),
  slots=st.integers(1, 4),
  rows=st.integers(1, 3),
)
def test_any_order_of_events_ends_well(actions, window, drafts, slots, rows):
  failures = []

  def on_call(name, _):
    if failures and failures[0] == name:
      failures.pop()
      raise OSError("device lost")

  engine = FakeEngine(
    window=window,
    drafts=drafts,
    slots=slots,
    prefill_rows=rows,
    on_call=on_call,
  )
  scheduler = make_scheduler(engine)
  requests = []
  for name, *arguments in actions:
    _act(scheduler, requests, failures, name, *arguments)
  drain(scheduler)
  for request in requests:
    if request.cancelled or request.error:
      assert request.result is None
      assert request.error is None or "device lost" in str(request.error)
    else:
      assert_right(request)
      if request.pinned:
        assert set(request.result.cache_versions) == {request.version}
  assert scheduler.failed <= sum(a[0] == "fail" for a in actions)
  assert list(scheduler.versions) == [scheduler.version]
  for session in range(6):
    scheduler.close(f"s{session}")
  assert scheduler.slots_in_use == 0
  failures.clear()
  again = [submit(scheduler, f"t{i}", prompt(5, i)) for i in range(slots)]
  scheduler.step()
  assert scheduler.running == slots
  drain(scheduler)
  for request in again:
    assert_right(request)


def _act(scheduler, requests, failures, name, *arguments):
  if name == "submit":
    session, length, seed, tokens, pinned = arguments
    held = list(scheduler.versions)
    at = {"oldest": 0, "newest": -1}.get(pinned)
    pin = {} if at is None else {"version": held[at]}
    requests.append(
      submit(
        scheduler,
        f"s{session}",
        prompt(30, seed)[:length],
        max_tokens=tokens,
        seed=len(requests),
        stop_ids=(1, 2),
        **pin,
      )
    )
  elif name == "turn" and requests:
    # A prefix of an earlier context, and something new.
    which, more = arguments
    last = requests[which % len(requests)]
    ids = [*last.context[: len(last.context) - which % 3], *prompt(more, 9)]
    if 0 < len(ids) <= 40:
      requests.append(submit(scheduler, last.session, ids, seed=which))
  elif name == "step":
    for _ in range(arguments[0]):
      scheduler.step()
  elif name == "cancel" and requests:
    scheduler.cancel(requests[arguments[0] % len(requests)])
  elif name == "close":
    scheduler.close(f"s{arguments[0]}")
  elif name == "update":
    version = scheduler.version + 1
    scheduler.update_weights(Params(version), version, arguments[0])
  elif name == "fail":
    failures[:] = [arguments[0]]
