"""Conversations of a harness outside, recorded token by token as an episode."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from arl_jax.chat.formats import ChatFormat, NoAppend
from arl_jax.chat.messages import ChatMessage, is_echo
from arl_jax.types import NO_VERSION, Role, Sample, Segment


@dataclasses.dataclass(slots=True, eq=False)
class _Branch:
  """A context that turns append to; a segment once it is sampled in.

  Attributes:
    setting: what has to be the same in every turn of it.
    messages: of a chat, replies as the format gave them.
    seen: the same as the harness saw them.
    parent: index of the branch that was extended before this began.
    busy: a turn of it runs.
  """

  setting: Hashable
  parent: int | None
  temperature: float
  messages: tuple[ChatMessage, ...] = ()
  seen: tuple[ChatMessage, ...] = ()
  ids: list[int] = dataclasses.field(default_factory=list)
  roles: list[int] = dataclasses.field(default_factory=list)
  samples: list[tuple[int, Sample]] = dataclasses.field(default_factory=list)
  busy: bool = False

  def append(self, ids: Sequence[int], role: Role) -> None:
    self.ids += ids
    self.roles += [role] * len(ids)

  def copy(self) -> _Branch:
    return dataclasses.replace(
      self,
      ids=list(self.ids),
      roles=list(self.roles),
      samples=list(self.samples),
    )

  def segment(self, parent: int | None) -> Segment:
    length = len(self.ids)
    sampled = np.zeros(length, np.bool_)
    logp = np.zeros(length, np.float32)
    version = np.full(length, NO_VERSION, np.int32)
    experts = None
    for first, sample in self.samples:
      span = slice(first, first + len(sample.ids))
      sampled[span], logp[span] = True, sample.logp
      version[span] = sample.versions
      if sample.experts is not None:
        if experts is None:
          shape = (length, *sample.experts.shape[1:])
          experts = np.full(shape, -1, np.int32)
        experts[span] = sample.experts
    return Segment(
      ids=np.array(self.ids, np.int32),
      roles=np.array(self.roles, np.uint8),
      sampled=sampled,
      behaviour_logp=logp,
      policy_version=version,
      parent=parent,
      reason="start" if parent is None else "history",
      temperature=self.temperature,
      experts=experts,
    )


@dataclasses.dataclass(slots=True, eq=False)
class Turn:
  """A request within a recording.

  Attributes:
    prompt: token ids to sample from.
    branch: that it extends, None if it begins one.
    added: ids of the prompt that are new in that branch.
    setting: of the branch that it may begin.
    temperature: of sampling.
    messages: of a chat.
    appended: whether the prompt extends exactly what was sampled before.
  """

  prompt: list[int]
  branch: _Branch | None
  added: list[int]
  setting: Hashable
  temperature: float
  messages: tuple[ChatMessage, ...] = ()

  @property
  def appended(self) -> bool:
    return self.branch is not None


class Recording:
  """One conversation, which may fork and rewrite its history.

  A turn whose history is all of a branch, with the reply that was sampled
  there, appends to it: the ids that were sampled stay, text is never encoded
  again. Any other turn begins a new branch. Every sampled token is in one
  segment.

  Attributes:
    turns: that were sampled.
    running: turns that began and didn't end yet.
    tokens: in all branches.
  """

  def __init__(self) -> None:
    self.turns = self.running = 0
    # Held for moments: event loops wait for it.
    self._lock = threading.Lock()
    self._branches: list[_Branch] = []
    self._last: int | None = None

  @property
  def tokens(self) -> int:
    return sum(len(b.ids) for b in self._branches)

  def chat(
    self,
    messages: Sequence[ChatMessage],
    tools: Sequence[Any],
    effort: str | None,
    temperature: float,
    formatter: ChatFormat,
  ) -> Turn:
    """Begins a turn of a chat; `commit` or `abandon` ends it.

    Raises:
      ValueError: the messages can't be rendered.
    """
    messages = tuple(messages)
    setting = ("chat", repr(tools), effort, temperature)
    turn = self._extend(setting, messages, tools, effort, formatter)
    if turn is None:
      prompt = formatter.render(messages, tools, effort=effort)
      turn = Turn(prompt, None, prompt, setting, temperature, messages)
    return self._begun(turn)

  def _begun(self, turn: Turn) -> Turn:
    with self._lock:
      self.running += 1
    return turn

  def _extend(self, setting, messages, tools, effort, formatter) -> Turn | None:
    """The turn that appends to a branch, None if there is no such branch."""
    branch = self._longest(
      setting,
      lambda b: (
        len(b.seen)
        if len(b.seen) < len(messages) and _echoed(b.seen, messages)
        else 0
      ),
    )
    if branch is None:
      return None
    new = messages[len(branch.seen) :]
    try:
      added = formatter.append(
        branch.ids, branch.messages, new, tools, effort=effort
      )
    except BaseException as error:
      branch.busy = False
      if isinstance(error, NoAppend):
        return None
      raise
    prompt, history = [*branch.ids, *added], (*branch.messages, *new)
    return Turn(prompt, branch, added, setting, branch.temperature, history)

  def plain(self, ids: Sequence[int], temperature: float) -> Turn:
    """Begins a turn whose prompt the harness made of tokens itself."""
    prompt = list(ids)
    setting, added = ("tokens", temperature), prompt
    branch = self._longest(
      setting,
      lambda b: len(b.ids) if b.ids == prompt[: len(b.ids)] else 0,
    )
    if branch is not None:
      added = prompt[len(branch.ids) :]
    return self._begun(Turn(prompt, branch, added, setting, temperature))

  def commit(
    self,
    turn: Turn,
    sample: Sample,
    reply: ChatMessage | None = None,
    seen: ChatMessage | None = None,
  ) -> None:
    """Keeps what a turn sampled.

    Args:
      turn: that ends.
      sample: all its tokens.
      reply: of a chat, what they say to the format.
      seen: of a chat, what the harness was told that they say.
    """
    with self._lock:
      self.running -= 1
      self._commit(turn, sample)
      if reply is not None and seen is not None:
        assert self._last is not None
        branch = self._branches[self._last]
        branch.messages += (reply,)
        branch.seen += (seen,)

  def _commit(self, turn: Turn, sample: Sample) -> None:
    branch, role = turn.branch, Role.TOOL
    if branch is None:
      branch = _Branch(turn.setting, self._last, turn.temperature)
      self._branches.append(branch)
      branch.seen, role = turn.messages, Role.PROMPT
    else:
      branch.seen += turn.messages[len(branch.messages) :]
    branch.append(turn.added, role)
    branch.samples.append((len(branch.ids), sample))
    branch.append(sample.ids.tolist(), Role.SAMPLED)
    branch.messages = turn.messages
    branch.busy = False
    self._last = self._branches.index(branch)
    self.turns += 1

  def abandon(self, turn: Turn) -> None:
    """Forgets what a turn sampled, which the harness never saw whole."""
    with self._lock:
      self.running -= 1
      if turn.branch is not None:
        turn.branch.busy = False

  def segments(self) -> tuple[Segment, ...]:
    with self._lock:
      branches = [b.copy() for b in self._branches]
    return tuple(b.segment(b.parent) for b in branches)

  def _longest(
    self, setting: Hashable, shared: Callable[[_Branch], int]
  ) -> _Branch | None:
    """The branch that shares most, taken for the caller, who frees it again.

    One in use is extended by its own turn.
    """
    while True:
      with self._lock:
        free = {
          b: len(b.ids)
          for b in self._branches
          if b.setting == setting and not b.busy
        }
      # Comparing takes time, in which others may take one, or be done with it.
      found = max(free, key=shared, default=None)
      if found is None or not shared(found):
        return None
      with self._lock:
        if not found.busy and len(found.ids) == free[found]:
          found.busy = True
          return found


def _echoed(
  seen: tuple[ChatMessage, ...], messages: tuple[ChatMessage, ...]
) -> bool:
  """Whether a history begins with what the harness was told."""
  return all(
    is_echo(found, told) if told.role == "assistant" else found == told
    for told, found in zip(seen, messages, strict=False)
  )
