"""Which renderer agents of a published model speak through."""

from __future__ import annotations

from collections.abc import Sequence

from arl_jax.chat.chatml_renderer import ChatMLRenderer
from arl_jax.chat.formats import format_of
from arl_jax.chat.harmony_renderer import HarmonyRenderer
from arl_jax.chat.messages import Tool
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.renderer import AgentRenderer


def renderer_of(
  tokenizer: PretrainedTokenizer, tools: Sequence[Tool], system: str
) -> AgentRenderer:
  """The renderer of a model's own chat format.

  Args:
    tokenizer: of the model.
    tools: that the policy may call, each with one argument.
    system: what the policy is told before the question.

  Raises:
    ValueError: agents speak no format of this tokenizer's, or a tool has not
      exactly one argument.
  """
  chat_format = format_of(tokenizer)
  if chat_format.name == "harmony":
    return HarmonyRenderer(tokenizer, chat_format, tools, system)
  # ChatML says nothing of tools; Qwen's way is what many models know.
  chat_format = format_of(tokenizer, "qwen")
  return ChatMLRenderer(tokenizer, chat_format, tools, system)
