"""Drafts change how fast tokens come, and nothing else."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.model import ModelConfig, forward
from arl_jax.rollout import sampling
from arl_jax.rollout.request import Sampling
from arl_jax.rollout.speculative import DraftPolicy
from tests.rollout.driver import (
  CONFIG,
  LENGTH,
  Driver,
  Sampled,
  assert_same,
  engine_of,
  policy,
  prompt,
)
from tests.rollout.driver import assert_replayed as _assert_replayed

# A window in the layer and in the module: both caches forget.
_CONFIG = dataclasses.replace(CONFIG, layers=1, windows=(5,))
_PARAMS = functools.partial(policy, 0, _CONFIG)
assert_replayed = functools.partial(_assert_replayed, config=_CONFIG)

# Of each slot: greedy, two temperatures, and filters that drafts don't know.
_HOW = {
  0: {"temperature": 0.0, "max_tokens": 17},
  1: {"temperature": 0.5, "max_tokens": 10, "seed": 7},
  2: {"temperature": 1.3, "max_tokens": 11, "seed": 8},
  3: {"top_k": 6, "top_p": 0.9, "forbidden": (3, 5), "max_tokens": 12},
}


@functools.cache
def _engine(k, draft_ids=None, prefill_chunk=5):
  # Chunks are short, so that caches of windows are tight.
  return engine_of(
    _CONFIG,
    draft_tokens=k,
    draft_adaptive=False,
    prefill_chunk=prefill_chunk,
    given={"draft_ids": draft_ids},
  )


def _served(driver, hows=_HOW):
  for slot, how in hows.items():
    driver.fill(slot, prompt(4 + 3 * slot, seed=slot))
    driver.start(slot, **how)
  return driver.run(hows)


@pytest.fixture(scope="module")
def plain():
  return _served(Driver(_engine(0), _PARAMS()))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_drafts_change_no_token(k, plain):
  engine = _engine(k)
  before = engine.drafts.proposed.copy()
  found = _served(Driver(engine, _PARAMS()))
  for slot, sampled in found.items():
    assert_same(sampled, plain[slot])
    np.testing.assert_array_equal(sampled.experts, plain[slot].experts)
    temperature = _HOW[slot].get("temperature", 1.0) or 1.0
    ids = prompt(4 + 3 * slot, seed=slot)
    assert_replayed(_PARAMS(), ids, sampled, temperature)
  assert (engine.drafts.proposed - before)[0] > 0


def test_drafts_of_few_tokens_change_no_token(plain):
  driver = Driver(_engine(2, (1, 2, 3, 20, 20)), _PARAMS())
  head = driver.params[1]
  np.testing.assert_array_equal(head.ids, [1, 2, 3, 20])
  for slot, sampled in _served(driver).items():
    assert_same(sampled, plain[slot])


@pytest.fixture(scope="module")
def oracle(plain):
  """An engine whose drafts are right, and in slot 3 always wrong."""
  wanted = np.zeros((4, LENGTH), np.int32)
  for slot, sampled in plain.items():
    wanted[slot, : len(sampled.ids)] = sampled.ids
    wanted[slot] += slot == 3

  def guess(logits, ids, state, ahead):
    del ids
    at = jnp.minimum(state.sampled + ahead, LENGTH - 1)
    return jnp.asarray(wanted)[jnp.arange(4), at] % logits.shape[1]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampling, "guess", guess)
    engine = _engine.__wrapped__(2)
    # Compiled as it is now.
    _served(Driver(engine, _PARAMS()))
  return engine


def test_right_drafts_are_all_accepted(oracle, plain):
  driver = Driver(oracle, _PARAMS())
  before = oracle.drafts.proposed.copy(), oracle.drafts.accepted.copy()
  ids = prompt(4)
  driver.fill(0, ids)
  driver.start(0, **_HOW[0])
  result = driver.step()
  # Three steps of a token and two drafts.
  np.testing.assert_array_equal(result.lengths, [9, 0, 0, 0])
  proposed = oracle.drafts.proposed - before[0]
  np.testing.assert_array_equal(proposed, [3, 3])
  np.testing.assert_array_equal(oracle.drafts.accepted - before[1], [3, 3])
  sampled = Sampled()
  sampled.absorb(result, 0)
  result = driver.step()
  # The limit of 17 is one less than two more steps have.
  np.testing.assert_array_equal(result.lengths, [8, 0, 0, 0])
  assert not result.active.any()
  sampled.absorb(result, 0)
  assert_same(sampled, plain[0])
  # What can't be sampled any more wasn't proposed.
  proposed = oracle.drafts.proposed - before[0]
  np.testing.assert_array_equal(proposed, [6, 5])


@pytest.mark.parametrize("place", range(5))
def test_stop_id_among_accepted_drafts_ends_the_request(oracle, plain, place):
  driver = Driver(oracle, _PARAMS())
  want = plain[2].ids
  stop = want[place]
  how = {**_HOW[2], "stop_ids": (stop,)}
  ended = _served(driver, {2: how})[2]
  assert ended.ids == want[: want.index(stop) + 1]
  assert ended.stopped
  length = int(driver.state.length[2])
  assert length == len(prompt(10)) + len(ended.ids)
  assert_replayed(_PARAMS(), prompt(10, seed=2), ended, 1.3)
  # Its cache is whole: the next turn goes on from it.
  longer = [*prompt(10, seed=2), *ended.ids, 9]
  after = driver.sample(2, longer, stay=length, max_tokens=4)
  assert_replayed(_PARAMS(), longer, after)


def test_accepted_drafts_stop_at_the_slots_end(oracle, plain):
  driver = Driver(oracle, _PARAMS())
  # Shifted to the end of the slot; seed and index alone are the same.
  ids = prompt(LENGTH - 5, seed=3)
  sampled = driver.sample(1, ids, max_tokens=30, temperature=0.0)
  assert len(sampled.ids) == 5
  assert_replayed(_PARAMS(), ids, sampled)
  want = Driver(_engine(0), _PARAMS()).sample(
    1, ids, max_tokens=30, temperature=0.0
  )
  assert_same(sampled, want)


def test_wrong_drafts_are_all_rejected(oracle, plain):
  before = oracle.drafts.proposed.copy(), oracle.drafts.accepted.copy()
  found = _served(Driver(oracle, _PARAMS()), {3: _HOW[3]})
  assert_same(found[3], plain[3])
  # No draft follows the last token.
  proposed = oracle.drafts.proposed - before[0]
  np.testing.assert_array_equal(proposed, [_HOW[3]["max_tokens"] - 1, 0])
  np.testing.assert_array_equal(oracle.drafts.accepted, before[1])


def _entries(driver, slot, length):
  """The module's cache at the positions that count of what it keeps."""
  blocks = driver.state.draft_cache
  whole = {
    k: np.concatenate([b[slot] for b in v], 1) for k, v in blocks.items()
  }
  kept = next(iter(whole.values())).shape[1]
  # Pairs of a token and the state before it: one less than tokens. The window
  # is what the next pair sees.
  seen = np.arange(max(0, length - 5), length - 1) % kept
  return np.concatenate([whole[k][:, seen] for k in sorted(whole)], 1)


def _at_once(ids):
  """The module's cache after a prefill in one go, of another engine."""
  driver = Driver(_engine(2, None, 24), _PARAMS())
  driver.fill(0, ids)
  return _entries(driver, 0, len(ids))


def _same_entries(driver, slot, ids):
  np.testing.assert_allclose(
    _entries(driver, slot, len(ids)), _at_once(ids), atol=1e-4
  )


@pytest.mark.parametrize("size", [1, 3, 5])
def test_modules_cache_is_the_same_in_chunks(size):
  driver = Driver(_engine(2), _PARAMS())
  ids = prompt(19)
  driver.fill(1, ids, size=size)
  _same_entries(driver, 1, ids)


@pytest.mark.parametrize("k", [1, 2])
def test_modules_cache_after_sampling_is_that_of_a_prefill(k):
  driver = Driver(_engine(k), _PARAMS())
  ids = prompt(9)
  sampled = driver.sample(1, ids, max_tokens=13)
  _same_entries(driver, 1, [*ids, *sampled.ids])


def test_modules_cache_after_sampling_without_drafts():
  engine = _engine(2, None, 24)
  driver = Driver(engine, _PARAMS())
  ids = prompt(9)
  _, first = engine.prefill(
    params=driver.params,
    padded_tokens=ids,
    true_length=9,
    sampling=Sampling(max_tokens=5),
  )
  prefix, _ = engine.prefill(
    params=driver.params,
    padded_tokens=ids,
    true_length=9,
    sampling=Sampling(max_tokens=5),
  )
  driver.state = engine.insert(prefix, driver.state, 3)
  _same_entries(driver, 3, [*ids, int(first.tokens[0, 0])])


@pytest.mark.parametrize("common", [19, 18, 17])
def test_modules_cache_after_a_copy_or_a_restart(common):
  driver = Driver(_engine(2), _PARAMS())
  held = prompt(19)
  longer = [*held[:common], *prompt(3, seed=1)]
  stay = driver.engine.reusable(len(held), common)
  # All of it, or but one token: the state before the first new one is needed.
  assert stay == (19 if common == 19 else common - 1)
  driver.fill(0, held)
  driver.state = driver.engine.copy_prefix(driver.state, 0, 2, stay)
  for slot in (2, 0):
    driver.fill(slot, longer, stay=stay)
    _same_entries(driver, slot, longer)


@pytest.mark.parametrize("k", [2, 4])
def test_what_rejected_drafts_overwrote_is_not_reused(k):
  driver = Driver(_engine(k), _PARAMS())
  reused = 0
  for seed in range(6):
    ids = prompt(11, seed=seed)
    driver.fill(0, ids)
    # It is cancelled: near its limit it would draft less.
    driver.start(0, seed=seed, max_tokens=30)
    sampled = Sampled()
    sampled.absorb(driver.step(), 0)
    driver.state = driver.engine.free_resource(0, driver.state)
    held = [*ids, *sampled.ids]
    for cut in range(1, 5):
      # From the slot as it was, each time.
      driver.state = driver.engine.copy_prefix(driver.state, 0, 1, len(held))
      common = len(held) - cut
      stay = driver.engine.reusable(len(held), common)
      reused += stay > 0
      longer = [*held[:common], 1 + seed]
      after = driver.sample(1, longer, stay=stay, max_tokens=2)
      assert_replayed(_PARAMS(), longer, after)
  # With k = 4 a chunk is no longer than a step: nothing is left over.
  assert (reused > 0) == (k < 4)


# Few tokens, so that all continuations can be counted.
_TINY = ModelConfig(
  vocab_size=5,
  width=16,
  heads=2,
  head_dim=8,
  layers=1,
  dense_width=16,
  experts=0,
)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_with_drafts_is_distributed_as_the_policy(temperature):
  slots, rounds = 256, 12
  params = policy(3, _TINY)
  driver = Driver(_tiny_engine(slots), params)
  driver.fill(0, [1, 2])
  begun = driver.state
  # The same prompt in every slot.
  kept = jax.device_get((begun.cache, begun.draft_cache, begun.hidden))
  kept = jax.tree.map(lambda x: np.repeat(x[:1], slots, 0), kept)
  how = begun.sampling.replace(
    temperature=jnp.full(slots, temperature), limit=jnp.full(slots, 3)
  )
  counts = np.zeros((5, 5, 5))
  for turn in range(rounds):
    cache, draft_cache, hidden = jax.tree.map(jnp.asarray, kept)
    seeds = jnp.arange(slots, dtype=jnp.int32) + turn * slots
    driver.state = begun.replace(
      cache=cache,
      draft_cache=draft_cache,
      hidden=hidden,
      length=jnp.full(slots, 2),
      hidden_at=jnp.full(slots, 2),
      active=jnp.ones(slots, bool),
      # What a call was given is gone.
      sampling=jax.tree.map(jnp.copy, how.replace(seed=seeds)),
    )
    result = driver.step()
    np.testing.assert_array_equal(result.lengths, 3)
    np.add.at(counts, tuple(result.tokens[:, :3].T), 1)
  expected = _exact(params, temperature) * slots * rounds
  # Continuations that are rare are put together.
  rare = expected < 5
  cells = np.append(counts[~rare], counts[rare].sum())
  wanted = np.append(expected[~rare], expected[rare].sum())
  chi_2 = ((cells - wanted) ** 2 / np.maximum(wanted, 1)).sum()
  freedom = len(cells) - 1
  # Its mean and four of its standard deviations.
  assert chi_2 < freedom + 4 * (2 * freedom) ** 0.5
  # Some were accepted, others not.
  accepted = driver.engine.drafts.acceptance[0]
  assert 0.1 < accepted < 1


@functools.cache
def _tiny_engine(slots):
  return engine_of(
    _TINY,
    max_length=8,
    max_concurrent_decodes=slots,
    draft_tokens=2,
    draft_adaptive=False,
  )


def _exact(params, temperature):
  """Probability [5, 5, 5] of each continuation of [1, 2]."""
  rows = np.array([[1, 2, *x] for x in itertools.product(range(5), repeat=3)])
  logits = forward(params, _TINY, jnp.asarray(rows, jnp.int32))
  p = np.asarray(jax.nn.softmax(logits / temperature, -1), np.float64)
  each = np.stack([p[np.arange(125), 1 + i, rows[:, 2 + i]] for i in range(3)])
  return each.prod(0).reshape(5, 5, 5)


def _settled(policy, cost, accepted, calls=300):
  """Choices of a policy; `accepted(j)` is the share at position j."""
  chosen = []
  for _ in range(calls):
    k = policy.choose()
    chosen.append(k)
    proposed, right = np.zeros(k, int), np.zeros(k, int)
    alive = 100
    for j in range(k):
      proposed[j] = alive
      right[j] = alive = round(alive * accepted(j))
    policy.learn(k, proposed, right, cost(k))
  return chosen


def test_drafts_that_are_never_right_are_switched_off_and_retried():
  chosen = _settled(DraftPolicy(4), lambda k: 1 + 0.1 * k, lambda j: 0.0)
  assert set(chosen[-100:]) <= {0, 1}
  assert 1 <= chosen[-256:].count(1) <= 2


@pytest.mark.parametrize(
  ("slope", "share", "best"),
  [(0.0, 0.9, 4), (0.05, 0.9, 4), (0.3, 0.6, 1), (1.0, 0.9, 0), (0.1, 0.5, 2)],
)
def test_as_many_are_drafted_as_give_most_tokens_a_second(slope, share, best):
  def rate(k):
    return sum(share**j for j in range(k + 1)) / (1 + slope * k)

  assert max(range(5), key=rate) == best
  policy = DraftPolicy(4)
  chosen = _settled(policy, lambda k: 1 + slope * k, lambda j: share)
  assert max(set(chosen[-100:]), key=chosen[-100:].count) == best


def test_drafts_that_become_better_are_used_again():
  policy = DraftPolicy(3)
  _settled(policy, lambda k: 1 + 0.05 * k, lambda j: 0.0)
  chosen = _settled(policy, lambda k: 1 + 0.05 * k, lambda j: 1.0, calls=600)
  # One more at each retry.
  assert set(chosen[-100:]) == {3}


def test_without_adapting_the_limit_is_drafted_always():
  policy = DraftPolicy(3, adaptive=False)
  assert _settled(policy, lambda k: 9.0 * k, lambda j: 0.0, 9) == [3] * 9
  assert DraftPolicy(0).choose() == 0
  assert policy.acceptance == [0, 0, 0]
