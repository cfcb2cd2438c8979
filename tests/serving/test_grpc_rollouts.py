"""Our own service: everything about a sample, as it is sampled."""

import asyncio
import types

import numpy as np
import pytest

from arl_jax.rollout.request import Sampling
from arl_jax.serving.proto import rollout_pb2
from tests.rollout.fake_engine import FakeEngine, Params, alone
from tests.serving.grpc_serving import (
  Gate,
  Letters,
  abort,
  failure,
  generate,
  load,
  messages,
  served,
  until,
)

_PER_TOKEN = ("logp", "sampled_logp", "versions", "cache_versions")


async def collected(call):
  """What was started, and each sample: one list a field."""
  first = await call.read()
  samples = [
    types.SimpleNamespace(
      ids=[], text="", experts=[], finish=0, **{n: [] for n in _PER_TOKEN}
    )
    for _ in first.started.request_ids
  ]
  async for response in messages(call):
    part = response.part
    sample = samples[part.index]
    assert sample.finish == rollout_pb2.FINISH_NONE
    sample.ids += part.token_ids
    sample.text += part.text
    sample.finish = part.finish
    for name in _PER_TOKEN:
      assert len(getattr(part, name)) == len(part.token_ids)
      getattr(sample, name).extend(getattr(part, name))
    if part.HasField("experts"):
      shape = (-1, part.experts.layers, part.experts.chosen)
      sample.experts += np.reshape(part.experts.ids, shape).tolist()
  return first.started, samples


def sampled(**fields):
  async def main():
    async with served() as (_, channel):
      return await collected(generate(channel, **fields))

  return asyncio.run(main())


def test_a_sample_says_all_about_its_tokens():
  started, (sample,) = sampled(ids=[3, 1, 4], max_tokens=20, seed=5)
  expected = alone([3, 1, 4], Sampling(max_tokens=20, seed=5))
  assert list(started.prompt_ids) == [3, 1, 4]
  assert sample.ids == expected
  assert sample.text == Letters().decode(expected)
  assert sample.finish == rollout_pb2.FINISH_LENGTH
  # The engine's version 0 computed every token and every cache entry.
  for name in _PER_TOKEN:
    assert getattr(sample, name) == [0] * 20
  # [tokens, layers, chosen]: the fake engine's experts are called as tokens.
  assert sample.experts == [[[t, t], [t, t]] for t in expected]


def test_versions_are_those_of_each_token():
  """New weights come after the first tokens; log-probs are told apart."""
  gate = Gate()

  async def main():
    engine = FakeEngine(on_call=gate)
    async with served(engine, caches="keep") as (service, channel):
      call = generate(channel, ids=[7], max_tokens=30)
      await call.read()
      gate.open(1)
      first = (await call.read()).part
      updated = asyncio.create_task(service.update_weights(Params(3), 3))
      # It comes between two steps, and the second one waits.
      await until(lambda: service._commands.qsize())
      gate.open(1)
      await updated
      gate.open()
      rest = [response.part async for response in messages(call)]
      return [first, *rest]

  parts = asyncio.run(main())
  whole = {n: [x for p in parts for x in getattr(p, n)] for n in _PER_TOKEN}
  assert len(whole["versions"]) == 30
  assert list(parts[0].versions) == [0] * len(parts[0].token_ids)
  assert whole["versions"][-1] == 3
  assert whole["versions"] == sorted(whole["versions"])
  assert set(whole["versions"]) == {0, 3}
  # The oldest cache entry stays of version 0; the fake engine's log-prob says
  # so, and sampled_logp names the newest.
  assert whole["cache_versions"] == [0] * 30
  assert whole["logp"] == [0] * 30
  assert whole["sampled_logp"][-1] == -3


@pytest.mark.parametrize("why", ["STOP_ID", "STOP_STRING", "LENGTH"])
def test_the_last_part_says_why_it_ends(why):
  plain = alone([9], Sampling(max_tokens=12, seed=1))
  fields = {
    "STOP_ID": {"stop_ids": [plain[3]]},
    "STOP_STRING": {"stop_strings": [Letters().decode(plain[2:4])]},
    "LENGTH": {},
  }[why]
  _, (sample,) = sampled(ids=[9], max_tokens=12, seed=1, **fields)
  assert rollout_pb2.Finish.Name(sample.finish) == f"FINISH_{why}"
  assert sample.ids == plain[: len(sample.ids)]
  assert len(sample.ids) == (
    12 if why == "LENGTH" else plain.index(plain[3]) + 1
  )


def test_samples_of_one_prompt_have_seeds_of_their_own():
  started, samples = sampled(ids=[8], max_tokens=9, seed=2**31 - 2, n=4)
  how = Sampling(max_tokens=9, seed=2**31 - 2)
  for i, sample in enumerate(samples):
    assert sample.ids == alone([8], how.choice(i))
  assert len({how.choice(i).seed for i in range(4)}) == 4
  assert len(set(started.request_ids)) == 4


def test_every_field_of_sampling_arrives():
  seen = []

  class Spy(FakeEngine):
    def start(self, state, slot, sampling, sampled=0):
      seen.append(sampling)
      return super().start(state, slot, sampling, sampled)

  wanted = Sampling(
    max_tokens=3,
    temperature=0.5,
    top_k=7,
    top_p=0.25,
    min_p=0.125,
    seed=11,
    stop_ids=(60, 61),
    stop_strings=("zz",),
    logit_bias={5: -2.5},
    forbidden=(6, 7),
  )

  async def main():
    async with served(Spy()) as (_, channel):
      names = Sampling.__dataclass_fields__
      fields = {name: getattr(wanted, name) for name in names}
      await collected(generate(channel, ids=[1], **fields))
      # Greedy is 0, and left out is 1.
      await collected(generate(channel, ids=[1], temperature=0.0))
      await collected(generate(channel, ids=[1]))

  asyncio.run(main())
  assert seen[0] == wanted
  assert [s.temperature for s in seen[1:]] == [0.0, 1.0]
  assert seen[2] == Sampling(max_tokens=6)


def test_text_is_encoded_and_what_is_not_wanted_is_not_sent():
  started, (sample,) = sampled(
    text="€A", max_tokens=5, without_text=True, without_experts=True
  )
  prompt = Letters().encode("€A")
  assert list(started.prompt_ids) == prompt
  assert sample.ids == alone(prompt, Sampling(max_tokens=5))
  assert not sample.text
  assert not sample.experts


def test_a_session_goes_on_from_its_cache():
  async def main():
    async with served() as (service, channel):
      prompt = list(range(20))
      _, (first,) = await collected(
        generate(channel, ids=prompt, session="s", max_tokens=4)
      )
      before = await load(channel)
      longer = [*prompt, *first.ids, 1, 2]
      _, (second,) = await collected(
        generate(channel, ids=longer, session="s", max_tokens=4)
      )
      after = await load(channel)
      service.close_session("s")
      return longer, second, before, after

  longer, second, before, after = asyncio.run(main())
  assert second.ids == alone(longer, Sampling(max_tokens=4))
  # All but the new turn: 2 tokens, and the last sampled one.
  assert after.prefilled_tokens - before.prefilled_tokens <= 3
  assert before.slots_in_use == 1


def test_load_counts():
  async def main():
    async with served(FakeEngine(slots=2)) as (service, channel):
      service.pause()
      calls = [generate(channel, ids=[i], max_tokens=3) for i in range(5)]
      await until(lambda: service.load().waiting == 5)
      paused = await load(channel)
      service.resume()
      for call in calls:
        async for _ in messages(call):
          pass
      await until(lambda: service.load().sampled_tokens == 15)
      await until(lambda: not service.load().slots_in_use)
      return paused, await load(channel)

  paused, after = asyncio.run(main())
  assert (paused.state, paused.version, paused.slots) == ("paused", 0, 2)
  assert (paused.running, paused.waiting) == (0, 5)
  assert (after.state, after.running, after.waiting) == ("serving", 0, 0)
  assert (after.sampled_tokens, after.prefilled_tokens) == (15, 5)
  assert after.max_requests == 1024


def test_abort_ends_a_call():
  gate = Gate()

  async def main():
    async with served(FakeEngine(on_call=gate)) as (_, channel):
      single = generate(channel, ids=[1], max_tokens=40, request_id="a")
      several = generate(channel, ids=[2], max_tokens=40, request_id="b", n=2)
      other = generate(channel, ids=[3], max_tokens=40)
      names = []
      for call in (single, several, other):
        names += (await call.read()).started.request_ids
      answer = await abort(channel, "a", "b.1", "unknown")
      gate.open()
      failures = [await failure(single), await failure(several)]
      parts = [response.part async for response in messages(other)]
      gone = await abort(channel, "a", "b.0", "b.1")
      return names, answer, failures, parts, gone

  names, answer, failures, parts, gone = asyncio.run(main())
  assert names[:3] == ["a", "b.0", "b.1"]
  assert list(answer.aborted) == ["a", "b.1"]
  assert {code for code, _ in failures} == {"ABORTED"}
  assert sum(len(p.token_ids) for p in parts) == 40
  assert not gone.aborted


def test_a_request_id_is_of_one_request_at_a_time():
  gate = Gate()

  async def main():
    async with served(FakeEngine(on_call=gate)) as (_, channel):
      first = generate(channel, ids=[1], request_id="same")
      await first.read()
      refused = await failure(generate(channel, ids=[1], request_id="same"))
      gate.open()
      async for _ in messages(first):
        pass
      await collected(generate(channel, ids=[1], request_id="same"))
      return refused

  code, details = asyncio.run(main())
  assert code == "INVALID_ARGUMENT"
  assert "request_id 'same' is in use" in details


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"ids": [1], "max_tokens": 0}, "max_tokens is 0"),
    ({}, "prompt is missing"),
    ({"ids": [1], "temperature": -1.0}, "temperature is -1.0"),
    ({"ids": [1], "temperature": float("nan")}, "temperature is nan"),
    ({"ids": [1], "top_p": 0.0}, "top_p is 0.0"),
    ({"ids": [1], "top_k": 65}, "top_k is 65"),
    ({"ids": [1], "min_p": 2.0}, "min_p is 2.0"),
    ({"ids": [1], "seed": -1}, "seed is -1"),
    ({"ids": [1], "seed": -1, "n": 2}, "seed is -1"),
    ({"ids": [1], "stop_ids": [64]}, "stop_ids is (64,)"),
    ({"ids": [1], "stop_ids": [1] * 5}, "sampling.stop_ids has 5 entries"),
    ({"ids": [1], "stop_strings": [""]}, "stop_strings"),
    ({"ids": [1], "stop_strings": ["a"] * 17}, "stop_strings has 17 entries"),
    (
      {"ids": [1], "stop_strings": ["a" * 1025]},
      "stop_strings has one of more",
    ),
    ({"ids": [1], "logit_bias": {70: 1.0}}, "logit_bias"),
    ({"ids": [1], "logit_bias": {1: float("inf")}}, "logit_bias"),
    ({"ids": [1], "forbidden": list(range(5))}, "forbidden has 5 entries"),
    ({"ids": [1], "n": -1}, "n is -1"),
    ({"ids": [1], "n": 129}, "n is 129, not in 0..128"),
    ({"ids": [1], "n": 2, "session": "s"}, "n is 2, not 1"),
    ({"ids": [1], "session": "s" * 257}, "session is longer than 256"),
    ({"ids": [1], "session": "\0s"}, "session begins with a NUL"),
    ({"ids": [1], "request_id": "s" * 257}, "request_id is longer"),
    ({"ids": [1], "timeout": 0.0}, "timeout is 0.0"),
    ({"ids": [1], "timeout": -1.0}, "timeout is -1.0"),
    ({"ids": [1], "timeout": float("nan")}, "timeout is nan"),
    ({"ids": [1], "version": 9}, "version 9 isn't held"),
    ({"ids": [1], "training": True, "top_k": 3}, "top_k 3"),
    ({"ids": [1], "sampling": None}, "sampling is missing"),
    ({"ids": []}, "token_ids.ids has 0 ids"),
    ({"text": "~"}, "text: the text '~'"),
  ],
)
def test_bad_requests_name_their_field(fields, said):
  async def main():
    async with served() as (_, channel):
      refused = await failure(generate(channel, **fields))
      assert (await load(channel)).state == "serving"
      return refused

  code, details = asyncio.run(main())
  assert code == "INVALID_ARGUMENT"
  assert said in details
