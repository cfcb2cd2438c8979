"""Segments that a context leaves behind, for any sequence of operations."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from arl_jax.agents.context import Context
from arl_jax.types import NO_VERSION, Role, Sample


def sample(ids, version: int = 0) -> Sample:
  n = len(ids)
  return Sample(
    ids=np.array(ids, np.int32),
    logp=-np.arange(1, n + 1, dtype=np.float32) / 8,
    versions=np.full(n, version, np.int32),
    stopped=True,
  )


operations = st.lists(
  st.one_of(
    st.tuples(
      st.just("append"),
      st.integers(0, 4),
      st.sampled_from([Role.PROMPT, Role.TOOL, Role.FORCED]),
      st.sampled_from([None, "a", "b"]),
    ),
    st.tuples(st.just("sample"), st.integers(0, 4), st.integers(0, 3)),
    st.tuples(st.just("rewrite"), st.sampled_from(["a", "b", "all"])),
  ),
  max_size=20,
)


class Model:
  """The plainest bookkeeping: every token is a new number."""

  def __init__(self):
    self.next = 0
    self.view: list[tuple[int, str | None]] = []
    # Per sampled token: what it was conditioned on, log-prob, version.
    self.sampled: dict[int, tuple[list[int], float, int]] = {}
    self.views: list[list[int]] = []
    self.rewrites: list[tuple[list[int], list[int]]] = []

  def fresh(self, n: int) -> list[int]:
    ids = list(range(self.next, self.next + n))
    self.next += n
    return ids

  def ids(self) -> list[int]:
    return [i for i, _ in self.view]


def play(ops):
  context, model = Context(agent="x", temperature=0.7), Model()
  rewrites = []
  for op, *rest in ops:
    if op == "append":
      n, role, key = rest
      ids = model.fresh(n)
      context.append(ids, role, key=key)
      model.view += [(i, key) for i in ids]
    elif op == "sample":
      n, version = rest
      ids = model.fresh(n)
      made = sample(ids, version)
      for at, i in enumerate(ids):
        model.sampled[i] = (
          model.ids() + ids[:at],
          float(made.logp[at]),
          version,
        )
      context.append_sample(made)
      model.view += [(i, None) for i in ids]
    else:
      (key,) = rest
      parent = model.ids()
      model.views.append(parent)
      if key == "all":
        rewrite = context.rewrite(lambda p: p.key is not None, "prune")
        model.view = [(i, k) for i, k in model.view if k is None]
      else:
        rewrite = context.rewrite(lambda p, key=key: p.key == key, "prune")
        model.view = [(i, k) for i, k in model.view if k != key]
      rewrites.append((rewrite, parent, model.ids()))
    assert context.ids == model.ids()
    assert len(context) == len(model.view)
  model.views.append(model.ids())
  return context.finish(), model, rewrites


@settings(deadline=None)
@given(operations)
def test_every_sampled_token_is_fresh_in_exactly_one_segment(ops):
  segments, model, _ = play(ops)
  fresh = [int(i) for s in segments for i in s.ids[s.sampled]]
  assert len(fresh) == len(set(fresh))
  assert set(fresh) == set(model.sampled)


@settings(deadline=None)
@given(operations)
def test_a_sampled_token_stands_behind_what_it_was_conditioned_on(ops):
  segments, model, _ = play(ops)
  for segment in segments:
    for at in np.flatnonzero(segment.sampled):
      before, logp, version = model.sampled[int(segment.ids[at])]
      assert segment.ids[:at].tolist() == before
      assert segment.behaviour_logp[at] == logp
      assert segment.policy_version[at] == version
      assert segment.roles[at] == Role.SAMPLED


@settings(deadline=None)
@given(operations)
def test_segments_are_the_views_and_form_a_chain(ops):
  segments, model, _ = play(ops)
  assert [s.ids.tolist() for s in segments] == model.views
  parents = [s.parent for s in segments]
  assert parents == [None, *range(len(segments) - 1)]
  reasons = [s.reason for s in segments]
  assert reasons == ["start"] + ["prune"] * (len(segments) - 1)
  for segment in segments:
    assert (segment.agent, segment.temperature) == ("x", 0.7)
    assert segment.trainable
    # Carried tokens keep their role, but nothing to train with.
    carried = (segment.roles == Role.SAMPLED) & ~segment.sampled
    assert (segment.policy_version[~segment.sampled] == NO_VERSION).all()
    assert (segment.behaviour_logp[carried] == 0).all()


@settings(deadline=None)
@given(operations)
def test_a_rewrite_says_which_ranges_of_the_parent_are_gone(ops):
  _, _, rewrites = play(ops)
  for number, (rewrite, parent, after) in enumerate(rewrites, 1):
    assert rewrite.segment == number
    gone = {i for a, b in rewrite.removed for i in range(a, b)}
    assert [x for i, x in enumerate(parent) if i not in gone] == after
    flat = [x for r in rewrite.removed for x in r]
    assert flat == sorted(flat)


def test_an_empty_context_has_one_empty_segment():
  (segment,) = Context().finish()
  assert len(segment) == 0


def test_a_key_goes_as_a_whole():
  context = Context()
  context.append([1, 2], Role.PROMPT)
  context.append([3, 4], Role.TOOL, key="k")
  context.append_sample(sample([5, 6], version=2))
  context.append([7], Role.TOOL, key="k")
  rewrite = context.rewrite(lambda p: p.key == "k", "prune")
  assert rewrite.removed == ((2, 4), (6, 7))
  context.append_sample(sample([8], version=3))
  first, second = context.finish()
  assert second.ids.tolist() == [1, 2, 5, 6, 8]
  assert second.sampled.tolist() == [False] * 4 + [True]
  assert second.policy_version.tolist() == [-1, -1, -1, -1, 3]
  assert first.policy_version[4:6].tolist() == [2, 2]
  assert second.roles.tolist() == [0, 0, 1, 1, 1]
