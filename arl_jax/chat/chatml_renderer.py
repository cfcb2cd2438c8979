"""What `Renderer` does, in the chat format of a ChatML model.

  <|im_start|>system ... tools ... <|im_end|>
  <|im_start|>user question <|im_end|>
  <|im_start|>assistant
  <tool_call> {"name": ..., "arguments": {...}} </tool_call><|im_end|>  sampled
  <|im_start|>user <tool_response> results, a block a line
  [Token usage: 214/448] </tool_response><|im_end|>
  <|im_start|>assistant ...

All calls of a turn are answered in one response, whose blocks come and go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from arl_jax.chat.format_renderer import FormatRenderer
from arl_jax.chat.hermes import CALL, CALLED, END, START
from arl_jax.types import ToolCall

_RESPONSE, _RESPONDED = "<tool_response>", "</tool_response>"
_ANSWERED = re.compile(f"{_RESPONSE}\n(.*?)\n{_RESPONDED}", re.DOTALL)


class ChatMLRenderer(FormatRenderer):
  """Renders and parses with the tokenizer of a ChatML model."""

  @property
  def end(self) -> int:
    """Ends every message."""
    return self.tokenizer.controls[END]

  def open_turn(self) -> list[int]:
    """What stands before everything the policy samples."""
    return [
      self.tokenizer.controls[START],
      *self.tokenizer.encode("assistant\n"),
    ]

  def open_tool(self, tool: str = "") -> list[int]:
    """Follows the end mark of the policy's message."""
    del tool
    encode = self.tokenizer.encode
    return [
      *encode("\n"),
      self.tokenizer.controls[START],
      *self._tagged(f"user\n{_RESPONSE}\n"),
    ]

  def close(self) -> list[int]:
    """Ends a message of the policy that was cut off."""
    return [self.end]

  def close_tool(self) -> list[int]:
    return [
      *self._tagged(f"{_RESPONDED}"),
      self.end,
      *self.tokenizer.encode("\n"),
    ]

  def calls(self, calls: Sequence[ToolCall]) -> list[int]:
    written = "\n".join(self._written(call) for call in calls)
    return [*self._tagged(written), self.end]

  def answer(self, text: str) -> list[int]:
    return [*self.tokenizer.encode(text), self.end]

  def _written(self, call: ToolCall) -> str:
    body = json.dumps(
      {"name": call.name, "arguments": self._tools.arguments(call)},
      ensure_ascii=False,
    )
    return f"{CALL}\n{body}\n{CALLED}"

  def observed(self, ids: Sequence[int]) -> list[str]:
    """Texts of the tools' answers in a context."""
    text = self.tokenizer.decode(ids, skip_special=False)
    return _ANSWERED.findall(text)

  def _tagged(self, text: str) -> list[int]:
    """Tags are tokens where the vocabulary has them, and nothing else is."""
    controls = self.tokenizer.controls
    tags = (CALL, CALLED, _RESPONSE, _RESPONDED)
    known = [tag for tag in tags if tag in controls]
    if not known:
      return self.tokenizer.encode(text)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, known))})", text):
      if part in known:
        ids.append(controls[part])
      elif part:
        ids += self.tokenizer.encode(part)
    return ids
