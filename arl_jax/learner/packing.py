"""Segments of all lengths packed into rows of one length."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from arl_jax.learner.experience import Experience
from arl_jax.types import Segment

# An array, or whatever a jax transformation puts in its place.
Leaf = Any


# Times a ratio and a log-prob, still a finite float32.
_LARGEST_ADVANTAGE = 1e9


class TokenBatch(struct.PyTreeNode):
  """What one update is made from; M microbatches of R rows.

  Attributes:
    ids: [M, R, T] int32.
    segment_ids: [M, R, T] int32, 0 = padding; unique within a row.
    mask: [M, R, T] bool, tokens that are trained.
    behaviour_logp: [M, R, T] float32, nats.
    advantage: [M, R, T] float32.
    temperature: [M, R, T] float32, of sampling.
    episode_weight: [M, R, T] float32, 1 / (trained tokens of the token's
      episode, over all its segments), 0 where not trained.
    microbatches: [] int32, how many of the M hold anything.
    episodes: [] int32, all that the batch was made from, also those without a
      trained token.
    trained_episodes: [] int32, those with one.
    experts: [M, R, T, MoE layers, K] int32 that the sampler chose, -1 = free;
      None if no segment recorded them.
    proximal_logp: [M, R, T] float32, of the learner when the step started;
      None if the loss compares with the sampler itself.
    reference_logp: [M, R, T] float32, of the policy that a KL term holds on
      to; None without such a term.
  """

  ids: Leaf
  segment_ids: Leaf
  mask: Leaf
  behaviour_logp: Leaf
  advantage: Leaf
  temperature: Leaf
  episode_weight: Leaf
  microbatches: Leaf
  episodes: Leaf
  trained_episodes: Leaf
  experts: Leaf = None
  proximal_logp: Leaf = None
  reference_logp: Leaf = None


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
  # (free tokens, row), sorted, so that the tightest fit is found by bisection.
  free: list[tuple[int, int]] = []
  for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    length = lengths[i]
    if length > row_length:
      raise ValueError(
        f"segment of {length} tokens does not fit into a row of {row_length};"
        " rows must be at least as long as the longest segment"
      )
    at = bisect.bisect_left(free, (length, -1))
    if at < len(free):
      left, row = free.pop(at)
    else:
      left, row = row_length, len(rows)
      rows.append([])
    rows[row].append(i)
    bisect.insort(free, (left - length, row))
  return rows


def pack(
  experiences: Sequence[Experience],
  *,
  row_length: int,
  microbatch_rows: int,
  microbatches: int = 1,
  seed: int | None = None,
) -> tuple[TokenBatch, PackingStats]:
  """Packs the segments of episodes.

  Segments without a trained token are left out: they can't change the result.
  M is `microbatches`, doubled until everything fits, so that few shapes are
  ever compiled; empty microbatches are skipped, not computed.

  Args:
    experiences: of the episodes.
    row_length: T.
    microbatch_rows: R.
    microbatches: smallest M.
    seed: of the order of rows, so that rows of long segments don't share
      microbatches; None leaves the order that packing gives.

  Raises:
    ValueError: a segment longer than a row, nothing to train on, an advantage
      that isn't finite, or segments that recorded unlike numbers of experts.
  """
  owners, segments = _trained_segments(experiences)
  rows = assign_rows([len(s) for s in segments], row_length)
  if seed is not None:
    order = np.random.default_rng(seed).permutation(len(rows))
    rows = [rows[i] for i in order]
  used = -(-len(rows) // microbatch_rows)
  while microbatches < used:
    microbatches *= 2
  counts = [e.trained_tokens for e in experiences]
  arrays = _empty((microbatches, microbatch_rows, row_length), segments)
  for row, members in enumerate(rows):
    at = 0
    for number, index in enumerate(members, 1):
      segment, owner = segments[index], owners[index]
      span = (*divmod(row, microbatch_rows), slice(at, at + len(segment)))
      arrays["ids"][span] = segment.ids
      arrays["segment_ids"][span] = number
      arrays["mask"][span] = segment.trained
      arrays["behaviour_logp"][span] = segment.behaviour_logp
      arrays["advantage"][span] = experiences[owner].advantage
      arrays["temperature"][span] = segment.temperature
      arrays["episode_weight"][span] = segment.trained / counts[owner]
      if segment.experts is not None:
        arrays["experts"][span] = segment.experts
      at += len(segment)
  tokens = sum(len(s) for s in segments)
  stats = PackingStats(
    segments=len(segments),
    tokens=tokens,
    trained_tokens=int(arrays["mask"].sum()),
    rows=len(rows),
    fill=tokens / (len(rows) * row_length),
  )
  batch = TokenBatch(
    **arrays,
    microbatches=np.asarray(used, np.int32),
    episodes=np.asarray(len(experiences), np.int32),
    trained_episodes=np.asarray(sum(n > 0 for n in counts), np.int32),
  )
  return batch, stats


def _trained_segments(
  experiences: Sequence[Experience],
) -> tuple[list[int], list[Segment]]:
  """Segments with a trained token, and the index of each one's episode."""
  pairs = []
  for owner, experience in enumerate(experiences):
    if not np.abs(experience.advantage) <= _LARGEST_ADVANTAGE:
      raise ValueError(
        f"advantage of experience {owner} is {experience.advantage}, not"
        f" within ±{_LARGEST_ADVANTAGE:g}"
      )
    pairs += [(owner, s) for s in experience.segments if s.trained.any()]
  if not pairs:
    raise ValueError("no segment holds a trained token")
  return [owner for owner, _ in pairs], [segment for _, segment in pairs]


def _empty(
  shape: tuple[int, int, int], segments: Sequence[Segment]
) -> dict[str, np.ndarray]:
  """Arrays of a batch of padding."""
  arrays = {
    "ids": np.zeros(shape, np.int32),
    "segment_ids": np.zeros(shape, np.int32),
    "mask": np.zeros(shape, bool),
    "behaviour_logp": np.zeros(shape, np.float32),
    "advantage": np.zeros(shape, np.float32),
    "temperature": np.ones(shape, np.float32),
    "episode_weight": np.zeros(shape, np.float32),
  }
  recorded = {s.experts.shape[1:] for s in segments if s.experts is not None}
  if len(recorded) > 1:
    raise ValueError(
      f"segments recorded experts of shapes {sorted(recorded)} (layers, K);"
      " those of one batch come from one model"
    )
  for each in recorded:
    arrays["experts"] = np.full((*shape, *each), -1, np.int32)
  return arrays
