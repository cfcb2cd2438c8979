"""How full packed rows are, and how long packing takes.

  python -m benchmarks.packing

Segments of log-normal lengths between 50 and 4000 tokens go into rows of 4096,
as many as an RL step of 128 tasks × 8 rollouts has, in three draws. The limit
is what no packing can beat: all tokens over as many rows as they need at least.
"""

from __future__ import annotations

import json
import math
import statistics
import time

import numpy as np
from absl import app

from arl_jax.learner import Experience, pack
from arl_jax.types import NO_VERSION, Role, Segment

_ROW = 4096
_EPISODES = 1024
_DRAWS = 3


def _lengths(seed: int) -> np.ndarray:
  """Median 700 tokens, a long tail; what lies outside is drawn again."""
  draw = np.random.default_rng(seed)
  lengths = np.zeros(0, int)
  while len(lengths) < _EPISODES:
    more = draw.lognormal(math.log(700), 0.9, _EPISODES).astype(int)
    more = more[(more >= 50) & (more <= 4000)]
    lengths = np.concatenate([lengths, more])
  return lengths[:_EPISODES]


def _segment(length: int) -> Segment:
  sampled = np.arange(length) >= length // 2
  return Segment(
    ids=np.zeros(length, np.int32),
    roles=np.where(sampled, Role.SAMPLED, Role.PROMPT).astype(np.uint8),
    sampled=sampled,
    behaviour_logp=np.zeros(length, np.float32),
    policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
  )


def main(argv: list[str]) -> None:
  del argv
  fills, limits, rates = [], [], []
  for seed in range(_DRAWS):
    lengths = _lengths(seed)
    experiences = [
      Experience(segments=(_segment(n),), advantage=1.0) for n in lengths
    ]
    began = time.perf_counter()
    _, stats = pack(experiences, row_length=_ROW, microbatch_rows=8)
    rates.append(stats.tokens / (time.perf_counter() - began))
    fills.append(stats.fill)
    limits.append(stats.tokens / (math.ceil(stats.tokens / _ROW) * _ROW))
  fill = min(fills)
  aim = 0.92
  report = {
    "name": "packing",
    "figures": {
      "fill": round(fill, 4),
      "share_of_limit": round(
        min(f / m for f, m in zip(fills, limits, strict=True)), 4
      ),
      "tokens_per_second": round(statistics.median(rates)),
    },
    "limits": {"fill": round(min(limits), 4)},
    "aims": {"fill": [">=", aim]},
    "met": fill >= aim,
  }
  print(json.dumps(report))


if __name__ == "__main__":
  app.run(main)
