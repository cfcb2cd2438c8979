"""Which segments of demonstrations enter which supervised update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from arl_jax.agents.context import Context
from arl_jax.chat.renderer import AgentRenderer
from arl_jax.types import Episode, Role, Sample, Segment


def segments_of(episodes: Sequence[Episode]) -> list[Segment]:
  """Those with something to train on."""
  return [s for e in episodes for s in e.segments if s.trained.any()]


def openings(
  questions: Iterator[str],
  renderer: AgentRenderer,
  play: Callable[[str], Callable[[Sequence[int]], Sample]],
) -> Iterator[Segment]:
  """First turns on an endless stream of questions.

  Short, and never the same twice: what a policy learns copying from, which a
  fixed set of demonstrations lets it replace by memory.

  Args:
    questions: texts of prompts.
    renderer: of the chat format.
    play: makes a player for a question; it maps a context to a message.
  """
  for question in questions:
    context = Context()
    context.append(renderer.prompt(question), Role.PROMPT)
    context.append(renderer.open_turn(), Role.FORCED)
    context.append_sample(play(question)(context.ids))
    yield from context.finish()


def shuffled(segments: Sequence[Segment], seed: int) -> Iterator[Segment]:
  """All of them in a random order, anew each epoch, without end.

  Raises:
    ValueError: there are none.
  """
  if not segments:
    raise ValueError("there is no segment to train on")
  random = np.random.default_rng(seed)
  while True:
    for index in random.permutation(len(segments)):
      yield segments[index]


def batches(
  segments: Iterator[Segment], *, tokens: int, steps: int
) -> Iterator[list[Segment]]:
  """`steps` batches, each of `tokens` tokens or up to one segment more."""
  for _ in range(steps):
    batch: list[Segment] = []
    total = 0
    while total < tokens:
      segment = next(segments)
      batch.append(segment)
      total += len(segment)
    yield batch
