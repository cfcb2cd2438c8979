"""What a commit says of each leaf of a state, and what must agree with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from arl_jax.checkpoints import digest
from arl_jax.checkpoints.failure import DamagedError


def described(tree: Any) -> dict[str, dict[str, Any]]:
  """Shape, dtype and digest of each leaf by its path; JSON values."""
  sums = digest.digests(tree)
  return {
    name: {
      "shape": list(np.shape(leaf)),
      "dtype": _dtype(leaf),
      "digest": sums[name],
    }
    for name, leaf in digest.leaves(tree).items()
  }


def check_fits(described: Mapping[str, Mapping[str, Any]], like: Any) -> None:
  """Raises ValueError naming the first leaf that a commit can't fill.

  Args:
    described: of the commit.
    like: what it is to be restored to.
  """
  wanted = digest.leaves(like)
  for name, leaf in wanted.items():
    here = f"{_dtype(leaf)}{list(np.shape(leaf))}"
    if name not in described:
      raise ValueError(f"it has no leaf {name}, which is {here} in this run")
    saved = described[name]
    there = f"{saved['dtype']}{saved['shape']}"
    if there != here:
      raise ValueError(f"its leaf {name} is {there}, but {here} in this run")
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
      _check_sharding(name, leaf)
  for name, saved in described.items():
    if name not in wanted:
      raise ValueError(
        f"its leaf {name}, {saved['dtype']}{saved['shape']}, is absent in this"
        " run"
      )


def check_digests(
  described: Mapping[str, Mapping[str, Any]], tree: Any
) -> None:
  """Raises DamagedError naming the first leaf with other bits than saved."""
  for name, found in digest.digests(tree).items():
    saved = described[name]["digest"]
    if found != saved:
      raise DamagedError(
        f"its leaf {name} has digest {found}, {saved} was written"
      )


def _dtype(leaf: Any) -> str:
  return str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)


def _check_sharding(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> None:
  if leaf.sharding is None:
    raise ValueError(f"leaf {name} of this run has no sharding; it needs one")
  try:
    leaf.sharding.shard_shape(leaf.shape)
  except ValueError as error:
    raise ValueError(
      f"leaf {name} of this run can't be placed: {error}"
    ) from None
