"""Which segments of demonstrations enter which supervised update."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from arl_jax.types import Episode, Segment


def segments_of(episodes: Sequence[Episode]) -> list[Segment]:
  """Those with something to train on."""
  return [s for e in episodes for s in e.segments if s.trained.any()]


def opening(segment: Segment) -> Segment:
  """The segment up to the end of its first sampled message."""
  sampled = np.flatnonzero(segment.sampled)
  breaks = np.flatnonzero(np.diff(sampled) > 1)
  end = int(sampled[breaks[0]] if breaks.size else sampled[-1]) + 1
  return dataclasses.replace(
    segment,
    ids=segment.ids[:end],
    roles=segment.roles[:end],
    sampled=segment.sampled[:end],
    behaviour_logp=segment.behaviour_logp[:end],
    policy_version=segment.policy_version[:end],
    experts=None if segment.experts is None else segment.experts[:end],
  )


def batches(
  segments: Sequence[Segment], *, tokens: int, steps: int, seed: int
) -> Iterator[list[Segment]]:
  """`steps` batches, each of at least `tokens` tokens less one segment.

  Segments come in a shuffled order, anew each epoch, determined by `seed`.

  Raises:
    ValueError: there are no segments.
  """
  if not segments:
    raise ValueError("there is no segment to train on")
  order = _shuffled(len(segments), seed)
  for _ in range(steps):
    batch: list[Segment] = []
    total = 0
    while total < tokens:
      segment = segments[next(order)]
      batch.append(segment)
      total += len(segment)
    yield batch


def _shuffled(n: int, seed: int) -> Iterator[int]:
  random = np.random.default_rng(seed)
  while True:
    yield from random.permutation(n).tolist()
