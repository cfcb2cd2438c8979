"""Schedulers over fake engines, and what must hold of what they serve."""

import numpy as np

from arl_jax.rollout.request import Sampling
from arl_jax.rollout.scheduler import Scheduler
from tests.rollout.fake_engine import FakeEngine, Params, next_token


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def make_scheduler(engine=None, **changes):
  return Scheduler(engine or FakeEngine(), Params(0), 0, **changes)


def prompt(length, seed=0):
  return np.random.default_rng(seed).integers(0, 64, length).tolist()


def submit(scheduler, session, ids, *, training=True, **changes):
  outer = {k: changes.pop(k) for k in ("timeout", "version") if k in changes}
  sampling = Sampling(**{"max_tokens": 6, "seed": 1} | changes)
  return scheduler.submit(session, ids, sampling, training=training, **outer)


def drain(scheduler, steps=10_000):
  """Runs to the end; returns what finished, in order."""
  done = []
  for _ in range(steps):
    if not scheduler.busy:
      break
    done += scheduler.step()
  assert not scheduler.busy
  assert scheduler.waiting == scheduler.running == 0
  assert not scheduler._prefilling
  assert not scheduler._limits.violations
  return done


def serve(scheduler, session, ids, **changes):
  request = submit(scheduler, session, ids, **changes)
  assert drain(scheduler) == [request]
  return request


def assert_right(request):
  """Tokens are those that it gets alone, and records say how they came."""
  assert request.error is None
  sample = request.result
  context = list(request.ids)
  for i, token in enumerate(sample.ids.tolist()):
    version = int(sample.versions[i])
    assert token == next_token(version, context, request.sampling.seed, i)
    context.append(token)
  np.testing.assert_array_equal(sample.cache_versions, -sample.logp)
  # No cache entry is of a later version than the token.
  assert (-sample.sampled_logp <= sample.versions).all()
  np.testing.assert_array_equal(sample.experts[:, 0, 0], sample.ids)
  if sample.finish == "length":
    assert len(sample.ids) == request.sampling.max_tokens
  assert sample.stopped == (sample.finish != "length")


def letters(ids):
  return "".join(chr(ord("0") + i) for i in ids)
