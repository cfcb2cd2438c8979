"""What segments hold is what a model was conditioned on, by its own word."""

import asyncio
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax.agents.harness import AgentConfig, run_episode
from arl_jax.agents.scripted import ScriptConfig, ScriptedSearcher
from arl_jax.chat.renderer import Renderer, usage_symbols
from arl_jax.chat.tokenizer import Tokenizer
from arl_jax.envs.search.corpus import Document, build_corpus
from arl_jax.envs.search.environment import SearchEnvironment
from arl_jax.envs.search.index import SearchIndex
from arl_jax.envs.search.tools import TOOL_NAMES
from arl_jax.rollout.client import LocalClient
from arl_jax.rollout.scheduler import Scheduler
from arl_jax.types import Sample, Task
from tests.rollout import driver

BUDGET = 300
HANDLES = [f"<c{i}>" for i in range(16)]
TEXTS = {
  f"d{i}": f"A {colour} {animal} sleeps in the {place}."
  for i, (colour, animal, place) in enumerate(
    (c, a, p)
    for c in ("red", "grey")
    for a in ("fox", "owl")
    for p in ("den", "barn", "wood")
  )
}
CONFIG = AgentConfig(
  token_budget=BUDGET,
  soft_threshold=80,
  hard_threshold=200,
  max_turns=8,
  message_tokens=24,
  observation_tokens=60,
)


class Forced:
  """Has the engine sample what a script says, a token a request.

  A bias forces each token; the recorded log-prob is that without it.
  """

  def __init__(self, client, script):
    self.client, self.script = client, script
    self.sampled = 0

  async def sample(self, session, ids, *, max_tokens, seed, **_):
    said = self.script.play(ids, max_tokens)
    parts = []
    for at, token in enumerate(said.ids.tolist()):
      part = await self.client.sample(
        session,
        [*ids, *said.ids[:at].tolist()],
        max_tokens=1,
        stop_ids=(),
        seed=seed + at,
        training=False,
        logit_bias={token: 1e4},
      )
      assert part.ids.tolist() == [token]
      parts.append(part)
    self.sampled += len(parts)
    return Sample(
      ids=said.ids,
      logp=np.concatenate([p.logp for p in parts]),
      versions=np.concatenate([p.versions for p in parts]),
      stopped=said.stopped,
    )

  async def close(self, session):
    await self.client.close(session)


@pytest.fixture(scope="module")
def renderer():
  symbols = [*HANDLES, *TOOL_NAMES, *usage_symbols(BUDGET)]
  texts = [*TEXTS.values(), "prune or answer 0123456789"]
  return Renderer(Tokenizer.train(texts, vocab_size=150, symbols=symbols))


@pytest.fixture(scope="module")
def policy(renderer):
  """A model of the tokenizer's size, its parameters and an engine."""
  model = dataclasses.replace(
    driver.CONFIG,
    vocab_size=renderer.tokenizer.vocab_size,
    mtp_heads=0,
  )
  params = driver.policy(0, model)
  engine = driver.engine_of(model, max_length=BUDGET + 1)
  return model, params, engine


def play(renderer, policy, seed, nudge_mode):
  """An episode of the script, and how many tokens were sampled in it."""
  _, params, engine = policy
  documents = [Document(name, name, text) for name, text in TEXTS.items()]
  count = renderer.tokenizer.count
  index = SearchIndex(build_corpus(documents, count_tokens=count))
  question = "red fox den ; grey owl barn"
  script = ScriptedSearcher(
    question,
    renderer,
    ScriptConfig(prune=1.0, answer=0.02),
    seed=seed,
    handles=HANDLES,
    tools=TOOL_NAMES,
  )
  environment = SearchEnvironment(
    index=index, handles=HANDLES, count_tokens=count, snippet_tokens=12
  )

  async def run():
    scheduler = Scheduler(engine, engine.place(params), 5)
    async with LocalClient(scheduler) as client:
      forced = Forced(client, script)
      episode = await run_episode(
        Task(task_id="t", prompt=question, truth={}),
        environment,
        forced,
        renderer,
        dataclasses.replace(CONFIG, nudge_mode=nudge_mode),
        seed=seed,
      )
      return episode, forced.sampled

  return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
  ("nudge_mode", "seed"), [("append", 1), ("vanish", 1), ("vanish", 2)]
)
def test_every_segment_gives_the_recorded_log_probs(
  renderer, policy, nudge_mode, seed
):
  model, params, _ = policy
  episode, sampled = play(renderer, policy, seed, nudge_mode)
  reasons = [segment.reason for segment in episode.segments]
  assert "prune" in reasons
  assert nudge_mode != "vanish" or "notice" in reasons
  for segment in episode.segments:
    row = np.zeros((1, BUDGET + 1), np.int32)
    row[0, : len(segment)] = segment.ids
    logp, *_ = driver._score(params, model, jnp.asarray(row))
    found = np.asarray(logp)[0, : len(segment)]
    np.testing.assert_allclose(
      found[segment.sampled],
      segment.behaviour_logp[segment.sampled],
      atol=1e-3,
      rtol=0,
    )
    assert {*segment.policy_version[segment.sampled]} <= {5}
  # Each sampled token is trained once, wherever its segment was carried to.
  assert sum(int(s.trained.sum()) for s in episode.segments) == sampled
