"""Segments of all lengths packed into rows of one length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from arl_jax.types import Segment

# An array, or whatever a jax transformation puts in its place.
Leaf = Any


class TokenBatch(struct.PyTreeNode):
  """What one update is made from; M microbatches of R rows.

  Attributes:
    ids: [M, R, T] int32.
    segment_ids: [M, R, T] int32, 0 = padding; unique within a row.
    mask: [M, R, T] bool, tokens that are trained.
    behaviour_logp: [M, R, T] float32, nats.
    advantage: [M, R, T] float32.
    temperature: [M, R, T] float32, of sampling.
    microbatches: [] int32, how many of the M hold anything.
  """

  ids: Leaf
  segment_ids: Leaf
  mask: Leaf
  behaviour_logp: Leaf
  advantage: Leaf
  temperature: Leaf
  microbatches: Leaf


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackingStats:
  """Attributes: segments and tokens packed, rows used, share of them filled."""

  segments: int
  tokens: int
  trained_tokens: int
  rows: int
  fill: float


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
  """Best-fit decreasing bin packing; a segment never straddles rows.

  Returns:
    Indices of the segments of each row.

  Raises:
    ValueError: a segment is longer than a row.
  """
  rows: list[list[int]] = []
  free: list[int] = []
  for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    length = lengths[i]
    if length > row_length:
      raise ValueError(
        f"segment of {length} tokens does not fit into a row of {row_length};"
        " raise learner.row_length (or warm_start.opening_row_length)"
      )
    fitting = [(f, r) for r, f in enumerate(free) if f >= length]
    if fitting:
      _, row = min(fitting)
    else:
      row = len(rows)
      rows.append([])
      free.append(row_length)
    rows[row].append(i)
    free[row] -= length
  return rows


def pack(
  segments: Sequence[Segment],
  advantages: Sequence[float],
  *,
  row_length: int,
  microbatch_rows: int,
  microbatches: int = 1,
) -> tuple[TokenBatch, PackingStats]:
  """Packs segments, each with the advantage of its episode.

  Segments without a trained token are left out: they can't change the result.
  M is `microbatches`, doubled until everything fits, so that few shapes are
  ever compiled; empty microbatches are skipped, not computed.

  Args:
    segments: of any number of episodes.
    advantages: one a segment.
    row_length: T.
    microbatch_rows: R.
    microbatches: smallest M.

  Raises:
    ValueError: a segment longer than a row, or nothing to train on.
  """
  pairs = [
    (s, a) for s, a in zip(segments, advantages, strict=True) if s.trained.any()
  ]
  if not pairs:
    raise ValueError("no segment holds a trained token")
  rows = assign_rows([len(s) for s, _ in pairs], row_length)
  used = -(-len(rows) // microbatch_rows)
  while microbatches < used:
    microbatches *= 2
  shape = (microbatches, microbatch_rows, row_length)
  arrays = {
    "ids": np.zeros(shape, np.int32),
    "segment_ids": np.zeros(shape, np.int32),
    "mask": np.zeros(shape, bool),
    "behaviour_logp": np.zeros(shape, np.float32),
    "advantage": np.zeros(shape, np.float32),
    "temperature": np.ones(shape, np.float32),
  }
  for row, members in enumerate(rows):
    at = 0
    for number, index in enumerate(members, 1):
      segment, advantage = pairs[index]
      span = (*divmod(row, microbatch_rows), slice(at, at + len(segment)))
      arrays["ids"][span] = segment.ids
      arrays["segment_ids"][span] = number
      arrays["mask"][span] = segment.trained
      arrays["behaviour_logp"][span] = segment.behaviour_logp
      arrays["advantage"][span] = advantage
      arrays["temperature"][span] = segment.temperature
      at += len(segment)
  tokens = sum(len(s) for s, _ in pairs)
  stats = PackingStats(
    segments=len(pairs),
    tokens=tokens,
    trained_tokens=int(arrays["mask"].sum()),
    rows=len(rows),
    fill=tokens / (len(rows) * row_length),
  )
  return TokenBatch(**arrays, microbatches=np.asarray(used, np.int32)), stats
