"""What must not reach others: bad weights, bad callers, wrong calls."""

import asyncio

import jax
import numpy as np
import pytest

from arl_jax.rollout.client import LocalClient
from arl_jax.rollout.engine import ExistingPrefix
from arl_jax.rollout.request import RequestFailed, Sampling
from arl_jax.rollout.scheduler import Scheduler
from tests.rollout.driver import CONFIG, engine_of, policy
from tests.rollout.serving import (
  assert_right,
  drain,
  make_scheduler,
  prompt,
  submit,
)


def _finished(scheduler, session, ids, **changes):
  request = scheduler.submit(
    session, ids, Sampling(max_tokens=4, **changes), training=False
  )
  while scheduler.busy:
    scheduler.step()
  return request


@pytest.fixture(scope="module")
def engine():
  return engine_of(max_concurrent_decodes=2, decode_steps=2)


@pytest.fixture(scope="module")
def weights(engine):
  return engine.place(policy())


def test_numbers_that_are_none_do_not_stay_in_a_slot(engine, weights):
  broken = engine.place(jax.tree.map(lambda x: x * np.nan, policy()))
  scheduler = Scheduler(engine, broken, 0)
  for i in range(3):
    request = _finished(scheduler, f"bad{i}", list(range(1, 12)))
    assert isinstance(request.error, RequestFailed)
    assert "finite" in str(request.error)
    scheduler.close(f"bad{i}")
  # Prefilled with bad weights, and cancelled before anybody could notice.
  unnoticed = scheduler.submit("c", [1, 2, 3], Sampling(max_tokens=9))
  scheduler.step()
  scheduler.cancel(unnoticed)
  scheduler.update_weights(weights, 1)
  wanted = _finished(Scheduler(engine, weights, 1), "alone", [5, 6, 7])
  for i in range(4):
    request = _finished(scheduler, f"good{i}", [5, 6, 7])
    assert request.error is None
    np.testing.assert_array_equal(request.result.ids, wanted.result.ids)


def test_detokenize_that_raises_fails_its_own_request():
  def raises(ids):
    raise UnicodeDecodeError("utf-8", b"", 0, 1, "cut")

  scheduler = make_scheduler(detokenize=raises)
  bad = submit(
    scheduler, "a", prompt(5), training=False, stop_strings=("x",), max_tokens=9
  )
  good = submit(scheduler, "b", prompt(6), max_tokens=9)
  drain(scheduler)
  assert isinstance(bad.error, RequestFailed)
  assert isinstance(bad.error.__cause__, UnicodeDecodeError)
  assert_right(good)


@pytest.mark.parametrize("session", [[1], None, 3])
def test_session_is_a_text(session):
  with pytest.raises(ValueError, match="session is"):
    submit(make_scheduler(), session, prompt(4))


@pytest.mark.parametrize("ids", ["abc", [1.0], None, [[1, 2]]])
def test_ids_are_integers(ids):
  scheduler = make_scheduler()
  with pytest.raises(ValueError, match="ids must be token ids"):
    scheduler.submit("a", ids, Sampling(max_tokens=1))


@pytest.mark.parametrize("version", [float("nan"), "1", None])
def test_version_is_an_integer(engine, weights, version):
  scheduler = Scheduler(engine, weights, 0)
  with pytest.raises(ValueError, match="not an integer"):
    scheduler.update_weights(weights, version)
  assert scheduler.version == 0


def test_weights_come_from_the_engine(engine, weights):
  scheduler = Scheduler(engine, weights, 0)
  for wrong in (None, policy(), (1, 2)):
    with pytest.raises(ValueError, match=r"not what Engine\.place gives"):
      scheduler.update_weights(wrong, 1)
  params = policy()
  with pytest.raises(ValueError, match=r"params\['norm'\] has shape \(3,\)"):
    engine.place({**params, "norm": params["norm"][:3]})
  del params["norm"]
  with pytest.raises(ValueError, match=r"params\['norm'\] has shape None"):
    engine.place(params)


def test_two_clients_cannot_drive_one_scheduler(engine, weights):
  scheduler = Scheduler(engine, weights, 0)

  async def body():
    async with LocalClient(scheduler):
      with pytest.raises(RuntimeError, match="another client"):
        async with LocalClient(scheduler):
          pass

  asyncio.run(body())


def test_client_works_in_one_event_loop_after_another(engine, weights):
  client = LocalClient(Scheduler(engine, weights, 0))

  async def body():
    async with client:
      return await client.sample("a", [1, 2], max_tokens=3, stop_ids=(), seed=1)

  one, two = asyncio.run(body()), asyncio.run(body())
  np.testing.assert_array_equal(one.ids, two.ids)


def test_budget_bounds_the_slots():
  each = engine_of(max_concurrent_decodes=1).bytes_per_slot
  slots = {"max_concurrent_decodes": 4}
  assert engine_of(cache_bytes=2 * each, **slots).slots == 2
  assert engine_of(cache_bytes=9 * each, **slots).slots == 4
  with pytest.raises(ValueError, match=r"engine.cache_bytes is 10; one slot"):
    engine_of(cache_bytes=10, **slots)


@pytest.mark.parametrize(
  ("given", "said"),
  [
    ({"true_length": -1}, "true_length is -1"),
    ({"true_length": 9}, r"true_length is 9, not in 1\.\.3"),
    ({"padded_tokens": [1, CONFIG.vocab_size]}, "the model knows 0 to"),
    ({"padded_tokens": [-7, 1]}, "tokens are -7 to 1"),
  ],
)
def test_prompts_are_checked(engine, weights, given, said):
  given = {"padded_tokens": [1, 2, 3], "true_length": 2, **given}
  with pytest.raises(ValueError, match=said):
    engine.prefill(params=weights, **given)


def test_prefixes_and_slots_are_checked(engine, weights):
  prefix, _ = engine.prefill(
    params=weights, padded_tokens=[1, 2, 3], true_length=3
  )
  longer = ExistingPrefix(prefix, list(range(1, 9)))
  with pytest.raises(ValueError, match="common_prefix_tokens has 8 tokens"):
    engine.prefill(
      params=weights,
      padded_tokens=[4],
      true_length=1,
      existing_prefix=longer,
    )
  state = engine.init_decode_state()
  for slot in (-1, 2):
    with pytest.raises(ValueError, match=f"slot is {slot}, not in"):
      engine.insert(prefix, state, slot)
