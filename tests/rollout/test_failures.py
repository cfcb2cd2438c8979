import pytest

from arl_jax.rollout.request import RequestFailed
from tests.rollout.fake_engine import FakeEngine, alone
from tests.rollout.serving import (
  assert_right,
  drain,
  letters,
  make_scheduler,
  prompt,
  serve,
  submit,
)


class _Failing(FakeEngine):
  """Fails calls in which a poisonous token takes part, and loses the state."""

  def __init__(self, where, tokens, **changes):
    super().__init__(**changes)
    self.where, self.tokens = where, set(tokens)

  def extend(self, params, state, rows):
    if self.where == "extend":
      for _, ids in rows.values():
        if self.tokens & set(ids):
          state.donated = True
          raise OSError("device lost")
    return super().extend(params, state, rows)

  def generate(self, params, state, slots):
    if self.where == "generate":
      for slot in slots:
        if self.tokens & {t for t, _ in state.rows[slot].full}:
          state.donated = True
          raise OSError("device lost")
    return super().generate(params, state, slots)


@pytest.mark.parametrize("where", ["extend", "generate"])
@pytest.mark.parametrize("bad", [0, 2, 5])
def test_failure_hits_the_request_that_fails_alone(where, bad):
  # Only the bad prompt has the token 63; nobody samples it in between.
  engine = _Failing(where, {63})
  scheduler = make_scheduler(engine)
  requests = []
  for i in range(7):
    ids = [t % 60 for t in prompt(9, i)]
    requests.append(
      submit(scheduler, f"s{i}", [*ids, 63, 1] if i == bad else ids, seed=i)
    )
  for request in requests:
    if request is not requests[bad]:
      assert 63 not in alone(request.ids, request.sampling)
  assert len(drain(scheduler)) == 7
  for request in requests:
    if request is requests[bad]:
      assert isinstance(request.error, RequestFailed)
      assert isinstance(request.error.__cause__, OSError)
      assert "device lost" in str(request.error)
    else:
      assert_right(request)
  assert scheduler.failed == 1
  assert_right(serve(scheduler, "later", prompt(5)))


@pytest.mark.parametrize(
  "where", ["extend", "generate", "start", "copy", "free"]
)
@pytest.mark.parametrize("nth", [0, 1, 3])
def test_failure_that_does_not_come_again(where, nth):
  count = 0

  def on_call(name, _):
    nonlocal count
    if name == where:
      count += 1
      if count == nth + 1:
        raise OSError("device lost")

  engine = FakeEngine(on_call=on_call)
  scheduler = make_scheduler(engine, detokenize=letters)
  requests = [
    submit(scheduler, f"s{i}", prompt(13), seed=i, stop_strings=("5", "Z"))
    for i in range(8)
  ]
  drain(scheduler)
  for request in requests:
    assert_right(request)
  assert scheduler.failed == 0


def test_failure_that_shows_in_a_later_call_hits_who_caused_it():
  """As on a device that works asynchronously."""
  engine = FakeEngine()
  broken = False

  def on_call(name, argument):
    nonlocal broken
    if name == "init":
      broken = False
    if name == "extend":
      broken |= any(63 in ids for _, ids in argument.values())
    if name == "generate" and broken:
      raise OSError("device lost")

  engine.on_call = on_call
  scheduler = make_scheduler(engine)
  running = submit(scheduler, "a", [1, 2, 3], max_tokens=30)
  scheduler.step()
  bad = submit(scheduler, "b", [63, *prompt(12)])
  others = [submit(scheduler, f"s{i}", [i, 4], seed=i) for i in range(4)]
  drain(scheduler)
  failed = [r for r in (running, bad, *others) if r.error]
  assert failed == [bad]
  # All began anew when it failed, and once more when it failed alone.
  assert len(engine.of("init")) == 3


def test_suspects_share_calls_again():
  calls = 0

  def on_call(name, _):
    nonlocal calls
    calls += name == "generate"
    if name == "generate" and calls == 3:
      raise OSError("device lost")

  engine = FakeEngine(on_call=on_call)
  scheduler = make_scheduler(engine)
  for i in range(4):
    submit(scheduler, f"s{i}", prompt(5, i), max_tokens=30)
  drain(scheduler)
  widths = [len(slots) for slots in engine.of("generate")]
  assert widths[3:7] == [1, 1, 1, 1]
  assert set(widths[8:12]) == {4}
  assert scheduler.failed == 0


@pytest.mark.parametrize("where", ["extend", "generate", "init"])
def test_engine_that_always_fails_fails_everything_and_may_recover(where):
  broken = False

  def on_call(name, _):
    if broken and (name == where or where == "init"):
      raise OSError("device lost")

  scheduler = make_scheduler(FakeEngine(on_call=on_call))
  broken = True
  requests = [submit(scheduler, f"s{i}", prompt(5, i)) for i in range(6)]
  drain(scheduler)
  assert all(isinstance(r.error, RequestFailed) for r in requests)
  late = submit(scheduler, "late", prompt(5))
  broken = False
  drain(scheduler)
  assert_right(late)


def test_interrupted_call_leaves_a_usable_scheduler():
  def on_call(name, _):
    if name == "generate":
      raise KeyboardInterrupt

  engine = FakeEngine(on_call=on_call)
  scheduler = make_scheduler(engine)
  request = submit(scheduler, "a", prompt(5))
  with pytest.raises(KeyboardInterrupt):
    drain(scheduler)
  engine.on_call = lambda *_: None
  drain(scheduler)
  assert_right(request)


def test_logits_that_are_not_finite_fail_only_their_request():
  engine = FakeEngine()
  scheduler = make_scheduler(engine)
  engine.poison = {63}
  requests = [
    submit(scheduler, f"s{i}", [*prompt(5, i + 1), *[63] * (i == 1)])
    for i in range(4)
  ]
  drain(scheduler)
  failed = [r for r in requests if r.error]
  assert failed == [r for r in requests if 63 in r.context] != []
  assert requests[1] in failed
  assert "aren't finite" in str(requests[1].error)
  for request in requests:
    if request not in failed:
      assert_right(request)
  # What it computed isn't used again.
  assert scheduler._slots[requests[1].slot].held == []
