"""Groups through Ray's object store; only references pass the queue. No jax.

An object belongs to whom its process is known to, and is lost with that one.
So the queue's process asks for each group, and thereby owns it: a group that
was delivered outlives its actor, on the node where it was rolled out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from arl_jax.queueing.client import Superseded
from arl_jax.queueing.group_queue import Batch, Lease, Start
from arl_jax.queueing.service import QueueService
from arl_jax.records import to_json
from arl_jax.serving.http_errors import HttpError
from arl_jax.types import Episode, Group, Segment

# Name of the queue's process in the namespace of the run.
QUEUE = "queue"
# That a learner or an actor may wait for something to do, before it asks again.
_TAKE_SECONDS, _LEASE_SECONDS = 10.0, 3.0
# For a group to be stored.
_STORE_SECONDS = 120.0


class Starting(Exception):
  """The queue's process is there, but not its queue."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupReference(Group):
  """A group without its texts and most tokens, and where all of it is.

  Attributes:
    reference: `ray.ObjectRef` of the whole group.
  """

  reference: Any


class Host:
  """This process, as one that Ray started for a role of a run.

  Attributes:
    handle: of the Ray actor that it is.
  """

  def __init__(self, handle: Any):
    """Args: handle: has a method `hand_over`, which calls that of this host."""
    self.handle = handle
    self._held: dict[str, Group] = {}

  @contextlib.contextmanager
  def hold(self, groups: Sequence[Group]) -> Iterator[list[str]]:
    """Keeps groups until the queue has fetched them; gives their keys."""
    keys = [secrets.token_hex(16) for _ in groups]
    self._held.update(zip(keys, groups, strict=True))
    try:
      yield keys
    finally:
      for key in keys:
        del self._held[key]

  def hand_over(self, key: str) -> tuple[bool, Group]:
    """True, whose arrival says that the group is stored, and the group."""
    return True, self._held[key]


_host: Host | None = None


def set_host(host: Host | None) -> None:
  """Says that Ray started this process."""
  global _host
  _host = host


def get_host() -> Host | None:
  """What Ray started this process as; None if something else did."""
  return _host


def outline(group: Group) -> Group:
  """All of a group that the queue reads: ids, rewards, versions' extremes."""
  return Group(
    group_id=group.group_id,
    task=dataclasses.replace(group.task, prompt="", truth={}, provenance={}),
    episodes=tuple(_outline(episode) for episode in group.episodes),
  )


def _outline(episode: Episode) -> Episode:
  segments = tuple(_cut(segment) for segment in episode.segments)
  return dataclasses.replace(episode, segments=segments, events=(), outcome={})


def _cut(segment: Segment) -> Segment:
  """Only the newest token, and the oldest of those that are trained."""
  versions, kept = segment.policy_version, set[int]()
  if len(segment):
    kept.add(int(versions.argmax()))
  trained = np.flatnonzero(segment.trained)
  if trained.size:
    kept.add(int(trained[versions[trained].argmin()]))
  at = np.array(sorted(kept), np.int64)
  return dataclasses.replace(
    segment,
    ids=segment.ids[at],
    roles=segment.roles[at],
    sampled=segment.sampled[at],
    behaviour_logp=segment.behaviour_logp[at],
    policy_version=versions[at],
    experts=None,
  )


def whole(reference: GroupReference, group: Any) -> Group:
  """What a reference led to. Raises ValueError if that is another group."""
  said = Group(
    group_id=reference.group_id,
    task=reference.task,
    episodes=reference.episodes,
  )
  if not isinstance(group, Group) or to_json(outline(group)) != to_json(said):
    raise ValueError(
      f"the object of group {reference.group_id!r:.100} isn't that group"
    )
  return group


class RayQueueService(QueueService):
  """A queue that also takes references, from processes of the same Ray.

  Its methods are coroutines of the loop that runs it. Signs of life, and what
  people ask, come over HTTP as ever.
  """

  async def begin(self, start: Start, host: Any, keys: Sequence[str]) -> None:
    """Args: keys: of `start.groups`, which are outlines, with `host`."""
    pairs = zip(start.groups, keys, strict=True)
    groups = [await _fetch(group, host, key) for group, key in pairs]
    self._queue.begin(dataclasses.replace(start, groups=tuple(groups)))
    self._notify()

  async def take(
    self, lineage: str, step: int, version: int, wait: float
  ) -> Batch | None:
    def take() -> Batch | None:
      self._check(lineage)
      return self._queue.take(step, version)

    batch = take()
    # Room for new tasks comes with the version that a take tells.
    self._notify()
    if batch is None:
      batch = await self._until(take, min(wait, _TAKE_SECONDS))
      self._notify()
    return batch

  async def waiting(self, lineage: str) -> tuple[Group, ...]:
    self._check(lineage)
    return self._queue.waiting()

  async def status(self) -> dict[str, Any]:
    return self._queue.status()

  async def roles(self) -> list[dict[str, Any]]:
    return self._roster.roles()

  async def lease(self, actor: str, most: int) -> list[Lease]:
    def lease() -> list[Lease] | None:
      return self._queue.lease(actor, most) or None

    return await self._until(lease, _LEASE_SECONDS) or []

  async def renew(self, actor: str, leases: Sequence[Lease]) -> list[Lease]:
    return self._queue.renew(actor, leases)

  async def give_back(self, actor: str, leases: Sequence[Lease]) -> None:
    self._queue.give_back(actor, leases)
    self._notify()

  async def deliver(
    self, actor: str, lease: Lease, group: Group | None, host: Any, key: str
  ) -> str:
    """Args: group: an outline; host and key: where all of it is."""
    found = None if group is None else await _fetch(group, host, key)
    fate = self._queue.deliver(actor, lease, found)
    self._notify()
    return fate

  def _check(self, lineage: str) -> None:
    try:
      self._check_lineage(lineage)
    except HttpError as error:
      raise Superseded(str(error)) from error


async def _fetch(group: Group, host: Any, key: str) -> GroupReference:
  """A reference that this process owns, to a group that is stored."""
  stored, reference = host.hand_over.options(num_returns=2).remote(key)
  await asyncio.wait_for(asyncio.wrap_future(stored.future()), _STORE_SECONDS)
  return GroupReference(
    group_id=group.group_id,
    task=group.task,
    episodes=group.episodes,
    reference=reference,
  )
