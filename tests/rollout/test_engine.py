"""The engine: however a token is computed, it is the one the learner scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import sharding
from arl_jax.learner import throughput
from arl_jax.model import specs
from arl_jax.rollout.engine import Engine, EngineConfig, ExistingPrefix
from arl_jax.rollout.request import Sampling
from tests.rollout.driver import (
  CONFIG,
  LENGTH,
  Driver,
  Sampled,
  assert_replayed,
  assert_same,
  engine_of,
  policy,
  prompt,
)


@pytest.fixture(scope="module")
def engine():
  """Compiled once; it holds no state."""
  return engine_of()


@pytest.fixture
def driver(engine):
  return Driver(engine, policy())


def _padded(ids, length=32):
  return np.pad(np.array(ids, np.int32), (0, length - len(ids)))


def _prefilled(driver, ids, **how):
  return driver.engine.prefill(
    params=driver.params,
    padded_tokens=_padded(ids),
    true_length=len(ids),
    **how,
  )


def test_prompt_in_chunks_of_any_size_gives_the_same_tokens(driver):
  ids = prompt(21)
  whole = driver.sample(0, ids, temperature=0.8, max_tokens=27)
  assert len(whole.ids) == 27
  assert_replayed(policy(), ids, whole, 0.8)
  for slot, size in enumerate((1, 4, 8, 20)):
    part = driver.sample(slot, ids, size=size, temperature=0.8, max_tokens=27)
    assert_same(part, whole)


def test_strangers_in_the_batch_change_nothing(driver):
  prompts = [prompt(3 + 5 * i, seed=i) for i in range(4)]
  hows = [
    {"seed": i, "temperature": t, "max_tokens": 9 + 3 * i}
    for i, t in enumerate((1.0, 0.6, 0.0, 1.4))
  ]
  alone = [driver.sample(2, prompts[i], **hows[i]) for i in range(4)]
  together = [Sampled() for _ in range(4)]
  # Each comes a call later than the one before, so they end at different times.
  for calls in range(9):
    if calls < 4:
      driver.fill(calls, prompts[calls])
      driver.start(calls, **hows[calls])
    result = driver.step()
    for slot, sampled in enumerate(together):
      sampled.absorb(result, slot)
  for i, how in enumerate(hows):
    assert_same(together[i], alone[i])
    assert_replayed(policy(), prompts[i], alone[i], how["temperature"] or 1.0)


def test_slots_are_extended_together(driver):
  prompts = {1: prompt(20, seed=1), 3: prompt(2, seed=3)}
  rows = {slot: (0, ids) for slot, ids in prompts.items()}
  driver.state = driver.engine.extend(driver.params, driver.state, rows)
  for slot in prompts:
    driver.start(slot)
  for slot, sampled in driver.run(prompts).items():
    assert_replayed(policy(), prompts[slot], sampled)


def test_turns_go_on_from_the_cache_of_those_before(driver):
  ids = prompt(6)
  for turn in range(3):
    stay = turn and len(ids) - 3
    sampled = driver.sample(0, ids, stay=stay, seed=turn, max_tokens=8)
    assert_replayed(policy(), ids, sampled)
    ids = [*ids, *sampled.ids, *prompt(3, seed=turn)]


def test_slot_restarts_from_a_part_of_what_it_held(driver):
  reused = []
  held = prompt(30, seed=9)
  driver.fill(0, held)
  written = len(held)
  # As a scheduler does it: `written` is the most the slot held since it was
  # last begun anew, for a layer with a window forgets accordingly.
  for common, added in ((29, 2), (21, 1), (18, 4), (7, 3), (3, 9), (11, 5)):
    ids = [*held[:common], *prompt(added, seed=common)]
    stay = driver.engine.reusable(written, common)
    reused.append(stay)
    sampled = driver.sample(0, ids, stay=stay, max_tokens=3)
    assert_replayed(policy(), ids, sampled)
    held = [*ids, *sampled.ids]
    written = max(written if stay else 0, len(held))
  # 34 tokens were there, and a chunk is 24.
  assert reused == [29, 21, 18, 0, 3, 11]


@pytest.mark.parametrize("length", [20, 13])
def test_copied_prefix_goes_on_exactly(driver, length):
  ids = prompt(20)
  driver.fill(0, ids)
  driver.state = driver.engine.copy_prefix(driver.state, 0, 2, length)
  longer = [*ids[:length], *prompt(4, seed=5)]
  copied = driver.sample(2, longer, stay=length)
  assert_replayed(policy(), longer, copied)
  # Its source is as it was.
  assert_replayed(policy(), ids, driver.sample(0, ids, stay=20))


def test_copy_of_a_whole_prompt_samples_at_once(driver):
  ids = prompt(20)
  driver.fill(0, ids)
  driver.state = driver.engine.copy_prefix(driver.state, 0, 1, len(ids))
  assert_same(
    driver.sample(1, ids, stay=20, seed=4),
    driver.sample(0, ids, stay=20, seed=4),
  )


def test_jetstreams_methods_give_the_same_tokens(driver):
  ids = prompt(27)
  how = Sampling(max_tokens=9, seed=3, temperature=0.9)
  want = driver.sample(0, ids, **dataclasses.asdict(how))
  prefix, first = _prefilled(driver, ids, sampling=how)
  got = Sampled()
  got.absorb(first, 0)
  assert len(got.ids) == 1
  driver.state = driver.engine.bulk_insert(prefix, driver.state, [3, 1])
  rest = driver.run([1, 3])
  assert_same(rest[1], rest[3])
  for name in ("ids", "logp", "sampled_logp", "experts"):
    getattr(got, name).extend(getattr(rest[1], name))
  assert_same(got, want)
  assert_replayed(policy(), ids, got, 0.9)


@pytest.mark.parametrize("common", [1, 20, 27])
def test_prefill_goes_on_from_an_existing_prefix(driver, common):
  ids = prompt(27)
  prefix, _ = _prefilled(driver, ids)
  tail = prompt(5, seed=2)
  _, first = _prefilled(
    driver, tail, existing_prefix=ExistingPrefix(prefix, ids[:common])
  )
  sampled = Sampled()
  sampled.absorb(first, 0)
  assert_replayed(policy(), [*ids[:common], *tail], sampled)


def test_prefix_whose_first_token_was_its_last_does_not_go_on(driver):
  ids = prompt(5)
  _, first = _prefilled(driver, ids)
  stop = int(first.tokens[0, 0])
  for how in ({"max_tokens": 1}, {"max_tokens": 9, "stop_ids": (stop,)}):
    prefix, _ = _prefilled(driver, ids, sampling=Sampling(**how))
    driver.state = driver.engine.insert(prefix, driver.state, 1)
    result = driver.step()
    assert not result.active.any()
    assert not result.lengths.any()


def test_several_samples_of_a_prompt_have_consecutive_seeds(driver):
  ids = prompt(5)
  samples = driver.engine.prefill_multisampling(
    num_samples=3,
    params=driver.params,
    padded_tokens=_padded(ids),
    true_length=5,
    sampling=Sampling(max_tokens=4, seed=6),
  )
  for seed, (_, first) in enumerate(samples, 6):
    want = driver.sample(0, ids, seed=seed, max_tokens=1)
    assert first.tokens[0, 0] == want.ids[0]


def test_result_at_a_slot_has_jetstreams_fields(driver):
  driver.fill(1, prompt(5))
  driver.start(1, max_tokens=5)
  driver.step()
  result = driver.step()
  part = result.get_result_at_slot(1)
  # The second call had two tokens left to sample, of three.
  np.testing.assert_array_equal(part.valid, [[1, 1, 0]])
  np.testing.assert_array_equal(part.lengths, [5])
  np.testing.assert_array_equal(part.tokens, result.tokens[1:2])
  np.testing.assert_array_equal(part.log_prob, result.log_prob[1:2])
  assert not result.get_result_at_slot(0).valid.any()


def test_generate_advances_the_named_slots_only(driver):
  for slot in range(3):
    driver.fill(slot, prompt(5, seed=slot))
    driver.start(slot, max_tokens=9)
  result = driver.step([0, 2])
  np.testing.assert_array_equal(result.lengths, [3, 0, 3, 0])
  np.testing.assert_array_equal(result.active, [True, True, True, False])
  late = driver.run([1])[1]
  assert_same(late, driver.sample(3, prompt(5, seed=1), max_tokens=9))


def test_freed_slot_stops_and_keeps_its_cache(driver):
  ids = prompt(5)
  for slot in (0, 1):
    driver.fill(slot, ids)
    driver.start(slot, max_tokens=30, seed=slot)
  first = Sampled()
  first.absorb(driver.step(), 0)
  driver.state = driver.engine.free_resource(0, driver.state)
  result = driver.step()
  np.testing.assert_array_equal(result.lengths, [0, 3, 0, 0])
  longer = [*ids, *first.ids, 7]
  sampled = driver.sample(0, longer, stay=len(longer) - 1)
  assert_replayed(policy(), longer, sampled)


def test_new_weights_go_on_with_the_old_cache(driver):
  ids = prompt(8)
  driver.fill(0, ids)
  driver.start(0, max_tokens=6)
  first, second = Sampled(), Sampled()
  first.absorb(driver.step(), 0)
  driver.params = driver.engine.place(policy(1))
  second.absorb(driver.step(), 0)
  assert_replayed(policy(), ids, first)
  # Where sampling starts anew with the new weights, the learner agrees again.
  assert len(second.ids) == 3
  assert second.logp != pytest.approx(
    driver.sample(1, [*ids, *first.ids], max_tokens=3).logp, abs=1e-4
  )
  longer = [*ids, *first.ids, *second.ids]
  assert_replayed(policy(1), longer, driver.sample(0, longer))


def test_full_slot_ends_whatever_its_limit(driver):
  ids = prompt(LENGTH - 4)
  sampled = driver.sample(0, ids, max_tokens=100)
  assert len(sampled.ids) == 4
  assert not sampled.stopped
  assert_replayed(policy(), ids, sampled)
  # And one that is full already ends at once.
  driver.start(0, max_tokens=100)
  result = driver.step()
  assert not result.lengths.any()
  assert not result.active.any()


def test_tokens_sampled_before_count_against_the_limit(driver):
  ids = prompt(6)
  whole = driver.sample(0, ids, max_tokens=7, seed=2)
  # A request that was moved: the first four tokens are part of the context.
  longer = [*ids, *whole.ids[:4]]
  driver.fill(1, longer)
  how = Sampling(max_tokens=7, seed=2)
  driver.state = driver.engine.start(driver.state, 1, how, sampled=4)
  assert driver.run([1])[1].ids == whole.ids[4:]


def test_stop_id_ends_a_request_and_is_its_last_token(driver):
  ids = prompt(6)
  free = driver.sample(0, ids, max_tokens=12)
  stop = free.ids[4]
  others = [i for i in range(64) if i not in free.ids][:7]
  ended = driver.sample(1, ids, max_tokens=12, stop_ids=(*others, stop))
  assert ended.ids == free.ids[: free.ids.index(stop) + 1]
  assert ended.stopped
  assert not free.stopped


def test_slot_without_numbers_ends_alone(driver):
  for slot in range(2):
    driver.fill(slot, prompt(5))
    driver.start(slot)
  hidden = driver.state.hidden.at[0].set(jnp.nan)
  driver.state = driver.state.replace(hidden=hidden)
  result = driver.step()
  np.testing.assert_array_equal(result.finite, [False, True, True, True])
  np.testing.assert_array_equal(result.active, [False, True, False, False])
  assert (result.tokens >= 0).all()
  assert (result.tokens < CONFIG.vocab_size).all()
  # The slot is as good as new for the next one.
  assert_replayed(policy(), prompt(7), driver.sample(0, prompt(7)))


def test_caches_of_another_type_than_the_parameters(driver):
  narrow = Driver(engine_of(given={"dtype": jnp.bfloat16}), policy())
  ids = prompt(12)
  got, want = (d.sample(0, ids, max_tokens=1) for d in (narrow, driver))
  kinds = {x.dtype for x in jax.tree.leaves(narrow.state.cache)}
  assert kinds == {jnp.dtype("bfloat16")}
  assert got.ids == want.ids
  assert abs(got.logp[0] - want.logp[0]) < 0.05


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("prefill_rows", 0),
    ("prefill_chunk", 0),
    ("decode_steps", 0),
    ("max_concurrent_decodes", -1),
    ("cache_bytes", -1),
    ("draft_tokens", -1),
  ],
)
def test_impossible_engine_is_refused_by_name(field, value):
  config = EngineConfig(**{field: value})
  with pytest.raises(ValueError, match=f"engine.{field} is {value}"):
    Engine(CONFIG, config, max_length=8)


def test_engine_without_slots_or_drafts_module_is_refused():
  with pytest.raises(ValueError, match=r"cache_bytes are both 0"):
    Engine(CONFIG, EngineConfig(max_concurrent_decodes=0), max_length=8)
  with pytest.raises(ValueError, match="max_length is 1"):
    Engine(CONFIG, EngineConfig(), max_length=1)
  plain = dataclasses.replace(CONFIG, mtp_heads=0)
  with pytest.raises(ValueError, match="mtp_heads is 0"):
    Engine(plain, EngineConfig(draft_tokens=2), max_length=8)
  for ids in ([], [64], [-1, 3]):
    with pytest.raises(ValueError, match="draft_ids"):
      Engine(CONFIG, EngineConfig(draft_tokens=1), max_length=8, draft_ids=ids)


@pytest.mark.parametrize("drafts", [0, 2])
def test_slots_are_as_many_as_the_budget_holds(drafts):
  # Keys and values of 2 heads of 8 numbers, of 4 bytes. The layer with a
  # window of 5 keeps what a call of 4 tokens sees, as does the MTP module's.
  one = 2 * 2 * 8 * 4 * (LENGTH + 8 * (2 if drafts else 1))
  shapes = {
    "max_concurrent_decodes": 0,
    "prefill_chunk": 4,
    "draft_tokens": drafts,
  }
  engine = engine_of(cache_bytes=7 * one + 5, **shapes)
  assert engine.bytes_per_slot == one
  assert engine.slots == engine.max_concurrent_decodes == 7
  state = jax.eval_shape(engine.init_decode_state)
  caches = jax.tree.leaves((state.cache, state.draft_cache))
  assert sum(x.size * x.dtype.itemsize for x in caches) == 7 * one
  with pytest.raises(ValueError, match=f"takes {one} bytes"):
    engine_of(cache_bytes=one - 1, **shapes)


def test_prompt_that_leaves_no_room_is_refused(driver):
  with pytest.raises(ValueError, match="true_length is 0, not in"):
    _prefilled(driver, [])
  with pytest.raises(ValueError, match="a prompt of 48 tokens leaves no room"):
    driver.engine.prefill(
      params=driver.params, padded_tokens=[1] * 48, true_length=48
    )


def _how(slot):
  return {
    "max_tokens": 7,
    "seed": 1,
    "top_k": slot,
    "temperature": slot / 2,
  }


def _served(driver):
  """Requests that go through everything a scheduler calls."""
  for slot, length in enumerate((5, 1, 30)):
    driver.fill(slot, prompt(length, seed=slot))
  rows = {1: (1, [5] * 20), 3: (0, [4])}
  driver.state = driver.engine.extend(driver.params, driver.state, rows)
  driver.state = driver.engine.copy_prefix(driver.state, 2, 0, 17)
  for slot in range(4):
    driver.start(slot, **_how(slot))
  driver.step([1])
  driver.state = driver.engine.free_resource(1, driver.state)
  return driver.run(range(4))


def test_nothing_is_compiled_after_warm_up():
  throughput.compilations()
  # Spans of 128 and of 150 tokens.
  config = dataclasses.replace(CONFIG, layers=1, dense_width=16, experts=0)
  engine = engine_of(config, max_length=150, draft_tokens=1)
  params = policy(config=config)
  driver = Driver(engine, params)
  engine.warm_up(driver.params)
  before = throughput.compilations()
  _served(driver)
  ids = prompt(132)
  sampled = driver.sample(1, ids, max_tokens=18)
  assert throughput.compilations() == before
  # Its cache is of two blocks.
  assert_replayed(params, ids, sampled, config=config, length=150)


def test_second_prefill_compiles_nothing(driver):
  throughput.compilations()
  for length in (5, 8):
    before = throughput.compilations()
    prefix, _ = _prefilled(driver, prompt(length))
    driver.state = driver.engine.insert(prefix, driver.state, length % 3)
    driver.run([length % 3])
  assert throughput.compilations() == before


@pytest.mark.slow
def test_many_devices_give_what_one_does(golden, cut):
  throughput.compilations()
  model = golden("qwen3_moe")
  config, params = cut(model.config, model.params, 1)
  on_one_device = _served(Driver(engine_of(config), params))
  mesh = sharding.make_mesh(data=2, expert=2, tensor=2)
  places = sharding.shardings(specs(config), mesh)
  engine = engine_of(config, given={"mesh": mesh})
  driver = Driver(engine, jax.device_put(params, places))
  engine.warm_up(driver.params)
  before = throughput.compilations()
  for slot, sampled in _served(driver).items():
    assert_same(sampled, on_one_device[slot])
    np.testing.assert_array_equal(sampled.experts, on_one_device[slot].experts)
  assert throughput.compilations() == before
  # JetStream's prefill has a state of one slot, which can't be split.
  prefix, first = _prefilled(
    driver, prompt(30, seed=2), sampling=Sampling(**_how(2))
  )
  driver.state = driver.engine.insert(prefix, driver.state, 3)
  ids = [first.tokens[0, 0], *driver.run([3])[3].ids]
  assert ids == on_one_device[2].ids
