"""An endless mixture of data sets that resumes where it stopped."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import grain

from arl_jax.data.sources import RandomAccess


class Mixture(Iterator[dict[str, Any]]):
  """Examples of several sources without end.

  Each source gives every example once an epoch, in an order of its own, anew
  each epoch; one that is smaller than the others repeats sooner. Which source
  is next follows from the weights alone, spread as evenly as they allow, with
  shares exact to 1 %. Which example is next is a function of its position, so a
  state is a number, and to resume is to set it: nothing is read again, and
  there are no threads or processes.
  """

  def __init__(
    self,
    sources: Sequence[RandomAccess],
    weights: Sequence[float],
    *,
    seed: int,
  ):
    """Starts at the first example.

    Args:
      sources: none of them empty.
      weights: one a source, relative to each other, > 0.
      seed: of all orders, not negative.

    Raises:
      ValueError: an argument is out of its range.
    """
    if not sources or len(sources) != len(weights):
      raise ValueError(
        f"{len(sources)} sources with {len(weights)} weights; there must be one"
        " source or more, and a weight for each"
      )
    if seed < 0:
      raise ValueError(f"seed is {seed}, not >= 0")
    for i, (source, weight) in enumerate(zip(sources, weights, strict=True)):
      if not 0 < weight < math.inf:
        raise ValueError(f"weights[{i}] is {weight}, not > 0 and finite")
      if not len(source):
        raise ValueError(f"sources[{i}] holds no example")
    shuffled = [
      grain.MapDataset.source(source).shuffle(_order_seed(seed, i)).repeat()
      for i, source in enumerate(sources)
    ]
    self._dataset = grain.MapDataset.mix(shuffled, list(weights))
    self._identity: dict[str, Any] = {
      "seed": seed,
      "weights": [float(weight) for weight in weights],
      "sources": [source.digest for source in sources],
    }
    self._next = 0

  def __iter__(self) -> Self:
    return self

  def __next__(self) -> dict[str, Any]:
    example = self._dataset[self._next]
    # After the read, which may fail: the position is of what was handed out.
    self._next += 1
    return example

  def get_state(self) -> dict[str, Any]:
    """The position and what it is a position in; JSON values."""
    return {"next": self._next, **self._identity}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes to a position that `get_state` gave.

    Raises:
      ValueError: it is none, or one in other data or another mixture of them.
    """
    if not isinstance(state, Mapping) or set(state) != set(self.get_state()):
      raise ValueError(
        f"data position {state!r:.200} must have the fields"
        f" {', '.join(self.get_state())}"
      )
    for name, value in self._identity.items():
      if state[name] != value:
        raise ValueError(
          f"data position is of {name} {state[name]!r:.200}, this run has"
          f" {value!r:.200}; resume with the data, weights and seed that it was"
          " started with"
        )
    position = state["next"]
    if type(position) is not int or not 0 <= position < sys.maxsize:
      raise ValueError(
        f"data position has next {position!r:.80}, must be an integer >= 0"
      )
    self._next = position


def _order_seed(seed: int, source: int) -> int:
  """A seed of 32 bits for one source's orders.

  Epoch e is shuffled by seed + e, so that seeds in a row would give one source
  the orders that its neighbour has an epoch later.
  """
  text = f"order {seed} {source}".encode()
  return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
