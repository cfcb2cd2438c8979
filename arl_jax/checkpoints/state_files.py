"""The files of a train state, which orbax writes and reads."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from arl_jax.checkpoints.failure import DamagedError, reason

# A disk that is only slow must not fail a run.
_TIMEOUT_S = 4 * 3600


def start_writing(path: pathlib.Path, state: Any) -> Callable[[], None]:
  """Copies a state and begins to write it; raises what goes wrong.

  Args:
    path: of the folder to come.
    state: may be donated or overwritten as soon as this returns.

  Returns:
    What returns when all is written, or raises what went wrong.
  """
  # Beside the copy, orbax holds what it has compressed and not written yet.
  # Unlimited, that's the whole state once more; less than an array, an error.
  limit_gb = max(map(_bytes, jax.tree.leaves(state)), default=0) // 10**9 + 1
  writer = ocp.AsyncCheckpointer(
    ocp.StandardCheckpointHandler(save_concurrent_gb=limit_gb),
    async_options=ocp.AsyncOptions(
      timeout_secs=_TIMEOUT_S,
      # Otherwise writers wait for a folder that can't be made, too.
      create_directories_asynchronously=False,
    ),
  )
  try:
    writer.save(path, args=ocp.args.StandardSave(held(state)))
  except Exception:
    with contextlib.suppress(Exception):
      writer.close()
    raise

  def finish() -> None:
    try:
      writer.wait_until_finished()
    finally:
      writer.close()

  return finish


def read(path: pathlib.Path, like: Any) -> Any:
  """A state in the structure and placement of `like`.

  Args:
    path: of its folder.
    like: arrays or `jax.ShapeDtypeStruct` with shardings, of the shapes and
      dtypes that were written.

  Raises:
    DamagedError: it can't be read.
  """
  try:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
      wanted = jax.tree.map(_abstract, like)
      tree = reader.restore(path, args=ocp.args.StandardRestore(wanted))
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise  # Of this machine, not of the files.
  except Exception as error:
    raise DamagedError(reason(error)) from error
  return jax.tree.map(_filled, like, tree)


def size(tree: Any) -> int:
  """Bytes of all arrays."""
  return sum(map(_bytes, jax.tree.leaves(tree)))


def held(tree: Any) -> Any:
  """The same values, which stay when `tree` is donated or overwritten.

  Arrays in a device's own memory are left as they are: writing them begins
  with a copy to the host anyway.
  """
  return jax.tree.map(_held, tree)


# Stands in for arrays without elements, which orbax refuses.
_NOTHING = np.zeros(1, np.uint8)


def _held(leaf: Any) -> Any:
  if np.size(leaf) == 0:
    return _NOTHING
  if not isinstance(leaf, jax.Array) or not _seen_by_host(leaf):
    return leaf
  if not leaf.is_fully_addressable:
    return jnp.copy(leaf)
  return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _seen_by_host(array: jax.Array) -> bool:
  """Whether numpy may get a view of the array's memory, not a copy."""
  device: Any = next(iter(array.sharding.device_set))
  kind = array.sharding.memory_kind
  return device.platform == "cpu" or kind not in (
    None,
    device.default_memory().kind,
  )


def _abstract(leaf: Any) -> Any:
  if np.size(leaf) == 0:
    return _NOTHING
  if isinstance(leaf, jax.Array):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
  return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _filled(like: Any, leaf: Any) -> Any:
  if np.size(like) == 0:
    if isinstance(like, np.ndarray):
      return np.zeros_like(like)
    return jnp.zeros(like.shape, like.dtype, device=like.sharding)
  return leaf[()] if isinstance(like, np.generic) else leaf


def _bytes(leaf: Any) -> int:
  return leaf.nbytes if hasattr(leaf, "nbytes") else 8  # A Python number.
