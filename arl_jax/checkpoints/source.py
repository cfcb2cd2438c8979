"""Tensors by name, of which parts are read: what every kind of file offers."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Protocol, Self

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
  """One tensor as a reader sees it.

  Attributes:
    shape: sizes of its dimensions.
    dtype: what it becomes when the caller asks for no other.
  """

  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


class Source(Protocol):
  """Named tensors that are read in parts; a context manager."""

  tensors: Mapping[str, Stored]

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Part `index` of tensor `name`, C-contiguous.

    Args:
      name: a key of `tensors`.
      index: one slice a dimension, with 0 <= start <= stop <= size (or None)
        and step 1 (or None).

    Raises:
      ValueError: there is no such tensor or part, or its file is at fault.
    """
    ...

  def close(self) -> None:
    """Ends reading; a second call does nothing."""
    ...

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def spans(
  name: str, shape: tuple[int, ...], index: tuple[slice, ...]
) -> tuple[tuple[int, int], ...]:
  """(start, stop) of each dimension of an index.

  Raises:
    ValueError: `index` isn't one slice with step 1 a dimension, within `shape`.
  """
  if not isinstance(index, tuple) or len(index) != len(shape):
    raise ValueError(
      f"index {shown(index)} of tensor {shown(name)} must be a tuple of"
      f" {len(shape)} slices, for shape {shape}"
    )
  result = []
  for part, size in zip(index, shape, strict=True):
    try:
      if part.step is not None and operator.index(part.step) != 1:
        raise ValueError
      start = 0 if part.start is None else operator.index(part.start)
      stop = size if part.stop is None else operator.index(part.stop)
      if not 0 <= start <= stop <= size:
        raise ValueError
    except (AttributeError, TypeError, ValueError):
      raise ValueError(
        f"index {shown(part)} of tensor {shown(name)} must be a slice within"
        f" 0 and {size}, with step 1"
      ) from None
    result.append((start, stop))
  return tuple(result)


def shown(value: object) -> str:
  """A value in an error: on one line, and not too long."""
  text = ascii(value)
  return text if len(text) <= 200 else f"{text[:197]}..."
