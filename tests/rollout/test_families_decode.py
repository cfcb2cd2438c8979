"""Every published family, decoded token by token, scored as one row."""

import jax
import pytest

from tests.rollout.driver import Driver, assert_replayed, engine_of, prompt

_NAMES = (
  "deepseek_v3",
  "gpt_oss",
  "kimi_k2",
  "llama3_rope",
  "qwen3",
  "qwen3_moe",
)

# Slot -> how its request samples; prompts are shorter and longer than gpt-oss'
# window of 7, and a chunk of 8 is longer than it.
_HOW = {
  0: {"temperature": 0.0, "max_tokens": 36},
  1: {"temperature": 0.7, "max_tokens": 30},
  2: {"temperature": 1.0, "max_tokens": 9, "top_k": 5},
}


def _check(config, params, trunk=None, **shapes):
  """Compares with the learner's scores, by default of the same layout."""
  engine = engine_of(
    config, max_concurrent_decodes=3, prefill_chunk=8, **shapes
  )
  driver = Driver(engine, params)
  prompts = {
    slot: prompt(length, seed=slot, vocab_size=config.vocab_size)
    for slot, length in zip(_HOW, (5, 8, 16), strict=True)
  }
  for slot, ids in prompts.items():
    driver.fill(slot, ids)
    driver.start(slot, **_HOW[slot])
  found = driver.run(_HOW)
  config, params = trunk or (config, params)
  for slot, sampled in found.items():
    assert len(sampled.ids) == _HOW[slot]["max_tokens"]
    temperature = _HOW[slot]["temperature"] or 1.0
    assert_replayed(params, prompts[slot], sampled, temperature, config=config)
    assert bool(config.moe_layers) == bool(sampled.experts)
  return driver


@pytest.mark.parametrize("name", _NAMES)
def test_decoded_tokens_are_scored_as_by_the_learner(name, golden, cut):
  driver = _check(*_shortened(golden(name), cut))
  if name == "gpt_oss":
    lengths = {x.shape[-2] for x in jax.tree.leaves(driver.state.cache)}
    # Seven keys and a chunk; or every token.
    assert lengths == {7 + 8 - 1, 48}


def _shortened(model, cut):
  """As few layers as have every kind of them."""
  config = model.config
  kinds = max(
    config.dense_layers * bool(config.experts) + 1, len(config.windows)
  )
  return cut(config, model.params, kinds)


def test_scanned_layers_are_scored_as_by_the_learner(golden, scanned):
  model = golden("gpt_oss")
  config, params = scanned(model.config, model.params)
  _check(config, params, trunk=(model.config, model.params))


def test_drafts_of_a_published_module_change_no_score(golden, cut):
  driver = _check(
    *_shortened(golden("deepseek_v3_mtp"), cut),
    draft_tokens=2,
    draft_adaptive=False,
  )
  assert driver.engine.drafts.proposed[0] > 0
