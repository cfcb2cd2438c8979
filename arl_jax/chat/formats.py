"""Chat formats: which one a tokenizer speaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from arl_jax.chat import harmony, hermes
from arl_jax.chat.harmony import HarmonyFormat
from arl_jax.chat.hermes import HermesFormat
from arl_jax.chat.messages import ChatMessage, Tool, ToolCall
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.replies import Reply
from arl_jax.chat.stream import StreamParser
from arl_jax.chat.template_format import NoAppend, TemplateFormat

__all__ = ["FORMATS", "ChatFormat", "NoAppend", "format_of"]

FORMATS = ("auto", "chatml", "qwen", "harmony", "template")


class ChatFormat(Protocol):
  """Messages <-> ids for one family of models."""

  name: str
  stop_ids: tuple[int, ...]

  def render(
    self,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
    effort: str | None = None,
  ) -> list[int]:
    """Ids of a conversation.

    Args:
      messages: of the conversation.
      tools: that the model may call.
      add_generation_prompt: the assistant's turn is opened.
      effort: of reasoning, as OpenAI names it; None is the model's default.

    Raises:
      ValueError: it can't be rendered.
    """

  def append(
    self,
    ids: Sequence[int],
    history: Sequence[ChatMessage],
    new: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    effort: str | None = None,
  ) -> list[int]:
    """Ids to add so that `new` follows; what was sampled stays as it is.

    Args:
      ids: all so far, up to the last that was sampled. The turn's end is added
        where the sample was cut off.
      history: what they say; the reply, as it was parsed, is last.
      new: further messages.
      tools: as they were.
      effort: as it was.

    Raises:
      NoAppend: this family writes its past anew at this point.
      ValueError: it can't be rendered.
    """

  def parse(
    self,
    ids: Sequence[int],
    tools: Sequence[Tool] = (),
    *,
    call_prefix: str = "call_",
    effort: str | None = None,
  ) -> Reply:
    """See `stream.ReplyReader`."""

  def parser(
    self,
    tools: Sequence[Tool] = (),
    *,
    call_prefix: str = "call_",
    effort: str | None = None,
  ) -> StreamParser:
    """See `stream.ReplyReader`."""


def format_of(
  tokenizer: PretrainedTokenizer, name: str = "auto", *, date: str = ""
) -> ChatFormat:
  """The chat format of a model.

  Args:
    tokenizer: of the model.
    name: one of `FORMATS`. "auto" takes the family that the tokenizer has the
      marks of, if it writes what the checkpoint's template does, else that
      template.
    date: today, for a family that tells it to the model.

  Raises:
    ValueError: the tokenizer hasn't what the format needs; or nothing fits.
  """
  if name not in FORMATS:
    raise ValueError(
      f"chat format {name!r:.40}, must be one of {', '.join(FORMATS)}"
    )
  if name == "harmony":
    return HarmonyFormat(tokenizer, date=date)
  if name == "template":
    return TemplateFormat(tokenizer)
  if name != "auto":
    return _hermes(tokenizer, name)
  if all(mark in tokenizer.controls for mark in harmony.MARKS):
    return HarmonyFormat(tokenizer, date=date)
  template = tokenizer.chat_template
  if all(m in tokenizer.controls for m in (hermes.START, hermes.END)):
    calls = hermes.CALL in tokenizer.controls or hermes.CALL in (template or "")
    found = _hermes(tokenizer, "qwen" if calls else "chatml")
    if template is None or _agree(found, TemplateFormat(tokenizer), template):
      return found
  if template is not None:
    return TemplateFormat(tokenizer)
  raise ValueError(
    "chat format 'auto': the tokenizer has the marks of no known family and no"
    " chat template; a base model has none"
  )


def _hermes(tokenizer: PretrainedTokenizer, name: str) -> HermesFormat:
  thought = "</think>"
  return HermesFormat(
    tokenizer,
    name=name,
    default_system=_default_system(tokenizer),
    thinks=thought in tokenizer.controls
    or thought in (tokenizer.chat_template or ""),
  )


def _default_system(tokenizer: PretrainedTokenizer) -> str:
  """What the template tells a model that nobody told anything."""
  if tokenizer.chat_template is None:
    return ""
  asked = [{"role": "user", "content": "?"}]
  try:
    text = tokenizer.render(asked, add_generation_prompt=False)
  except ValueError:
    return ""
  before, _, rest = text.partition(f"{hermes.START}system\n")
  system, _, rest = rest.partition(f"{hermes.END}\n")
  turn = f"{hermes.START}user\n?{hermes.END}\n"
  return system if not before and rest == turn else ""


def _agree(one: ChatFormat, other: ChatFormat, template: str) -> bool:
  """Whether both write the same ids for conversations of the usual shapes."""
  system = ChatMessage(role="system", content="Be brief.")
  user = ChatMessage(role="user", content="Which colour?")
  said = ChatMessage(role="assistant", content="Red, blue.")
  tool = Tool(
    name="look",
    description="Looks.",
    parameters={"type": "object", "properties": {"at": {"type": "string"}}},
  )
  call = ToolCall(id="c0", name="look", arguments='{"at": "it"}')
  called = ChatMessage(role="assistant", content="So.", tool_calls=(call,))
  seen = ChatMessage(role="tool", content="red", tool_call_id="c0", name="look")
  cases: list[tuple[list[ChatMessage], list[Tool]]] = [
    ([user], []),
    ([system, user, said, user], []),
  ]
  if "tools" in template:
    cases += [
      ([user], [tool]),
      ([system, user, called, seen, seen], [tool]),
    ]
  try:
    return all(one.render(*case) == other.render(*case) for case in cases)
  except ValueError:
    return False
