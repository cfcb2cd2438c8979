"""What renderers of published chat formats have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from arl_jax.chat.formats import ChatFormat
from arl_jax.chat.messages import ChatMessage, Tool
from arl_jax.chat.one_argument import OneArgument
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.renderer import Message, usage_line
from arl_jax.chat.replies import MalformedCall
from arl_jax.types import ToolCall


class FormatRenderer:
  """The part of an `AgentRenderer` that follows from a `ChatFormat`.

  Each tool takes one argument, a text or a list of words, as the only property
  of its JSON schema.
  """

  def __init__(
    self,
    tokenizer: PretrainedTokenizer,
    chat_format: ChatFormat,
    tools: Sequence[Tool],
    system: str,
  ):
    """Takes a tokenizer.

    Args:
      tokenizer: of the model.
      chat_format: that it speaks.
      tools: that the policy may call.
      system: what the policy is told before the question.

    Raises:
      ValueError: a tool has not exactly one argument.
    """
    self.tokenizer = tokenizer
    self._format = chat_format
    self._tools = OneArgument(tools)
    self._system = ChatMessage(role="system", content=system)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return self._format.stop_ids

  def block(self, text: str) -> list[int]:
    """One line of an observation."""
    return self.tokenizer.encode(" ".join(text.split()) + "\n")

  def usage(self, used: int, budget: int) -> list[int]:
    return self.block(usage_line(used, budget))

  def prompt(
    self, text: str, tools: Collection[str] | None = None
  ) -> list[int]:
    question = ChatMessage(role="user", content=text)
    return self._format.render(
      [self._system, question],
      self._offered(self._tools.tools if tools is None else tools),
      add_generation_prompt=False,
    )

  def parse(self, ids: Sequence[int], tools: Collection[str]) -> Message:
    """Parses sampled ids; the end mark may be there or not.

    Text and thoughts beside calls are the policy's own affair.
    """
    reply = self._format.parse([int(i) for i in ids], self._offered(tools))
    if not (reply.tool_calls or reply.malformed):
      return Message(final=reply.content.strip())
    calls: list[ToolCall | MalformedCall] = list(reply.malformed)
    calls += [self._tools.call(call) for call in reply.tool_calls]
    return Message(calls=tuple(calls))

  def _offered(self, names: Collection[str]) -> list[Tool]:
    return [t for name, t in self._tools.tools.items() if name in names]
