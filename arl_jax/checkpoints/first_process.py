"""Decisions that one process of a `jax.distributed` job takes for all."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from arl_jax.checkpoints.failure import DamagedError

T = TypeVar("T")


_ERRORS: dict[str, type[ValueError]] = {
  "DamagedError": DamagedError,
  "ValueError": ValueError,
}


def from_first(call: Callable[[], T]) -> T:
  """What `call` gives in process 0; all processes must come here together.

  It is called there alone, so that they agree even where each would see
  something else, such as a folder that is just changing.

  Args:
    call: returns a JSON value. If it raises, all processes raise.

  Raises:
    OSError, DamagedError, ValueError: as `call` did.
  """
  if jax.process_count() == 1:
    return call()
  answer = _everywhere(_answer(call) if jax.process_index() == 0 else {})
  if "value" in answer:
    return answer["value"]
  kind, number, message = answer["error"]
  if kind == "OSError":
    raise OSError(number, message)
  raise _ERRORS[kind](message)


def _answer(call: Callable[[], Any]) -> dict[str, Any]:
  try:
    return {"value": call()}
  except OSError as error:
    number = error.errno or errno.EIO
    return {"error": ["OSError", number, error.strerror or str(error)]}
  except ValueError as error:
    damaged = isinstance(error, DamagedError)
    kind = "DamagedError" if damaged else "ValueError"
    return {"error": [kind, 0, str(error)]}


def _everywhere(value: Any) -> Any:
  """The JSON value that process 0 passes."""
  own = np.frombuffer(json.dumps(value).encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(own.size)))
  sent = np.zeros(size, np.uint8)
  if jax.process_index() == 0:
    sent[:] = own
  return json.loads(multihost_utils.broadcast_one_to_all(sent).tobytes())
