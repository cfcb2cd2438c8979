import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.model import ModelConfig, init, token_logprobs
from arl_jax.rollout.client import LocalClient
from arl_jax.rollout.engine import MAX_STOP_IDS, Engine, EngineConfig

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
def shared_engine(params):
  return Engine(CONFIG, params[0], _SHAPES, max_length=_LENGTH)


@pytest.fixture
def engine(shared_engine, params):
  """One engine, compiled once; each test gets it as it began."""
  shared_engine.state = shared_engine._empty()
  shared_engine.update_weights(params[0], 0)
  return shared_engine


_score = jax.jit(functools.partial(token_logprobs, config=CONFIG))


def _assert_replayed(params, prompt, sample, temperature=1.0):
  """Each recorded log-prob is the one that a whole row gives its token."""
  row = np.zeros((1, _LENGTH), np.int32)
  ids = [*prompt, *sample.ids]
  row[0, : len(ids)] = ids
  logp, _ = _score(params, input_ids=row, temperature=jnp.float32(temperature))
  np.testing.assert_allclose(
    sample.logp, np.asarray(logp)[0, len(prompt) : len(ids)], atol=1e-4
  )


def _prompt(length, seed=0):
  return np.random.default_rng(seed).integers(0, 64, length).tolist()


def _run(engine, body, seconds=60):
  """Runs `body(client)`; a hang is a failure, not a wait."""

  async def main():
    async with LocalClient(engine) as client:
      return await asyncio.wait_for(body(client), seconds)

  return asyncio.run(main())


async def _ask(client, session, ids, **changes):
  request = {"max_tokens": 8, "stop_ids": (), "seed": 1} | changes
  return await client.sample(session, ids, **request)


def test_log_probs_are_those_of_the_learner(engine, params):
  for length in (1, 4, 5, 13):
    prompt = _prompt(length)

    async def body(client, prompt=prompt):
      return await _ask(client, "a", prompt, temperature=0.7)

    sample = _run(engine, body)
    assert len(sample.ids) == 8
    _assert_replayed(params[0], prompt, sample, 0.7)


def test_strangers_in_the_batch_change_nothing(engine, params):
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

  for i, sample in enumerate(_run(engine, together)):
    _assert_replayed(params[0], prompts[i], sample, settings(i)["temperature"])
    single = _run(engine, functools.partial(alone, i=i))
    np.testing.assert_array_equal(single.ids, sample.ids)
    np.testing.assert_allclose(single.logp, sample.logp, atol=1e-4)


def test_turns_reuse_their_prefix_and_stay_exact(engine, params):
  async def body(client):
    ids, turns = _prompt(6), []
    for turn in range(3):
      before = client.prefilled_tokens
      sample = await _ask(client, "a", ids, seed=turn, max_tokens=4)
      turns.append((list(ids), sample, client.prefilled_tokens - before))
      ids = [*ids, *sample.ids.tolist(), *_prompt(5, seed=10 + turn)]
    return turns

  for turn, (ids, sample, prefilled) in enumerate(_run(engine, body)):
    assert prefilled == (5 if turn else 6)
    _assert_replayed(params[0], ids, sample)


def test_rewritten_prefix_is_computed_anew(engine, params):
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

  turns = _run(engine, body)
  for ids, sample in turns:
    _assert_replayed(params[0], ids, sample)
  np.testing.assert_array_equal(turns[0][1].ids, turns[2][1].ids)


def test_same_request_twice_on_a_cached_context(engine, params):
  # All of it is cached; one token is computed again, to start from.
  async def body(client):
    ids = _prompt(9)
    first = await _ask(client, "a", ids)
    before = client.prefilled_tokens
    second = await _ask(client, "a", ids)
    assert client.prefilled_tokens - before == 1
    return first, second

  first, second = _run(engine, body)
  np.testing.assert_array_equal(first.ids, second.ids)
  np.testing.assert_allclose(first.logp, second.logp, atol=1e-5)


def test_stream_depends_on_the_seed_alone(engine):
  async def body(client):
    ids = _prompt(5)
    return await asyncio.gather(
      *(_ask(client, f"s{i}", ids, seed=(1, 1, 2)[i]) for i in range(3))
    )

  one, same, other = _run(engine, body)
  np.testing.assert_array_equal(one.ids, same.ids)
  assert one.ids.tolist() != other.ids.tolist()


@pytest.mark.parametrize("limit", [1, 3, 4, 10])
def test_max_tokens_is_respected_and_a_cut_is_no_stop(engine, limit):
  async def body(client):
    return await _ask(client, "a", _prompt(5), max_tokens=limit)

  sample = _run(engine, body)
  assert len(sample.ids) == len(sample.logp) == len(sample.versions) == limit
  assert not sample.stopped
  assert sample.ids.dtype == sample.versions.dtype == np.int32
  assert sample.logp.dtype == np.float32


def test_stop_token_is_recorded_and_ends_the_sample(engine, params):
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

  ids, cut, last, short = _run(engine, body)
  assert cut.ids.tolist() == last.ids.tolist() == ids
  assert cut.stopped
  assert last.stopped
  assert short.ids.tolist() == ids[:-1]
  assert not short.stopped
  _assert_replayed(params[0], _prompt(5), cut)


def test_more_sessions_than_slots_wait_and_finish(engine):
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

  samples = _run(engine, body)
  assert all(len(s.ids) == 8 for s in samples)
  # In order of arrival.
  assert [i // 4 for i in finished] == sorted(i // 4 for i in range(11))


def test_slots_are_conserved_over_many_sessions(engine):
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
    assert sorted(client._free) == [0, 1, 2, 3]
    assert not client._decoding
    assert not client._prefilling
    assert not client._waiting
    # And all four still work, at once.
    return await asyncio.gather(
      *(_ask(client, f"t{i}", _prompt(5)) for i in range(4))
    )

  samples = _run(engine, body)
  assert len({tuple(s.ids.tolist()) for s in samples}) == 1


def test_cancelled_request_leaves_its_session_usable(engine, params):
  async def body(client):
    ids = _prompt(8)
    task = asyncio.create_task(_ask(client, "a", ids, max_tokens=30))
    while not client.sampled_tokens:
      await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    return await _ask(client, "a", [*ids, 3], seed=5)

  _assert_replayed(params[0], [*_prompt(8), 3], _run(engine, body))


def test_version_is_recorded_per_token_and_old_caches_are_dropped(
  engine, params
):
  async def body(client):
    ids = _prompt(6)
    first = await _ask(client, "a", ids, seed=1)
    engine.update_weights(params[1], 7)
    longer = [*ids, *first.ids.tolist(), 9]
    before = client.prefilled_tokens
    second = await _ask(client, "a", longer, seed=2)
    assert client.prefilled_tokens - before == len(longer)
    return ids, first, longer, second

  ids, first, longer, second = _run(engine, body)
  assert set(first.versions) == {0}
  assert set(second.versions) == {7}
  _assert_replayed(params[0], ids, first)
  _assert_replayed(params[1], longer, second)


def test_weights_that_change_within_a_sample_are_stamped_token_by_token(
  engine, params
):
  async def body(client):
    ids = _prompt(6)
    task = asyncio.create_task(_ask(client, "a", ids, max_tokens=12))
    while not client.sampled_tokens:
      await asyncio.sleep(0)
    engine.update_weights(params[1], 1)
    sample = await task
    longer = [*ids, *sample.ids.tolist(), 9]
    before = client.prefilled_tokens
    after = await _ask(client, "a", longer, seed=2)
    # Its cache is of two versions: worth nothing.
    assert client.prefilled_tokens - before == len(longer)
    return sample, longer, after

  sample, longer, after = _run(engine, body)
  assert sample.versions.tolist() == [0] * 3 + [1] * 9
  _assert_replayed(params[1], longer, after)


@pytest.mark.parametrize(
  ("ids", "max_tokens"),
  [
    ([], 4),
    ([1, 2], 0),
    ([1] * 40, 9),
    ([1] * 48, 1),
  ],
  ids=["empty", "no_tokens", "too_long", "full"],
)
def test_request_that_cannot_be_served_is_refused(engine, ids, max_tokens):
  async def body(client):
    with pytest.raises(ValueError, match="must fit into 48 tokens"):
      await _ask(client, "a", ids, max_tokens=max_tokens)
    assert client.slots_in_use == 0
    # What fits exactly is served.
    return await _ask(client, "a", [1] * 40, max_tokens=8)

  assert len(_run(engine, body).ids) == 8


def test_use_outside_of_async_with_is_refused(engine):
  client = LocalClient(engine)
  with pytest.raises(RuntimeError, match="async with"):
    asyncio.run(_ask(client, "a", [1]))


@pytest.mark.parametrize("where", ["generate", "prefill"])
def test_failure_of_the_engine_reaches_every_waiting_request(
  engine, monkeypatch, where
):
  def fail(*_):
    raise OSError("device lost")

  async def body(client):
    monkeypatch.setattr(engine, where, fail)
    # More than there are slots: some decode, others wait.
    results = await asyncio.gather(
      *(_ask(client, f"s{i}", _prompt(5)) for i in range(7)),
      return_exceptions=True,
    )
    assert [str(r) for r in results] == ["device lost"] * 7
    with pytest.raises(RuntimeError):
      await _ask(client, "later", _prompt(5))

  _run(engine, body)


def test_leaving_the_client_ends_what_waits(engine):
  async def main():
    async with LocalClient(engine) as client:
      task = asyncio.create_task(_ask(client, "a", _prompt(5), max_tokens=40))
      while not client.sampled_tokens:
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
      await asyncio.wait_for(task, 10)

  asyncio.run(main())


def test_closing_an_unknown_session_is_no_error(engine):
  async def body(client):
    await client.close("never opened")
    assert client.slots_in_use == 0

  _run(engine, body)


@pytest.mark.parametrize(
  "name",
  ["max_concurrent_decodes", "prefill_rows", "prefill_chunk", "decode_steps"],
)
def test_impossible_engine_is_refused_by_name(name, params):
  with pytest.raises(ValueError, match=f"engine.{name} is 0"):
    Engine(CONFIG, params[0], EngineConfig(**{name: 0}), max_length=8)


def test_as_many_stop_ids_as_declared_are_heeded(engine):
  async def body(client):
    free = await _ask(client, "a", _prompt(5))
    stop = int(free.ids[0])
    others = [t for t in range(64) if t != stop][: MAX_STOP_IDS - 1]
    return await _ask(client, "b", _prompt(5), stop_ids=(*others, stop))

  sample = _run(engine, body)
  assert len(sample.ids) == 1
  assert sample.stopped


def test_cancelled_prefill_leaves_no_false_cache(engine, params):
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

  _assert_replayed(params[0], [*known, 5], _run(engine, body))


def test_weights_that_change_within_a_prefill_start_it_anew(engine, params):
  prompt = _prompt(30)

  async def body(client):
    task = asyncio.create_task(_ask(client, "a", prompt))
    while client.prefilled_tokens < 8:
      await asyncio.sleep(0)
    engine.update_weights(params[1], 1)
    return await task

  sample = _run(engine, body)
  assert set(sample.versions.tolist()) == {1}
  _assert_replayed(params[1], prompt, sample)


@pytest.mark.parametrize(
  "wrong",
  [
    {"stop_ids": range(MAX_STOP_IDS + 1)},
    {"seed": 2**31},
    {"seed": -1},
    {"temperature": 0.0},
    {"temperature": float("nan")},
  ],
)
def test_a_wrong_request_fails_alone(engine, wrong):
  async def body(client):
    stranger, refused = await asyncio.gather(
      _ask(client, "a", _prompt(5)),
      _ask(client, "b", _prompt(5), **wrong),
      return_exceptions=True,
    )
    assert len(stranger.ids)
    assert isinstance(refused, ValueError)

  _run(engine, body)


def test_closing_a_running_session_ends_its_request(engine):
  async def body(client):
    task = asyncio.create_task(_ask(client, "a", _prompt(5), max_tokens=40))
    while not client.sampled_tokens:
      await asyncio.sleep(0)
    await client.close("a")
    with pytest.raises(asyncio.CancelledError):
      await task
    assert not engine.state.active.any()

  _run(engine, body)
