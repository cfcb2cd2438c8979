"""What `Renderer` does, in the harmony format of gpt-oss.

  <|start|>system ... <|end|><|start|>developer ... tools ... <|end|>
  <|start|>user<|message|> question <|end|>
  <|start|>assistant
  <|channel|>commentary to=functions.f <|constrain|>json                sampled
  <|message|>{...}<|call|>
  <|start|>functions.f to=assistant<|channel|>commentary<|message|>
  results, a block a line
  [Token usage: 214/448] <|end|>
  <|start|>assistant ...

A sample ends with its first call, so that a turn has one; thoughts on the
channel analysis stay where they were sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from arl_jax.chat.format_renderer import FormatRenderer
from arl_jax.chat.harmony import (
  CALL,
  CHANNEL,
  CONSTRAIN,
  END,
  MARKS,
  MESSAGE,
  NAMESPACE,
  RETURN,
  START,
)
from arl_jax.types import ToolCall

# Who answers a message that called no tool that there is.
_NOBODY = "error"
_ANSWERED = re.compile(
  re.escape(START)
  + re.escape(NAMESPACE)
  + r"\w+ to=assistant"
  + re.escape(f"{CHANNEL}commentary{MESSAGE}")
  + f"(.*?)\n?{re.escape(END)}",
  re.DOTALL,
)


class HarmonyRenderer(FormatRenderer):
  """Renders and parses with the tokenizer of gpt-oss."""

  def open_turn(self) -> list[int]:
    """What stands before everything the policy samples."""
    return self._written(START, "assistant")

  def open_tool(self, tool: str = "") -> list[int]:
    """Follows the end mark of the policy's message."""
    author = f"{NAMESPACE}{tool or _NOBODY} to=assistant"
    return self._written(START, author, CHANNEL, "commentary", MESSAGE)

  def close(self) -> list[int]:
    """Ends a message of the policy that was cut off."""
    return self._written(END)

  def close_tool(self) -> list[int]:
    return self._written(END)

  def calls(self, calls: Sequence[ToolCall]) -> list[int]:
    """As a policy would sample the first one, which ends the message."""
    call = calls[0]
    body = json.dumps(self._tools.arguments(call), ensure_ascii=False)
    return self._written(
      *(CHANNEL, f"commentary to={NAMESPACE}{call.name} "),
      *(CONSTRAIN, "json", MESSAGE, body, CALL),
    )

  def answer(self, text: str) -> list[int]:
    # A text may be written like a mark, which it isn't.
    return [
      *self._written(CHANNEL, "final", MESSAGE),
      *self.tokenizer.encode(text),
      *self._written(RETURN),
    ]

  def observed(self, ids: Sequence[int]) -> list[str]:
    """Texts of the tools' answers in a context."""
    text = self.tokenizer.decode(ids, skip_special=False)
    return _ANSWERED.findall(text)

  def _written(self, *parts: str) -> list[int]:
    """Marks as such, texts as their tokens."""
    ids: list[int] = []
    for part in parts:
      if part in MARKS:
        ids.append(self.tokenizer.controls[part])
      else:
        ids += self.tokenizer.encode(part)
    return ids
