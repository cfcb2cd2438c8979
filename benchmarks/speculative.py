"""What drafts bring on this machine's CPU: acceptance, cost and wall clock.

  python -m benchmarks.speculative [--module=/tmp/module.npz]

SmolLM2-135M-Instruct (`make models`) with an MTP module that is distilled first
(a few minutes, `benchmarks/distilled.py`; --module keeps it for the next run)
continues documents and an agent's tool calls at temperature 1, in float32, at 1
and 8 slots: without drafts, with 1, 2 and 3, and with as many as the engine's
policy chooses. Variants take turns, from the same caches and with the same
seeds. The measured speed-up is held against (1 + Σ_j Π_(i≤j) a_i) over the cost
ratio of steps, measured at equal states.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from arl_jax import checkpoints, model
from arl_jax.chat.pretrained import load_tokenizer
from arl_jax.model import ModelConfig, mtp, transformer
from arl_jax.rollout.decode_state import DecodeState
from arl_jax.rollout.engine import Engine, EngineConfig
from arl_jax.rollout.request import Sampling
from arl_jax.rollout.speculative import DraftPolicy
from arl_jax.runtime.host_memory import keep_freed_memory
from benchmarks import distilled
from benchmarks.timing import interleaved
from configs import smollm2_135m

_STEPS = flags.DEFINE_integer("steps", 40, "Updates of the distillation.")
_MODULE = flags.DEFINE_string("module", "", "Where the module is kept (.npz).")
_DRAFT_IDS = flags.DEFINE_integer(
  "draft_ids", 8192, "Most frequent ids that drafts may be; 0 is all."
)
_SMOKE = flags.DEFINE_bool("smoke", False, "A tiny random model; no figures.")

_FILE = (
  pathlib.Path(__file__).parents[1]
  / "models"
  / "SmolLM2-135M-Instruct.Q4_1.gguf"
)
_SLOTS = (1, 8)
_ADAPTIVE = "adaptive"
_AIMS = {
  "measured_over_predicted_1": 0.9,
  "measured_over_predicted_8": 0.9,
  "least_speedup": 0.95,
  "speedup_1_agent": 1.3,
}


@dataclasses.dataclass(frozen=True)
class Size:
  """How much is measured.

  Attributes:
    prompt: tokens, in the upper half of `length`: attention looks equally far
      all the time.
    length: tokens that a slot holds.
    tokens: a slot samples in a run, by slots.
    drafts: at most.
    repeats: runs of each variant; one more comes first and is left out.
  """

  prompt: int
  length: int
  tokens: Mapping[int, int]
  drafts: int
  repeats: int


_WHOLE = Size(
  prompt=272, length=512, tokens={1: 64, 8: 32}, drafts=3, repeats=3
)
_TINY = Size(prompt=40, length=128, tokens={1: 8, 8: 8}, drafts=1, repeats=1)


@dataclasses.dataclass(frozen=True)
class Subject:
  """What decodes: a model with a module, its tokens, the ids of drafts."""

  config: ModelConfig
  params: Any
  encoder: distilled.Encoder
  draft_ids: Sequence[int] | None


class _Bytes:
  """A tokenizer of the tiny model."""

  def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
    del allow_special
    return list(text.encode())


class _Fixed(DraftPolicy):
  """Always as many drafts."""

  def __init__(self, k: int, limit: int):
    super().__init__(limit)
    self._k = k

  def choose(self) -> int:
    return self._k


@dataclasses.dataclass
class Decoding:
  """An engine, and its slots after the prompts of each workload."""

  engine: Engine
  placed: Any
  states: dict[str, DecodeState]

  def start(self, workload: str, seed: int) -> DecodeState:
    # A copy: states are donated.
    state = jax.tree.map(jnp.copy, self.states[workload])
    for slot in range(self.engine.slots):
      how = Sampling(max_tokens=10**9, seed=1000 * seed + slot)
      state = self.engine.start(state, slot, how)
    return jax.block_until_ready(state)

  def run(
    self, workload: str, policy: DraftPolicy, seed: int, tokens: int
  ) -> tuple[float, list[list[int]]]:
    """Tokens a second until slots have `tokens` on average, and the tokens."""
    state = self.start(workload, seed)
    self.engine.drafts = policy
    found: list[list[int]] = [[] for _ in range(self.engine.slots)]
    began = time.perf_counter()
    while sum(map(len, found)) < tokens * len(found):
      state, result = self.engine.generate(self.placed, state)
      for ids, row, n in zip(found, result.tokens, result.lengths, strict=True):
        ids += row[:n].tolist()
    seconds = time.perf_counter() - began
    return sum(map(len, found)) / seconds, found

  def steps(self, workload: str, k: int) -> Callable[[], object]:
    """Runs a generate call with k drafts, always at the same lengths."""
    held = [self.start(workload, 0)]
    lengths = np.asarray(held[0].length)

    def run() -> object:
      self.engine.drafts = _Fixed(k, k)
      held[0] = held[0].replace(length=jnp.asarray(lengths))
      held[0], _ = self.engine.generate(self.placed, held[0])
      return held[0].length

    return run


def _decoding(
  subject: Subject,
  drafts: int,
  slots: int,
  prompts: Mapping[str, Sequence[Sequence[int]]],
  size: Size,
) -> Decoding:
  engine = Engine(
    subject.config,
    EngineConfig(
      max_concurrent_decodes=slots,
      prefill_rows=1,
      prefill_chunk=size.prompt,
      draft_tokens=drafts,
    ),
    max_length=size.length,
    draft_ids=subject.draft_ids,
  )
  placed = engine.place(subject.params)
  states = {}
  for workload, rows in prompts.items():
    state = engine.init_decode_state()
    for slot in range(slots):
      state = engine.extend(placed, state, {slot: (0, rows[slot])})
    states[workload] = state
  return Decoding(engine, placed, states)


def _prompts(subject: Subject, size: Size) -> dict[str, list[list[int]]]:
  """As many as slots at most; none of them was in the distillation."""
  rows = {
    "text": distilled.text_rows(subject.encoder, size.prompt, part=1, seed=4),
    "agent": distilled.agent_rows(subject.encoder, size.prompt, seed=4),
  }
  most = max(_SLOTS)
  return {name: list(itertools.islice(r, most)) for name, r in rows.items()}


@dataclasses.dataclass
class Measured:
  """Of one workload and number of slots.

  Attributes:
    speed: variant -> tokens a second, of each repeat.
    cost: k -> seconds of a step at equal states.
    acceptance: share of drafts at a position that were accepted.
    same: share of tokens that are the same with drafts as without.
    texts: what was sampled without drafts, of the last repeat.
  """

  speed: dict[Any, list[float]]
  cost: dict[int, float]
  acceptance: list[float]
  same: float
  texts: list[list[int]]

  def speedup(self, variant: Any) -> float:
    """Median over repeats: what is compared ran one after the other."""
    pairs = zip(self.speed[variant], self.speed[0], strict=True)
    return statistics.median(a / b for a, b in pairs)

  def gain(self, k: int) -> float:
    """Tokens of a step with k drafts."""
    return 1 + float(np.cumprod(self.acceptance[:k]).sum())

  def predicted(self, k: int) -> float:
    return self.gain(k) * self.cost[0] / self.cost[k]

  def most_predicted(self) -> float:
    return max(map(self.predicted, self.cost))


def _measure(
  plain: Decoding, drafting: Decoding, workload: str, size: Size
) -> Measured:
  slots = plain.engine.slots
  most = size.drafts
  policies: dict[Any, DraftPolicy] = {
    k: _Fixed(k, most) for k in range(most + 1)
  }
  policies[_ADAPTIVE] = DraftPolicy(most)
  speed: dict[Any, list[float]] = {variant: [] for variant in policies}
  agreed = []
  for repeat in range(size.repeats + 1):
    texts = {}
    for variant, policy in policies.items():
      decoding = drafting if variant else plain
      rate, texts[variant] = decoding.run(
        workload, policy, repeat, size.tokens[slots]
      )
      if repeat:
        speed[variant].append(rate)
    agreed += [
      a == b
      for k in range(1, most + 1)
      for x, y in zip(texts[0], texts[k], strict=True)
      for a, b in zip(x, y, strict=False)
    ]
  runs = {
    str(k): (drafting if k else plain).steps(workload, k)
    for k in range(most + 1)
  }
  steps = plain.engine.config.decode_steps
  return Measured(
    speed=speed,
    cost={int(k): s / steps for k, s in interleaved(runs).items()},
    acceptance=policies[most].acceptance,
    same=statistics.mean(agreed),
    texts=texts[0],
  )


def _shares(
  subject: Subject, prompts: Sequence[Sequence[int]], texts: list[list[int]]
) -> tuple[float, float]:
  """Of first drafts after the prompts: what would be accepted on average.

  Returns:
    Plain rejection sampling, Σ_v min(p_v, q_v); and the race, by draws.
  """
  shortest = min(map(len, texts))
  count = len(prompts[0])
  ids = np.array(
    [[*p, *t[:shortest]] for p, t in zip(prompts, texts, strict=True)]
  )
  score = jax.jit(functools.partial(_shares_of, subject, count))
  found = [score(subject.params, row[None], i) for i, row in enumerate(ids)]
  rejection, race = np.mean(found, 0)
  return float(rejection), float(race)


def _shares_of(subject, count, params, ids, seed):
  config = subject.config
  where = jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)
  hidden, _ = transformer.hidden_states(params, config, ids, *where)
  draft = mtp.mtp_hidden(params, config, hidden, ids, *where)
  # Entry t of the module is about the token that follows entry t + 1.
  p = jax.nn.softmax(transformer.unembed(params, hidden[0, count:-1]))
  logits = transformer.unembed(params, draft[0, count - 1 : -1])
  if subject.draft_ids is not None:
    known = jnp.zeros(config.vocab_size, bool)
    known = known.at[jnp.asarray(subject.draft_ids)].set(True)
    logits = jnp.where(known, logits, -jnp.inf)
  q = jax.nn.softmax(logits)
  noise = jax.random.exponential(jax.random.key(seed), (8, *p.shape))
  same = (p / noise).argmax(-1) == (q / noise).argmax(-1)
  return jnp.minimum(p, q).sum(-1).mean(), same.mean()


def _chip_costs(subject: Subject, most: int) -> dict[int, float]:
  """Cost ratio of k drafts where reading weights is all that takes time."""

  def size(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))

  config, params = subject.config, subject.params
  head = size(transformer.head(params))
  drafted = config.vocab_size
  if subject.draft_ids is not None:
    drafted = len(subject.draft_ids)
  once = size(params["layers"]) + head
  each = size(params["mtp"]) + head * drafted / config.vocab_size
  return {k: (once + k * each) / once for k in range(most + 1)}


def _figures(
  subject: Subject,
  size: Size,
  prompts: Mapping[str, Sequence[Sequence[int]]],
  found: Mapping[tuple[int, str], Measured],
) -> dict[str, float]:
  figures: dict[str, float] = {}
  chip = _chip_costs(subject, size.drafts)
  for workload, rows in prompts.items():
    wide = found[max(_SLOTS), workload]
    for i, share in enumerate(wide.acceptance, 1):
      figures[f"acceptance_{i}_{workload}"] = share
    figures[f"chip_speedup_{workload}"] = max(
      wide.gain(k) / cost for k, cost in chip.items()
    )
    rejection, race = _shares(subject, rows, wide.texts)
    figures[f"rejection_share_{workload}"] = rejection
    figures[f"race_share_{workload}"] = race
  for (slots, workload), m in found.items():
    at = f"{slots}_{workload}"
    figures[f"tokens_per_second_{at}"] = statistics.median(m.speed[0])
    figures[f"same_tokens_{at}"] = m.same
    figures[f"speedup_{at}"] = m.speedup(_ADAPTIVE)
    figures[f"predicted_{at}"] = m.most_predicted()
    for k in range(1, size.drafts + 1):
      figures[f"speedup_{at}_k{k}"] = m.speedup(k)
      figures[f"predicted_{at}_k{k}"] = m.predicted(k)
  for slots in _SLOTS:
    mine = [m for (n, _), m in found.items() if n == slots]
    figures[f"measured_over_predicted_{slots}"] = min(
      m.speedup(_ADAPTIVE) / m.most_predicted() for m in mine
    )
  figures["least_speedup"] = min(m.speedup(_ADAPTIVE) for m in found.values())
  return {name: round(value, 3) for name, value in figures.items()}


def _limits(
  subject: Subject, size: Size, found: Mapping[tuple[int, str], Measured]
) -> dict[str, float]:
  """Cost ratios of steps: an acceptance of 1 is a speed-up of (k + 1) / it."""
  limits = {
    f"chip_cost_ratio_k{k}": c
    for k, c in _chip_costs(subject, size.drafts).items()
    if k
  }
  for slots, k in itertools.product(_SLOTS, range(1, size.drafts + 1)):
    mine = [m for (n, _), m in found.items() if n == slots]
    limits[f"cost_ratio_{slots}_k{k}"] = statistics.mean(
      m.cost[k] / m.cost[0] for m in mine
    )
  return {name: round(value, 3) for name, value in limits.items()}


def _subject() -> Subject:
  encoder: distilled.Encoder
  if _SMOKE.value:
    config = dataclasses.replace(
      smollm2_135m.model(), vocab_size=256, width=48, layers=2, dense_width=96
    )
    params, encoder = model.init(config, jax.random.key(0)), _Bytes()
    steps, count = 2, 128
  else:
    config, params = checkpoints.load(_FILE, dtype=np.float32)
    encoder = load_tokenizer(_FILE)
    steps, count = _STEPS.value, _DRAFT_IDS.value
  config, params = distilled.module(
    config, params, encoder, steps=steps, path=_MODULE.value
  )
  ids = None
  if count:
    ids = distilled.frequent_ids(encoder, count, config.vocab_size).tolist()
  return Subject(config, params, encoder, ids)


def main(argv: list[str]) -> None:
  del argv
  keep_freed_memory()
  size = _TINY if _SMOKE.value else _WHOLE
  subject = _subject()
  prompts = _prompts(subject, size)
  found = {}
  for slots in _SLOTS:
    plain, drafting = (
      _decoding(subject, drafts, slots, prompts, size)
      for drafts in (0, size.drafts)
    )
    for workload in prompts:
      m = found[slots, workload] = _measure(plain, drafting, workload, size)
      logging.info(
        "%d slots, %s: %s, %s, %s",
        *(slots, workload, m.speed, m.cost, m.acceptance),
      )
  figures = _figures(subject, size, prompts, found)
  report = {
    "name": "speculative",
    "figures": figures,
    "limits": _limits(subject, size, found),
    "aims": {name: [">=", aim] for name, aim in _AIMS.items()},
    "met": all(figures[name] >= aim for name, aim in _AIMS.items()),
  }
  print(json.dumps(report))


if __name__ == "__main__":
  app.run(main)
