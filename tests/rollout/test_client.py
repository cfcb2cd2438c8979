import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.model import ModelConfig, init, token_logprobs
from arl_jax.rollout.client import LocalClient
from arl_jax.rollout.engine import Engine, EngineConfig
from arl_jax.rollout.request import (
  Overloaded,
  RequestFailed,
  RequestTimeout,
)
from arl_jax.rollout.scheduler import Scheduler, SchedulerConfig
from tests.rollout.fake_engine import FakeEngine, Params

CONFIG = ModelConfig(
  vocab_size=64,
  width=32,
  heads=4,
  kv_heads=2,
  head_dim=8,
  expert_width=16,
  mtp_heads=0,
)
_LENGTH = 48
_SHAPES = EngineConfig(
  max_concurrent_decodes=4, prefill_rows=2, prefill_chunk=4, decode_steps=3
)


@pytest.fixture(scope="module")
def params():
  """Two policies."""
  return [init(CONFIG, jax.random.key(seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def shared_engine():
  return Engine(CONFIG, _SHAPES, max_length=_LENGTH)


@pytest.fixture
def scheduler(shared_engine, params):
  """Of one engine, compiled once; each test has its own slots."""
  return Scheduler(shared_engine, shared_engine.place(params[0]), 0)


@pytest.fixture
def update(scheduler, shared_engine, params):
  def to(version, **more):
    scheduler.update_weights(shared_engine.place(params[1]), version, **more)

  return to


_score = jax.jit(functools.partial(token_logprobs, config=CONFIG))


def _assert_replayed(params, prompt, sample, temperature=1.0, first=0):
  """Each recorded log-prob is the one that a whole row gives its token."""
  row = np.zeros((1, _LENGTH), np.int32)
  ids = [*prompt, *sample.ids]
  row[0, : len(ids)] = ids
  logp, _ = _score(params, input_ids=row, temperature=jnp.float32(temperature))
  np.testing.assert_allclose(
    sample.logp[first:],
    np.asarray(logp)[0, len(prompt) + first : len(ids)],
    atol=1e-4,
  )


def _prompt(length, seed=0):
  return np.random.default_rng(seed).integers(0, 64, length).tolist()


def _run(scheduler, body, seconds=60):
  """Runs `body(client)`; a hang is a failure, not a wait."""

  async def main():
    async with LocalClient(scheduler) as client:
      return await asyncio.wait_for(body(client), seconds)

  return asyncio.run(main())


async def _ask(client, session, ids, **changes):
  request = {"max_tokens": 8, "stop_ids": (), "seed": 1} | changes
  return await client.sample(session, ids, **request)


def test_log_probs_are_those_of_the_learner(scheduler, params):
  for length in (1, 4, 5, 13):
    prompt = _prompt(length)

    async def body(client, prompt=prompt):
      return await _ask(client, "a", prompt, temperature=0.7)

    sample = _run(scheduler, body)
    assert len(sample.ids) == 8
    _assert_replayed(params[0], prompt, sample, 0.7)


def test_strangers_in_the_batch_change_nothing(scheduler, params):
  prompts = [_prompt(3 + 2 * i, seed=i) for i in range(7)]

  def settings(i):
    return {
      "seed": i,
      "max_tokens": 3 + i,
      "temperature": (1.0, 0.6, 1.4)[i % 3],
    }

  async def alone(client, i):
    return await _ask(client, "x", prompts[i], **settings(i))

  async def together(client):
    async def one(i):
      # Others come and go at different times.
      await asyncio.sleep(0.002 * i)
      sample = await _ask(client, f"s{i}", prompts[i], **settings(i))
      await client.close(f"s{i}")
      return sample

    return await asyncio.gather(*(one(i) for i in range(7)))

  for i, sample in enumerate(_run(scheduler, together)):
    _assert_replayed(params[0], prompts[i], sample, settings(i)["temperature"])
    single = _run(scheduler, functools.partial(alone, i=i))
    np.testing.assert_array_equal(single.ids, sample.ids)
    np.testing.assert_allclose(single.logp, sample.logp, atol=1e-4)


def test_turns_reuse_their_prefix_and_stay_exact(scheduler, params):
  async def body(client):
    ids, turns = _prompt(6), []
    for turn in range(3):
      before = client.prefilled_tokens
      sample = await _ask(client, "a", ids, seed=turn, max_tokens=4)
      turns.append((list(ids), sample, client.prefilled_tokens - before))
      ids = [*ids, *sample.ids.tolist(), *_prompt(5, seed=10 + turn)]
    return turns

  for turn, (ids, sample, prefilled) in enumerate(_run(scheduler, body)):
    assert prefilled == (5 if turn else 6)
    _assert_replayed(params[0], ids, sample)


def test_rewritten_prefix_is_computed_anew(scheduler, params):
  # A prune: tokens 4 to 9 leave the context, what follows moves up.
  async def body(client):
    ids = _prompt(16)
    first = await _ask(client, "a", ids, seed=1)
    pruned = [*ids[:4], *ids[10:], *first.ids.tolist(), 5]
    before = client.prefilled_tokens
    second = await _ask(client, "a", pruned, seed=2)
    assert client.prefilled_tokens - before == len(pruned) - 4
    # Back to the first context, shorter than what the slot holds now.
    third = await _ask(client, "a", ids, seed=1)
    return (ids, first), (pruned, second), (ids, third)

  turns = _run(scheduler, body)
  for ids, sample in turns:
    _assert_replayed(params[0], ids, sample)
  np.testing.assert_array_equal(turns[0][1].ids, turns[2][1].ids)


def test_same_request_twice_on_a_cached_context(scheduler, params):
  # All of it is cached; one token is computed again, to start from.
  async def body(client):
    ids = _prompt(9)
    first = await _ask(client, "a", ids)
    before = client.prefilled_tokens
    second = await _ask(client, "a", ids)
    assert client.prefilled_tokens - before == 1
    return first, second

  first, second = _run(scheduler, body)
  np.testing.assert_array_equal(first.ids, second.ids)
  np.testing.assert_allclose(first.logp, second.logp, atol=1e-5)


def test_stream_depends_on_the_seed_alone(scheduler):
  async def body(client):
    ids = _prompt(5)
    return await asyncio.gather(
      *(_ask(client, f"s{i}", ids, seed=(1, 1, 2)[i]) for i in range(3))
    )

  one, same, other = _run(scheduler, body)
  np.testing.assert_array_equal(one.ids, same.ids)
  assert one.ids.tolist() != other.ids.tolist()


@pytest.mark.parametrize("limit", [1, 3, 4, 10])
def test_max_tokens_is_respected_and_a_cut_is_no_stop(scheduler, limit):
  async def body(client):
    return await _ask(client, "a", _prompt(5), max_tokens=limit)

  sample = _run(scheduler, body)
  assert len(sample.ids) == len(sample.logp) == len(sample.versions) == limit
  assert not sample.stopped
  assert sample.ids.dtype == sample.versions.dtype == np.int32
  assert sample.logp.dtype == np.float32


def test_stop_token_is_recorded_and_ends_the_sample(scheduler, params):
  async def body(client):
    free = await _ask(client, "a", _prompt(5), max_tokens=10)
    ids = free.ids.tolist()
    stop = next(t for i, t in enumerate(ids) if i >= 4 and t not in ids[:i])
    n = ids.index(stop) + 1
    absent = next(t for t in range(64) if t not in ids)
    stops = (absent, stop)
    cut = await _ask(client, "b", _prompt(5), max_tokens=10, stop_ids=stops)
    # A stop token as the very last that is allowed is a stop, not a cut.
    last = await _ask(client, "c", _prompt(5), max_tokens=n, stop_ids=stops)
    short = await _ask(
      client, "d", _prompt(5), max_tokens=n - 1, stop_ids=stops
    )
    return ids[:n], cut, last, short

  ids, cut, last, short = _run(scheduler, body)
  assert cut.ids.tolist() == last.ids.tolist() == ids
  assert cut.stopped
  assert last.stopped
  assert short.ids.tolist() == ids[:-1]
  assert not short.stopped
  _assert_replayed(params[0], _prompt(5), cut)


def test_more_sessions_than_slots_wait_and_finish(scheduler):
  finished = []

  async def body(client):
    async def one(i):
      sample = await _ask(client, f"s{i}", _prompt(4, seed=i), seed=i)
      assert client.slots_in_use <= 4
      finished.append(i)
      await client.close(f"s{i}")
      return sample

    samples = await asyncio.gather(*(one(i) for i in range(11)))
    assert client.slots_in_use == 0
    return samples

  samples = _run(scheduler, body)
  assert all(len(s.ids) == 8 for s in samples)
  # In order of arrival.
  assert [i // 4 for i in finished] == sorted(i // 4 for i in range(11))


def test_slots_are_conserved_over_many_sessions(scheduler):
  # A third is cancelled: while it waits, prefills or decodes.
  draw = np.random.default_rng(0)
  delays = draw.uniform(0, 0.02, 300)

  async def body(client):
    gate = asyncio.Semaphore(12)

    async def one(i):
      async with gate:
        task = asyncio.create_task(
          _ask(
            client, f"s{i}", _prompt(1 + i % 9), seed=i, max_tokens=1 + i % 5
          )
        )
        if i % 3 == 0:
          await asyncio.sleep(delays[i])
          task.cancel()
        try:
          await task
          return 1
        except asyncio.CancelledError:
          return 0
        finally:
          await client.close(f"s{i}")

    done = sum(await asyncio.gather(*(one(i) for i in range(300))))
    assert 200 <= done < 300
    assert client.slots_in_use == 0
    assert scheduler.running == scheduler.waiting == 0
    assert not scheduler.busy
    assert not client._futures
    # And all four still work, at once.
    return await asyncio.gather(
      *(_ask(client, f"t{i}", _prompt(5)) for i in range(4))
    )

  samples = _run(scheduler, body)
  assert len({tuple(s.ids.tolist()) for s in samples}) == 1


def test_cancelled_request_leaves_its_session_usable(scheduler, params):
  async def body(client):
    ids = _prompt(8)
    task = asyncio.create_task(_ask(client, "a", ids, max_tokens=30))
    while not client.sampled_tokens:
      await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    return await _ask(client, "a", [*ids, 3], seed=5)

  _assert_replayed(params[0], [*_prompt(8), 3], _run(scheduler, body))


def test_version_is_recorded_per_token_and_old_caches_are_dropped(
  scheduler, update, params
):
  async def body(client):
    ids = _prompt(6)
    first = await _ask(client, "a", ids, seed=1)
    update(7)
    longer = [*ids, *first.ids.tolist(), 9]
    before = client.prefilled_tokens
    second = await _ask(client, "a", longer, seed=2)
    assert client.prefilled_tokens - before == len(longer)
    return ids, first, longer, second

  ids, first, longer, second = _run(scheduler, body)
  assert set(first.versions) == {0}
  assert set(second.versions) == {7}
  _assert_replayed(params[0], ids, first)
  _assert_replayed(params[1], longer, second)


@pytest.mark.parametrize("caches", ["keep", "recompute"])
def test_weights_that_change_within_a_sample_are_stamped_token_by_token(
  scheduler, update, params, caches
):
  async def body(client):
    ids = _prompt(6)
    task = asyncio.create_task(_ask(client, "a", ids, max_tokens=12))
    while not client.sampled_tokens:
      await asyncio.sleep(0)
    update(1, caches=caches)
    sample = await task
    longer = [*ids, *sample.ids.tolist(), 9]
    before = client.prefilled_tokens
    after = await _ask(client, "a", longer, seed=2)
    # If its cache is of two versions, it is worth nothing.
    computed = len(longer) if caches == "keep" else 1
    assert client.prefilled_tokens - before == computed
    return sample, longer, after

  sample, longer, after = _run(scheduler, body)
  new = np.array([0] * 3 + [1] * 9)
  np.testing.assert_array_equal(sample.versions, new)
  if caches == "keep":
    assert set(sample.cache_versions) == {0}
  else:
    np.testing.assert_array_equal(sample.cache_versions, new)
    _assert_replayed(params[1], _prompt(6), sample, first=3)
  _assert_replayed(params[1], longer, after)


@pytest.mark.parametrize(
  ("ids", "max_tokens", "said"),
  [
    ([], 4, "ids is empty"),
    ([1, 2], 0, "max_tokens is 0"),
    ([1] * 40, 9, "must fit into 48 tokens"),
    ([1] * 48, 1, "must fit into 48 tokens"),
  ],
  ids=["empty", "no_tokens", "too_long", "full"],
)
def test_request_that_cannot_be_served_is_refused(
  scheduler, ids, max_tokens, said
):
  async def body(client):
    with pytest.raises(ValueError, match=said):
      await _ask(client, "a", ids, max_tokens=max_tokens)
    assert client.slots_in_use == 0
    # What fits exactly is served.
    return await _ask(client, "a", [1] * 40, max_tokens=8)

  assert len(_run(scheduler, body).ids) == 8


def test_use_outside_of_async_with_is_refused(scheduler):
  client = LocalClient(scheduler)
  with pytest.raises(RuntimeError, match="async with"):
    asyncio.run(_ask(client, "a", [1]))


@pytest.mark.parametrize("where", ["generate", "extend"])
def test_failure_of_the_engine_is_survived(
  scheduler, shared_engine, params, monkeypatch, where
):
  async def body(client):
    def fail(*_):
      raise OSError("device lost")

    with monkeypatch.context() as patched:
      patched.setattr(shared_engine, where, fail)
      # More than there are slots: some decode, others wait.
      results = await asyncio.gather(
        *(_ask(client, f"s{i}", _prompt(5)) for i in range(7)),
        return_exceptions=True,
      )
    assert all(isinstance(r, RequestFailed) for r in results)
    assert all("device lost" in str(r.__cause__) for r in results)
    return await _ask(client, "later", _prompt(5))

  _assert_replayed(params[0], _prompt(5), _run(scheduler, body))


@pytest.mark.parametrize("where", ["generate", "extend"])
def test_others_go_on_after_a_failure(
  scheduler, shared_engine, params, monkeypatch, where
):
  """Their caches are computed again, and what they sample is as before."""
  calm, calls = getattr(shared_engine, where), 0

  def fail_once(params, state, *rest):
    nonlocal calls
    calls += 1
    if calls == 3:
      jax.tree.map(lambda x: x.delete(), state)
      raise OSError("device lost")
    return calm(params, state, *rest)

  async def body(client):
    asked = (_ask(client, f"s{i}", _prompt(5 + i), seed=i) for i in range(4))
    return await asyncio.gather(*asked)

  expected = _run(scheduler, body)
  fresh = Scheduler(shared_engine, shared_engine.place(params[0]), 0)
  monkeypatch.setattr(shared_engine, where, fail_once)
  for i, sample in enumerate(_run(fresh, body)):
    np.testing.assert_array_equal(sample.ids, expected[i].ids)
    _assert_replayed(params[0], _prompt(5 + i), sample)
  assert calls > 3


def test_leaving_the_client_ends_what_waits(scheduler):
  async def main():
    async with LocalClient(scheduler) as client:
      task = asyncio.create_task(_ask(client, "a", _prompt(5), max_tokens=40))
      while not client.sampled_tokens:
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
      await asyncio.wait_for(task, 10)

  asyncio.run(main())


def test_closing_an_unknown_session_is_no_error(scheduler):
  async def body(client):
    await client.close("never opened")
    assert client.slots_in_use == 0

  _run(scheduler, body)


@pytest.mark.parametrize(
  "name",
  ["max_concurrent_decodes", "prefill_rows", "prefill_chunk", "decode_steps"],
)
def test_impossible_engine_is_refused_by_name(name):
  with pytest.raises(ValueError, match=rf"engine\.{name} (is 0|and)"):
    Engine(CONFIG, EngineConfig(**{name: 0}), max_length=8)


def test_as_many_stop_ids_as_declared_are_heeded(scheduler):
  async def body(client):
    free = await _ask(client, "a", _prompt(5))
    stop = int(free.ids[0])
    others = [t for t in range(64) if t != stop][: Engine.max_stop_ids - 1]
    return await _ask(client, "b", _prompt(5), stop_ids=(*others, stop))

  sample = _run(scheduler, body)
  assert len(sample.ids) == 1
  assert sample.stopped


def test_cancelled_prefill_leaves_no_false_cache(scheduler, params):
  known = _prompt(16)
  rewritten = [*known[:2], *_prompt(30, seed=1)]

  async def body(client):
    await _ask(client, "a", known)
    before = client.prefilled_tokens
    task = asyncio.create_task(_ask(client, "a", rewritten))
    # One chunk of the rewritten context is in, over the known one.
    while client.prefilled_tokens == before:
      await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return await _ask(client, "a", [*known, 5])

  _assert_replayed(params[0], [*known, 5], _run(scheduler, body))


def test_weights_that_change_within_a_prefill_start_it_anew(
  scheduler, update, params
):
  prompt = _prompt(30)

  async def body(client):
    task = asyncio.create_task(_ask(client, "a", prompt))
    while client.prefilled_tokens < 8:
      await asyncio.sleep(0)
    update(1)
    return await task

  sample = _run(scheduler, body)
  assert set(sample.versions.tolist()) == {1}
  _assert_replayed(params[1], prompt, sample)


@pytest.mark.parametrize(
  "wrong",
  [
    {"stop_ids": range(Engine.max_stop_ids + 1)},
    {"seed": 2**31},
    {"seed": -1},
    {"temperature": 0.0},
    {"temperature": float("nan")},
  ],
)
def test_a_wrong_request_fails_alone(scheduler, wrong):
  async def body(client):
    stranger, refused = await asyncio.gather(
      _ask(client, "a", _prompt(5)),
      _ask(client, "b", _prompt(5), **wrong),
      return_exceptions=True,
    )
    assert len(stranger.ids)
    assert isinstance(refused, ValueError)

  _run(scheduler, body)


def test_closing_a_running_session_ends_its_request(scheduler):
  async def body(client):
    task = asyncio.create_task(_ask(client, "a", _prompt(5), max_tokens=40))
    while not client.sampled_tokens:
      await asyncio.sleep(0)
    await client.close("a")
    with pytest.raises(asyncio.CancelledError):
      await task
    assert scheduler.running == client.slots_in_use == 0

  _run(scheduler, body)


# Of the client alone; the engine is a fake.


def _fake(**changes):
  return Scheduler(FakeEngine(), Params(0), 0, **changes)


def test_what_the_scheduler_refuses_reaches_the_caller():
  async def body(client):
    asked = (_ask(client, f"s{i}", [1, 2]) for i in range(6))
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(r, Overloaded) for r in results] == [False] * 5 + [True]
    with pytest.raises(ValueError, match="unfiltered"):
      await _ask(client, "a", [1], top_k=3)
    with pytest.raises(ValueError, match="version 3 isn't held"):
      await _ask(client, "a", [1], version=3)
    with pytest.raises(RequestTimeout, match="waiting for a slot"):
      await _ask(client, "a", [1], timeout=1e-9)
    return await _ask(client, "a", [1], top_k=3, training=False, timeout=9)

  config = SchedulerConfig(max_waiting=1)
  assert len(_run(_fake(config=config), body).ids) == 8


def test_scheduler_serves_one_client_after_another():
  scheduler = _fake()

  async def body(client):
    ids = list(range(9))
    before = client.prefilled_tokens
    await _ask(client, "a", ids)
    return client.prefilled_tokens - before

  assert _run(scheduler, body) == 9
  assert scheduler.slots_in_use == 0
  # Sessions end with their client; caches may still be of use.
  assert _run(scheduler, body) == 1


def test_bug_of_the_scheduler_hangs_nobody(monkeypatch):
  scheduler = _fake()

  def fail():
    raise KeyError("bug")

  async def body(client):
    monkeypatch.setattr(scheduler, "step", fail)
    with pytest.raises(KeyError, match="bug"):
      await _ask(client, "a", [1])
    with pytest.raises(RuntimeError, match="async with"):
      await _ask(client, "a", [1])

  _run(scheduler, body)
