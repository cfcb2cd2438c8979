"""Runs one episode: the same code in training, evaluation and production."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

from arl_jax.agents.context import Context
from arl_jax.chat.renderer import AgentRenderer, MalformedCall, Message
from arl_jax.records import to_json
from arl_jax.types import (
  Block,
  Environment,
  Episode,
  Event,
  Observation,
  PolicyClient,
  Role,
  StopReason,
  Task,
  ToolCall,
)

# What a hard cutoff still allows (Context-1).
PRUNE = "prune_chunks"


@dataclasses.dataclass(kw_only=True, slots=True)
class AgentConfig:
  """Budgets of an episode. Checked in this order, once before each turn:
  turns, then room in the context.

  Attributes:
    token_budget: T, tokens the context may hold.
    soft_threshold: tokens; from here on each observation carries the nudge
      (training rollouts only). Context-1: T/2.
    hard_threshold: tokens; from here on every tool but prune_chunks is refused.
      Context-1: between T/2 and T.
    max_turns: messages of the policy.
    message_tokens: of one message, end mark included.
    observation_tokens: that the calls of one turn share.
    nudge: text shown past the soft threshold; empty for none.
    nudge_mode: "append" keeps it in the context; "vanish" takes it out after
      the turn, which begins a new segment, as published.
    temperature: of sampling, > 0.
    record_experts: segments keep the experts that sampled tokens went through,
      and the learner takes them again (router replay, Composer 2).
  """

  token_budget: int = 320
  soft_threshold: int = 160
  hard_threshold: int = 240
  max_turns: int = 8
  message_tokens: int = 24
  observation_tokens: int = 72
  nudge: str = "prune or answer"
  nudge_mode: str = "append"
  temperature: float = 1.0
  record_experts: bool = False

  def validate(self) -> None:
    """Raises ValueError naming the field that can't be."""
    t = self.token_budget
    if not 0 < self.soft_threshold <= self.hard_threshold < t:
      raise ValueError(
        f"agent.soft_threshold {self.soft_threshold} and hard_threshold"
        f" {self.hard_threshold} must rise below token_budget {t}"
      )
    if self.nudge_mode not in ("append", "vanish"):
      raise ValueError(
        f"agent.nudge_mode is {self.nudge_mode!r}, not 'append' or 'vanish'"
      )
    for name in ("max_turns", "message_tokens", "observation_tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"agent.{name} is {getattr(self, name)}, not >= 1")
    if not 0 < self.temperature < float("inf"):
      raise ValueError(f"agent.temperature is {self.temperature}, not > 0")


def derive_seed(*parts: Any) -> int:
  """A 31-bit seed from anything printable; the same on every machine."""
  text = "\0".join(str(p) for p in parts)
  digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
  return int.from_bytes(digest, "big") >> 1


async def run_episode(
  task: Task,
  environment: Environment,
  client: PolicyClient,
  renderer: AgentRenderer,
  config: AgentConfig,
  *,
  rollout_index: int = 0,
  seed: int = 0,
  training: bool = True,
  on_event: Callable[[Event], None] = lambda event: None,
) -> Episode:
  """Rolls out one task.

  Args:
    task: what to do.
    environment: fresh, for this episode only.
    client: what to sample from.
    renderer: of the policy's chat format.
    config: budgets.
    rollout_index: of this rollout in its group.
    seed: of sampling.
    training: whether the nudge is shown.
    on_event: told of each event as it happens.

  Raises:
    ValueError: the prompt alone is beyond the token budget, or what the
      environment reports isn't JSON, so that it couldn't be sent or written.
    Whatever client or environment raise: failures of infrastructure, which are
    the caller's to retry or to drop.
  """
  episode = _Run(
    task, environment, client, renderer, config, rollout_index, seed, training
  )
  episode.on_event = on_event
  try:
    return await episode.run()
  finally:
    await client.close(episode.session)


class _Run:
  """State of one running episode."""

  def __init__(
    self, task, environment, client, renderer, config, index, seed, training
  ):
    self._task: Task = task
    self._env: Environment = environment
    self._client: PolicyClient = client
    self._renderer: AgentRenderer = renderer
    self._config: AgentConfig = config
    self._index: int = index
    self._seed: int = seed
    self._training: bool = training
    self._context = Context(
      temperature=config.temperature, record_experts=config.record_experts
    )
    self._events: list[Event] = []
    self._turn = 0
    self.on_event: Callable[[Event], None] = lambda event: None
    self.session = f"{task.task_id}/{index}/{seed}"

  async def run(self) -> Episode:
    opening = await self._env.start(self._task)
    prompt = self._renderer.prompt(opening, self._env.tool_names)
    if len(prompt) >= self._config.token_budget:
      raise ValueError(
        f"the prompt of task {self._task.task_id} has {len(prompt)} tokens;"
        f" agent.token_budget {self._config.token_budget} can't hold it"
      )
    self._context.append(prompt, Role.PROMPT)
    self._context.append(self._renderer.open_turn(), Role.FORCED)
    stop = None
    while stop is None:
      stop = await self._take_turn()
    episode = Episode(
      task_id=self._task.task_id,
      rollout_index=self._index,
      segments=self._context.finish(),
      events=tuple(self._events),
      stop_reason=stop,
      outcome=dict(await self._env.outcome()),
      turns=self._turn,
      seed=self._seed,
    )
    _check_json(episode)
    return episode

  async def _take_turn(self) -> StopReason | None:
    config = self._config
    if self._turn >= config.max_turns:
      return StopReason.TURN_LIMIT
    room = config.token_budget - len(self._context)
    if room < 1:
      return StopReason.CONTEXT_FULL
    sample = await self._client.sample(
      self.session,
      self._context.ids,
      max_tokens=min(config.message_tokens, room),
      stop_ids=self._renderer.stop_ids,
      seed=derive_seed(self._seed, self._turn),
      temperature=config.temperature,
    )
    self._context.append_sample(sample)
    self._turn += 1
    if not sample.stopped and len(self._context) >= config.token_budget:
      return StopReason.CONTEXT_FULL
    if sample.stopped:
      message = self._renderer.parse(sample.ids.tolist(), self._env.tool_names)
    else:
      self._context.append(self._renderer.close(), Role.FORCED)
      cut = MalformedCall(text="", problem="message too long")
      message = Message(calls=(cut,))
    if message.final is not None:
      problem = await self._env.finish(message.final)
      self._log("final", text=message.final[:500], problem=problem)
      return StopReason.MALFORMED if problem else StopReason.ANSWERED
    if config.nudge_mode == "vanish":
      self._rewrite(lambda p: p.key == _NUDGE, "notice")
    return await self._observe(message)

  async def _observe(self, message: Message) -> StopReason | None:
    """Executes a turn's calls and appends what comes back.

    Whatever tools return, the context stays within its budget: blocks that no
    longer fit are left out, as are all of them if not even a reply would fit.
    """
    observations = await self._execute(message)
    gone = {key for o in observations for key in o.remove}
    if gone:
      self._rewrite(lambda p: p.key in gone, "prune")
    append, renderer, config = (
      self._context.append,
      self._renderer,
      self._config,
    )
    room = self._room(message)
    if room < 0:
      return StopReason.CONTEXT_FULL
    append(renderer.open_tool(_first_tool(message)), Role.FORCED)
    for block in (b for o in observations for b in o.blocks):
      ids = renderer.block(block.text)
      if len(ids) > room:
        self._log("cut", tokens=len(ids), room=room)
        break
      room -= len(ids)
      append(ids, Role.TOOL, key=block.key)
    used = len(self._context)
    append(renderer.usage(used, config.token_budget), Role.TOOL)
    nudged = self._training and used >= config.soft_threshold
    if nudged and config.nudge:
      append(renderer.block(config.nudge), Role.TOOL, key=_NUDGE)
      self._log("notice", used=used)
    append([*renderer.close_tool(), *renderer.open_turn()], Role.FORCED)
    return None

  def _room(self, message: Message) -> int:
    """Tokens that an observation may still add; negative if none fits.

    What is left holds the marks around it, the usage line, the nudge and a
    reply of `_REPLY_TOKENS`.
    """
    renderer, budget = self._renderer, self._config.token_budget
    around = [
      *renderer.open_tool(_first_tool(message)),
      *renderer.usage(budget, budget),
      *renderer.block(self._config.nudge),
      *renderer.close_tool(),
      *renderer.open_turn(),
    ]
    return budget - len(self._context) - len(around) - _REPLY_TOKENS

  async def _execute(self, message: Message) -> list[Observation]:
    over = len(self._context) >= self._config.hard_threshold
    calls: list[ToolCall] = []
    answers: list[Observation] = []
    for call in message.calls:
      if isinstance(call, MalformedCall):
        self._log("malformed_call", text=call.text[:200], problem=call.problem)
        answers.append(_refusal(f"error: {call.problem}"))
      elif over and call.name != PRUNE:
        self._log("refused_call", tool=call.name)
        answers.append(_refusal("over budget: prune or answer"))
      else:
        calls.append(call)
    if not calls:
      return answers
    budget = min(self._config.observation_tokens, self._room(message))
    results = await self._env.execute(calls, max(budget, 0))
    for call, result in zip(calls, results, strict=True):
      kind = "malformed_call" if result.error else "tool_call"
      self._log(
        kind,
        tool=call.name,
        argument=call.argument[:200],
        problem=result.error,
        **result.data,
      )
    return answers + results

  def _rewrite(self, leaves, reason: str) -> None:
    if not any(leaves(p) for p in self._context.pieces):
      return
    rewrite = self._context.rewrite(leaves, reason)
    self._log(
      "rewrite",
      reason=reason,
      segment=rewrite.segment,
      removed=[list(r) for r in rewrite.removed],
    )

  def _log(self, kind: str, **data: Any) -> None:
    turn = max(self._turn - 1, 0)
    event = Event(turn=turn, kind=kind, data=data)
    self._events.append(event)
    self.on_event(event)


# Key of the nudge's block; no chunk id looks like it.
_NUDGE = "\0nudge"

# Tokens that observations leave free for the reply.
_REPLY_TOKENS = 16


def _check_json(episode: Episode) -> None:
  reported = to_json(dataclasses.replace(episode, segments=()))
  try:
    json.dumps(reported, allow_nan=False)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
      f"the environment of {episode.task_id:.100} reports what isn't JSON:"
      f" {error}"
    ) from error


def _first_tool(message: Message) -> str:
  """Of those that a message calls; "" if there is none."""
  tools = (call.name for call in message.calls if isinstance(call, ToolCall))
  return next(tools, "")


def _refusal(text: str) -> Observation:
  return Observation(blocks=(Block(text=text),), error=text)
