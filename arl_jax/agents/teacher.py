"""A chat model that shows how a task is done, whatever endpoint serves it.

It meets `PolicyClient`, so that the harness turns its play into episodes of
exactly the form that a policy's rollouts have: what a policy is warmed up on.
The teacher sees the conversation as its API has it; what it says is written in
the policy's chat format. Nobody trusts it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from arl_jax.agents.harness import derive_seed
from arl_jax.chat.messages import (
  ChatMessage,
  Tool,
  message_json,
  parse_messages,
)
from arl_jax.chat.messages import ToolCall as ChatCall
from arl_jax.chat.one_argument import OneArgument
from arl_jax.chat.renderer import AgentRenderer
from arl_jax.chat.replies import CallChecker, MalformedCall
from arl_jax.serving.chat_endpoint import (
  ChatEndpoint,
  read_message,
  without_thoughts,
)
from arl_jax.serving.json_endpoint import TooLarge
from arl_jax.types import Sample, ToolCall

# Of one turn, before the episode is given up.
_TRIES = 3
_LIMIT = "\nA message of yours may have about {tokens} tokens."
_AGAIN = "That can't be used: {problem}. Say it again in another way."
_ELSEWHERE = "Answered together with the first call."


class TeacherFailed(Exception):
  """A teacher said nothing that the policy could say; the reason why."""


class _Unusable(Exception):
  """A message that the policy couldn't say, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
  """What was said, and its ids in the policy's chat format."""

  said: ChatMessage
  ids: tuple[int, ...]


class Teacher:
  """A client for one episode of one task.

  Attributes of the context that it reads: the texts of the observations, as
  they are since the last prune.
  """

  def __init__(
    self,
    chat: ChatEndpoint,
    renderer: AgentRenderer,
    *,
    system: str,
    question: str,
    tools: Sequence[Tool],
  ):
    """Says nothing yet.

    Args:
      chat: where the model is.
      renderer: of the policy's chat format.
      system: what the policy is told before the question.
      question: the opening message of the task.
      tools: that the environment offers, each with one argument.

    Raises:
      ValueError: a tool has not exactly one argument.
    """
    self._chat, self._renderer = chat, renderer
    self._system, self._question = system, question
    self._tools, self._offered = OneArgument(tools), tuple(tools)
    self._said: list[ChatMessage] = []

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
    """See `types.PolicyClient`; log-probs are 0, the teacher is version 0.

    A message that the policy couldn't say, such as a call of an unknown tool or
    one that is too long, is asked for again, with the reason; the episode shows
    none of that. Thoughts and text beside calls are left out.

    Raises:
      TeacherFailed: no message could be used, with all tries.
      NoAnswer: the endpoint gave none.
    """
    messages = self._messages(self._renderer.observed(ids), max_tokens)
    problem = ""
    reason: list[dict[str, Any]] = []
    for attempt in range(_TRIES):
      try:
        body = await self._chat.complete(
          [*messages, *reason],
          seed=derive_seed(seed, attempt),
          tools=self._offered,
        )
        turn = self._turn(body, max_tokens)
      except (_Unusable, TooLarge) as error:
        problem = str(error)[:300]
        again = _AGAIN.format(problem=problem)
        reason = [message_json(ChatMessage(role="user", content=again))]
        continue
      self._said.append(turn.said)
      return Sample(
        ids=np.array(turn.ids, np.int32),
        logp=np.zeros(len(turn.ids), np.float32),
        versions=np.zeros(len(turn.ids), np.int32),
        stopped=True,
      )
    raise TeacherFailed(
      f"turn {len(self._said)}: nothing usable in {_TRIES} tries; {problem}"
    )

  async def close(self, session: str) -> None:
    """Holds nothing."""

  def _messages(
    self, observed: Sequence[str], max_tokens: int
  ) -> list[dict[str, Any]]:
    """The conversation so far, with observations as they are now."""
    if len(observed) != len(self._said):
      raise RuntimeError(
        f"the context shows {len(observed)} observations after"
        f" {len(self._said)} turns"
      )
    system = self._system + _LIMIT.format(tokens=max_tokens)
    messages = [
      ChatMessage(role="system", content=system),
      ChatMessage(role="user", content=self._question),
    ]
    for said, seen in zip(self._said, observed, strict=True):
      messages.append(said)
      for place, call in enumerate(said.tool_calls):
        text = _ELSEWHERE if place else seen
        messages.append(
          ChatMessage(role="tool", content=text, tool_call_id=call.id)
        )
    return [message_json(message) for message in messages]

  def _turn(self, body: bytes, max_tokens: int) -> _Turn:
    try:
      message, finish = read_message(body)
      fields = {"role": "assistant", "content": message.get("content") or ""}
      if message.get("tool_calls"):
        fields["tool_calls"] = message["tool_calls"]
      (reply,) = parse_messages([fields], where="message")
    except (ValueError, RecursionError) as error:
      raise _Unusable(str(error)) from error
    if finish == "length":
      raise _Unusable("it was cut off before its end")
    if reply.tool_calls:
      return self._calling(reply.tool_calls, max_tokens)
    return self._final(without_thoughts(reply.content), max_tokens)

  def _calling(self, calls: Sequence[ChatCall], max_tokens: int) -> _Turn:
    wanted = [self._checked(call) for call in calls]
    ids = self._fitting(self._renderer.calls(wanted), max_tokens)
    if list(self._renderer.parse(ids, self._names).calls) != wanted:
      raise _Unusable("the policy's chat format can't say these calls")
    turn = len(self._said)
    said = tuple(
      ChatCall(
        id=f"call_{turn}_{place}",
        name=call.name,
        arguments=json.dumps(self._tools.arguments(call), ensure_ascii=False),
      )
      for place, call in enumerate(wanted)
    )
    return _Turn(said=ChatMessage(role="assistant", tool_calls=said), ids=ids)

  def _final(self, text: str, max_tokens: int) -> _Turn:
    if not text:
      raise _Unusable("it neither calls a tool nor says anything")
    ids = self._fitting(self._renderer.answer(text), max_tokens)
    final = self._renderer.parse(ids, self._names).final
    if final is None or final.split() != text.split():
      raise _Unusable("the policy's chat format can't say this answer")
    return _Turn(said=ChatMessage(role="assistant", content=text), ids=ids)

  @property
  def _names(self) -> Collection[str]:
    return self._tools.tools.keys()

  def _checked(self, call: ChatCall) -> ToolCall:
    """Raises _Unusable for a call that its tool's schema refuses."""
    checker = CallChecker(self._offered, "")
    delta = checker.named(call.name, call.arguments)
    found = (
      self._tools.call(delta.call)
      if delta.call
      else MalformedCall(text=delta.text, problem=delta.problem)
    )
    if isinstance(found, MalformedCall):
      raise _Unusable(f"{found.problem}: {found.text[:100]}")
    return found

  @staticmethod
  def _fitting(ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    if len(ids) > max_tokens:
      raise _Unusable(
        f"it has {len(ids)} tokens, and there is room for {max_tokens}"
      )
    return tuple(ids)
