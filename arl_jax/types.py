"""Every record that crosses a boundary, and the protocols around them.

numpy only: actors, environments and rewards import this module and nothing
heavier. Letters of array axes, used in shape comments throughout:

  B  rows of a batch        T  positions (tokens) of a row or segment
  V  vocabulary             D  model width
  L  layers                 E  experts          K  chosen experts a token
  H  query heads            G  key/value heads  S  decode slots
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

# Raised whenever a field changes meaning; records of another version are
# refused by `records.from_json`, never reinterpreted.
SCHEMA_VERSION = 1

# Policy version of a token that no policy sampled.
NO_VERSION = -1


class Role(enum.IntEnum):
  """Where a token of a segment came from.

  `SAMPLED` is about origin only: a token carried over from a parent segment
  keeps the role, but `Segment.sampled` is False there, so that it is trained
  once.
  """

  PROMPT = 0
  SAMPLED = 1
  TOOL = 2
  # Headers and end-of-turn marks that the harness wrote for the policy.
  FORCED = 3


class StopReason(enum.Enum):
  """Why an episode ended, recorded by whoever ended it."""

  # The policy sent a final message that the environment could parse.
  ANSWERED = "answered"
  # The policy sent a final message that the environment could not parse.
  MALFORMED = "malformed"
  # The episode reached its largest number of turns without a final message.
  TURN_LIMIT = "turn_limit"
  # The next turn no longer fits into the token budget of the context.
  CONTEXT_FULL = "context_full"
  # Cancelled from outside; neither trained nor scored.
  CANCELLED = "cancelled"
  # Something other than the policy failed; neither trained nor scored.
  INFRASTRUCTURE = "infrastructure"

  @property
  def scorable(self) -> bool:
    """Whether the outcome says something about the policy."""
    return self not in (StopReason.CANCELLED, StopReason.INFRASTRUCTURE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
  """One thing to do, with what is needed to judge it.

  Attributes:
    task_id: unique within its source, stable between runs.
    prompt: what the policy is asked.
    truth: what only rewards may read; JSON values.
    split: "train" or "heldout".
    provenance: where the task came from; JSON values.
  """

  task_id: str
  prompt: str
  truth: Mapping[str, Any]
  split: str = "train"
  provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
  """A context exactly as the policy saw it, from its first to its last token.

  While turns only append, an episode has one segment. Where the context is
  rewritten (prune, vanished notice, summary) or another agent begins, a new
  segment starts, with the one it follows as its parent: segments form a tree.

  Attributes:
    ids: [T] int32, token ids.
    roles: [T] uint8, `Role` of each token.
    sampled: [T] bool, sampled in *this* segment; what is trained. Tokens
      carried over from the parent are not.
    behaviour_logp: [T] float32, nats, log-softmax(logits / temperature) of the
      sampled token at sampling time; 0 where not sampled.
    policy_version: [T] int32, version that sampled the token; `NO_VERSION`
      where not sampled.
    parent: index in `Episode.segments`, None for a root.
    reason: why the segment began: "start", "prune", "notice", "summary",
      "subagent".
    agent: name of the agent whose context this is.
    trainable: False for frozen agents; nothing in it is trained then.
    temperature: of sampling, > 0.
    experts: [T, L_moe, K] int32 chosen experts, -1 free; None if unrecorded.
  """

  ids: np.ndarray
  roles: np.ndarray
  sampled: np.ndarray
  behaviour_logp: np.ndarray
  policy_version: np.ndarray
  parent: int | None = None
  reason: str = "start"
  agent: str = "main"
  trainable: bool = True
  temperature: float = 1.0
  experts: np.ndarray | None = None

  def __post_init__(self):
    (length,) = self.ids.shape
    for name, dtype in SEGMENT_DTYPES.items():
      value = getattr(self, name)
      if value.shape != (length,) or value.dtype != dtype:
        raise ValueError(
          f"Segment.{name} is {value.dtype}{list(value.shape)}, not "
          f"{np.dtype(dtype)}[{length}] like ids"
        )
    if (self.ids < 0).any():
      raise ValueError(f"Segment.ids holds {self.ids.min()}, no token")
    if not 0 < self.temperature < np.inf:
      raise ValueError(f"Segment.temperature is {self.temperature}, not > 0")
    chosen = self.experts
    if chosen is not None and (
      chosen.ndim != 3 or len(chosen) != length or chosen.dtype != np.int32
    ):
      raise ValueError(
        f"Segment.experts is {chosen.dtype}{list(chosen.shape)}, not"
        f" int32[{length}, layers, K]"
      )
    if not np.isfinite(self.behaviour_logp).all():
      raise ValueError("Segment.behaviour_logp holds a value that isn't finite")
    if (self.policy_version[self.sampled] < 0).any():
      raise ValueError("Segment.policy_version is unset on a sampled token")

  def __len__(self) -> int:
    return len(self.ids)

  @property
  def trained(self) -> np.ndarray:
    """[T] bool, tokens that enter the loss."""
    return self.sampled if self.trainable else np.zeros_like(self.sampled)


SEGMENT_DTYPES = {
  "ids": np.int32,
  "roles": np.uint8,
  "sampled": np.bool_,
  "behaviour_logp": np.float32,
  "policy_version": np.int32,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
  """Something that happened in an episode, for people, metrics and rewards.

  Attributes:
    turn: turn of the policy it belongs to, from 0.
    kind: "tool_call", "malformed_call", "refused_call", "notice", "rewrite",
      "final", "cut".
    data: JSON values.
  """

  turn: int
  kind: str
  data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
  """A rollout's reward and the parts it was made from."""

  total: float
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
  """One rollout of one task.

  Attributes:
    task_id: of the task rolled out.
    rollout_index: of this rollout in its group, from 0.
    segments: the tree of contexts, parents before children.
    events: in order of time.
    stop_reason: why it ended.
    outcome: what the environment reports at the end; JSON values, and all that
      a reward sees beside the task and the events.
    turns: messages that the policy sent.
    reward: None until it is scored.
    seed: of the rollout's sampling.
  """

  task_id: str
  rollout_index: int
  segments: tuple[Segment, ...]
  events: tuple[Event, ...]
  stop_reason: StopReason
  outcome: Mapping[str, Any]
  turns: int
  seed: int = 0
  reward: Reward | None = None

  def __post_init__(self):
    for i, segment in enumerate(self.segments):
      if segment.parent is not None and not 0 <= segment.parent < i:
        raise ValueError(
          f"segment {i} names parent {segment.parent}; parents come before"
          " their children"
        )

  @property
  def trained_tokens(self) -> int:
    return sum(int(s.trained.sum()) for s in self.segments)

  @property
  def oldest_version(self) -> int:
    """Of the trained tokens; `NO_VERSION` if nothing is trained."""
    versions = [s.policy_version[s.trained] for s in self.segments]
    merged = np.concatenate(versions) if versions else np.zeros(0, np.int32)
    return int(merged.min()) if merged.size else NO_VERSION


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
  """Rollouts of one task whose rewards are compared with each other.

  Groups are made by id, never by the text of a prompt.
  """

  group_id: str
  task: Task
  episodes: tuple[Episode, ...]

  def __post_init__(self):
    for episode in self.episodes:
      if episode.task_id != self.task.task_id:
        raise ValueError(
          f"group {self.group_id} of task {self.task.task_id} holds an episode"
          f" of task {episode.task_id}"
        )

  @property
  def rewards(self) -> np.ndarray:
    """[episodes] float64. Raises ValueError for an episode without one."""
    rewards = []
    for episode in self.episodes:
      if episode.reward is None:
        raise ValueError(f"group {self.group_id} holds an unscored episode")
      rewards.append(episode.reward.total)
    return np.asarray(rewards, np.float64)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
  """One tool call as the policy wrote it: the tool's name and its argument."""

  name: str
  argument: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
  """A piece of an observation that can be taken out of the view as a whole.

  Attributes:
    text: what the policy reads.
    key: what a prune names it by (a chunk id); None if it can't be pruned.
  """

  text: str
  key: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
  """A tool's answer.

  Attributes:
    blocks: what is appended to the context.
    remove: keys of blocks that leave the context (a prune).
    error: what was wrong with the call, None if nothing was.
    data: JSON values for the event log.
  """

  blocks: tuple[Block, ...] = ()
  remove: tuple[str, ...] = ()
  error: str | None = None
  data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
  """Tokens a policy sampled in answer to one request.

  Attributes:
    ids: [n] int32; the stop token, if one was sampled, included.
    logp: [n] float32, nats, behaviour log-probs.
    versions: [n] int32, policy version of each.
    stopped: True on a stop token or stop string, False if `max_tokens` cut it.
    sampled_logp: [n] float32, nats, of the distribution drawn from; that is
      another one where tokens were filtered. None if unrecorded.
    experts: [n, L_moe, K] int32 chosen experts; None if unrecorded.
    cache_versions: [n] int32, oldest version that computed any cache entry that
      the token was conditioned on; None if unrecorded.
    finish: "stop_id", "stop_string" or "length"; None if unrecorded.
  """

  ids: np.ndarray
  logp: np.ndarray
  versions: np.ndarray
  stopped: bool
  sampled_logp: np.ndarray | None = None
  experts: np.ndarray | None = None
  cache_versions: np.ndarray | None = None
  finish: str | None = None


@runtime_checkable
class PolicyClient(Protocol):
  """What an agent samples from: a local engine, or a server's client."""

  async def sample(
    self,
    session: str,
    ids: Sequence[int],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    seed: int,
    temperature: float = 1.0,
  ) -> Sample:
    """Continues `ids`. Requests of one session reuse its cached prefix.

    The stream of random numbers depends on `seed` alone.
    """

  async def close(self, session: str) -> None:
    """Gives back what the session holds."""


@runtime_checkable
class Environment(Protocol):
  """Tools and their state for one episode; single-use.

  It may live in another process, hence the coroutines.
  """

  @property
  def tool_names(self) -> tuple[str, ...]:
    """The closed set of tools; anything else is a malformed call."""

  async def start(self, task: Task) -> str:
    """Returns the opening message."""

  async def execute(
    self, calls: Sequence[ToolCall], token_budget: int
  ) -> list[Observation]:
    """Runs one turn's calls, which share `token_budget` (tokens).

    What the policy did wrong is an observation with `error` set; an exception
    is a failure of infrastructure.
    """

  async def finish(self, message: str) -> str | None:
    """Takes the final message; returns what is wrong with it, or None."""

  async def outcome(self) -> Mapping[str, Any]:
    """JSON values that rewards read."""


@runtime_checkable
class RewardFn(Protocol):
  """Scores a finished episode. Pure: the same record, the same reward."""

  def __call__(self, task: Task, episode: Episode) -> Reward: ...


@runtime_checkable
class LossFn(Protocol):
  """A policy loss as arrays (see `arl_jax.losses.policy`).

  Hyper-parameters are further keyword-only arguments with defaults. Returns
  (per_token [B, T], stats) with "ratio" and "clipped" [B, T] in stats;
  reduction is not its business.
  """

  def __call__(
    self, logp: Any, behaviour_logp: Any, advantage: Any, mask: Any, /
  ) -> tuple[Any, Mapping[str, Any]]: ...
