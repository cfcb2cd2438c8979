"""A published model on real text, against its goldens (`make models`)."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import checkpoints
from arl_jax.model import decoding, init_cache, token_logprobs, transformer

_ROOT = pathlib.Path(__file__).parents[2]
_FILE = _ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_GOLDEN = _ROOT / "tests" / "testdata" / "smollm2" / "smollm2.json"
_CASES = json.loads(_GOLDEN.read_text())["cases"]
# Of the golden's README: log-probs within 2e-3 nats. They agree within 3e-5.
_NATS = 2e-3
_LENGTH = 64

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not _FILE.exists(), reason=f"{_FILE.name} is absent: make models"
  ),
]


@pytest.fixture(scope="module")
def smollm2():
  return checkpoints.load(_FILE, dtype=np.float32)


@pytest.fixture(scope="module")
def rows():
  """Every case in a row of its own, with the numbers of its segment."""
  ids = np.zeros((len(_CASES), _LENGTH), np.int32)
  for row, case in zip(ids, _CASES, strict=True):
    row[: len(case["token_ids"])] = case["token_ids"]
  lengths = np.array([len(case["token_ids"]) for case in _CASES])
  return ids, lengths


def test_log_probs_of_text_are_the_golden_ones(smollm2, rows):
  config, params = smollm2
  ids, lengths = rows
  numbers = (np.arange(_LENGTH) < lengths[:, None]).astype(np.int32)
  logp, _ = jax.jit(
    lambda p: token_logprobs(
      p, config, jnp.array(ids), segment_ids=jnp.array(numbers)
    )
  )(params)
  for row, case in zip(np.asarray(logp), _CASES, strict=True):
    want = case["token_logprobs"]
    np.testing.assert_allclose(row[1 : len(want) + 1], want, atol=_NATS)


def test_next_and_greedy_tokens_are_the_golden_ones(smollm2, rows):
  config, params = smollm2
  ids, lengths = rows
  cache = init_cache(config, len(ids), _LENGTH + 24)
  extend = jax.jit(
    functools.partial(decoding.extend, config=config), donate_argnames="cache"
  )
  unembed = jax.jit(transformer.unembed)
  start = np.zeros(len(ids), np.int32)
  cache, hidden = extend(
    params, cache=cache, ids=ids, start=start, count=lengths
  )
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], 1)[:, 0]
  logp = np.asarray(jax.nn.log_softmax(unembed(params, last)))
  for row, case in zip(logp, _CASES, strict=True):
    top = np.argsort(-row)[:8]
    assert list(top) == case["next_top8_ids"]
    np.testing.assert_allclose(row[top], case["next_top8_logprobs"], atol=_NATS)
  chosen = []
  one = np.ones(len(ids), np.int32)
  for step in range(24):
    chosen.append(np.asarray(unembed(params, last)).argmax(-1))
    cache, hidden = extend(
      params,
      cache=cache,
      ids=chosen[-1][:, None].astype(np.int32),
      start=(lengths + step).astype(np.int32),
      count=one,
    )
    last = hidden[:, 0]
  for tokens, case in zip(np.stack(chosen, 1), _CASES, strict=True):
    assert list(tokens) == case["greedy_24"]
