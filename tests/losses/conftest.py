"""A loss with its gradient, compiled once for each kind of arguments."""

import functools
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arl_jax import losses

_TESTDATA = pathlib.Path(__file__).parents[1] / "testdata" / "losses"

# Names of the losses that compare with a behaviour policy.
LOSSES = ("cispo", "grpo", "gspo", "kimi_k2_5", "policy_gradient")


class Outcome(NamedTuple):
  """What a loss gives; `gradient` is the numerator's, by logp."""

  value: np.ndarray
  denominator: np.ndarray
  gradient: np.ndarray
  per_token: np.ndarray
  ratio: np.ndarray
  clipped: np.ndarray


# Run a few times each: optimising takes longer than it saves.
@functools.partial(
  jax.jit,
  static_argnums=(0, 1, 2),
  compiler_options={
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
  },
)
def _evaluate(loss, hyper, reduction, arrays, optional, counts):
  def numerator(logp):
    per_token, stats = loss(logp, *arrays[1:], **optional, **dict(hyper))
    total, denominator = losses.reduce(
      per_token, arrays[3], **dict(reduction), **counts
    )
    return total, (denominator, per_token, stats)

  found = jax.value_and_grad(numerator, has_aux=True)(arrays[0])
  (value, (denominator, per_token, stats)), gradient = found
  return value, denominator, gradient, per_token, stats


def _run(
  loss: Any,
  *arrays: Any,
  hyper: Any = (),
  reduction: Any = (),
  counts: Any = None,
  **optional: Any,
) -> Outcome:
  loss = getattr(losses, loss) if isinstance(loss, str) else loss
  hyper, reduction = (tuple(dict(x).items()) for x in (hyper, reduction))
  given = jax.tree.map(jnp.asarray, (arrays, optional, counts or {}))
  *found, stats = jax.device_get(_evaluate(loss, hyper, reduction, *given))
  return Outcome(*found, stats["ratio"], stats["clipped"])


@pytest.fixture(scope="session")
def run():
  """`Outcome` of a loss, of (logp, behaviour_logp, advantage, mask)."""
  return _run


@pytest.fixture(params=LOSSES)
def loss(request):
  return request.param


@pytest.fixture(scope="session")
def read():
  """Content of a file of golden values."""
  return lambda name: json.loads((_TESTDATA / f"{name}.json").read_text())


# Batches are padded to one shape, so that each loss is compiled once.
_SHAPE = (5, 8)


def _padded(x, dtype="float64"):
  x = np.array(x, dtype)
  missing = (n - m for n, m in zip(_SHAPE, x.shape, strict=False))
  return np.pad(x, [(0, n) for n in missing])


@pytest.fixture(scope="session")
def padded():
  return _padded


@pytest.fixture(scope="session")
def batch(read):
  """Index, dtype -> logp, behaviour_logp, advantage, mask of a golden batch.

  The first has holes in the mask, the third an empty row and log-ratios up to
  ±30; all have rows of different lengths.
  """
  batches = read("policy_losses")

  def get(i, dtype="float32"):
    names = ("logp", "behaviour_logp", "advantage")
    arrays = (_padded(batches[i][n], dtype) for n in names)
    return *arrays, _padded(batches[i]["mask"], bool)

  return get
