"""The harmony format of gpt-oss: messages in channels.

<|start|>system<|message|> identity, effort, channels <|end|>
<|start|>developer<|message|> instructions and tools <|end|>
<|start|>user<|message|> ... <|end|>
<|start|>assistant<|channel|>analysis<|message|> ... <|end|>     sampled from
<|start|>assistant<|channel|>commentary to=functions.f           the first
<|constrain|>json<|message|>{...}<|call|>                        mark on
<|start|>functions.f to=assistant<|channel|>commentary<|message|> ... <|end|>
<|start|>assistant<|channel|>final<|message|> ... <|return|>     sampled
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from arl_jax.chat.messages import ChatMessage, Tool
from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.chat.replies import CallChecker, Delta, malformed
from arl_jax.chat.stream import ReplyReader, StreamParser
from arl_jax.chat.typescript import declare

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
RETURN, CALL = "<|return|>", "<|call|>"
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
EFFORTS = ("low", "medium", "high")
# The words that the model was trained with; others are another prompt.
_IDENTITY = (
  "You are ChatGPT, a large language model trained by OpenAI.\n"
  "Knowledge cutoff: 2024-06\n"
)
_CHANNELS = (
  "# Valid channels: analysis, commentary, final. Channel must be included for"
  " every message."
)
_FUNCTIONS = (
  "\nCalls to these tools must go to the commentary channel: 'functions'."
)
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S*)")
NAMESPACE = "functions."
_Kind = Literal["content", "reasoning", "call", "malformed"]
_KINDS: dict[str, _Kind] = {
  "analysis": "reasoning",
  "commentary": "content",
  "final": "content",
}


class HarmonyFormat(ReplyReader):
  """Renders and parses for one tokenizer.

  Analysis that messages carry is kept, so that turns always append; the
  published rule is to drop it after a final message.
  """

  name = "harmony"

  def __init__(self, tokenizer: PretrainedTokenizer, *, date: str = ""):
    """Takes a tokenizer and what the system message calls the current date.

    Raises:
      ValueError: the tokenizer hasn't the marks of harmony.
    """
    missing = [m for m in MARKS if m not in tokenizer.controls]
    if missing:
      raise ValueError(
        f"chat format harmony: the tokenizer lacks the marks {missing}"
      )
    self._tokenizer = tokenizer
    self._date = f"Current date: {date}\n" if date else ""
    self._marks = {mark: tokenizer.controls[mark] for mark in MARKS}
    ends = (self._marks[RETURN], self._marks[CALL])
    self.stop_ids = tuple(dict.fromkeys((*ends, *tokenizer.eos_ids)))

  def render(
    self,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
    effort: str | None = None,
  ) -> list[int]:
    """Ids of a conversation.

    Raises:
      ValueError: a text has no encoding, or `effort` isn't in `EFFORTS`.
    """
    if effort not in (None, *EFFORTS):
      raise ValueError(
        f"reasoning_effort: {effort!r:.40}, must be one of {', '.join(EFFORTS)}"
      )
    first = 0
    while first < len(messages) and messages[first].role in (
      "system",
      "developer",
    ):
      first += 1
    functions = _FUNCTIONS if tools else ""
    ids = self._message(
      "system",
      f"{_IDENTITY}{self._date}\nReasoning: {effort or 'medium'}\n\n"
      f"{_CHANNELS}{functions}",
    )
    sections = []
    instructions = "\n\n".join(m.content for m in messages[:first] if m.content)
    if instructions:
      sections.append(f"# Instructions\n\n{instructions}")
    if tools:
      sections.append(f"# Tools\n\n## functions\n\n{declare(tools)}")
    if sections:
      ids += self._message("developer", "\n\n".join(sections))
    ids += self._turns(messages[first:])
    return [*ids, *self._open()] if add_generation_prompt else ids

  def append(
    self,
    ids: Sequence[int],
    history: Sequence[ChatMessage],
    new: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    effort: str | None = None,
  ) -> list[int]:
    """Ids to add to `ids`, which end with a sampled turn, whole or cut off.

    A <|return|> that was sampled stays, though a new rendering has <|end|>.
    """
    del history, tools, effort  # What they say is in `ids`.
    ends = [self._marks[mark] for mark in (END, CALL, RETURN)]
    forced = [] if ids and ids[-1] in ends else [self._marks[END]]
    return [*forced, *self._turns(new), *self._open()]

  def parser(
    self,
    tools: Sequence[Tool] = (),
    *,
    call_prefix: str = "call_",
    effort: str | None = None,
  ) -> StreamParser:
    """A parser of one reply that is yet to be sampled."""
    del effort
    return HarmonyParser(self._tokenizer, tools=tools, call_prefix=call_prefix)

  def _turns(self, messages: Sequence[ChatMessage]) -> list[int]:
    ids: list[int] = []
    for message in messages:
      if message.role == "user":
        ids += self._message("user", message.content)
      elif message.role == "assistant":
        ids += self._assistant(message)
      elif message.role == "tool":
        author = f"{NAMESPACE}{message.name} to=assistant"
        ids += self._message(author, message.content, channel="commentary")
      else:
        text = f"# Instructions\n\n{message.content}"
        ids += self._message("developer", text)
    return ids

  def _assistant(self, message: ChatMessage) -> list[int]:
    ids: list[int] = []
    if message.reasoning:
      ids += self._message("assistant", message.reasoning, channel="analysis")
    # Before calls it is a preamble.
    channel = "commentary" if message.tool_calls else "final"
    if message.content or not message.tool_calls:
      ids += self._message("assistant", message.content, channel=channel)
    for call in message.tool_calls:
      ids += [
        *self._open(),
        self._marks[CHANNEL],
        *self._encode(f"commentary to={NAMESPACE}{call.name} "),
        self._marks[CONSTRAIN],
        *self._encode("json"),
        self._marks[MESSAGE],
        *self._encode(call.arguments),
        self._marks[CALL],
      ]
    return ids

  def _message(self, author: str, text: str, *, channel: str = "") -> list[int]:
    ids = [self._marks[START], *self._encode(author)]
    if channel:
      ids += [self._marks[CHANNEL], *self._encode(channel)]
    body = self._encode(text)
    return [*ids, self._marks[MESSAGE], *body, self._marks[END]]

  def _open(self) -> list[int]:
    return [self._marks[START], *self._encode("assistant")]

  def _encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text) if text else []


class HarmonyParser(StreamParser):
  """Reads messages from behind the first <|start|>assistant on."""

  def __init__(
    self,
    tokenizer: PretrainedTokenizer,
    *,
    tools: Sequence[Tool],
    call_prefix: str,
  ):
    # <|return|> and <|call|> end a sample, but a message may follow in a text.
    marks = {tokenizer.controls.get(mark) for mark in MARKS}
    super().__init__(
      tokenizer,
      tags=(),
      ends=[i for i in tokenizer.eos_ids if i not in marks],
      checker=CallChecker(tools, call_prefix),
    )
    self._tools = bool(tools)
    # Text behind each mark of a header; the author stands before any.
    self._header: dict[str, list[str]] = {"": []}
    self._stray = False  # A mark that no header has, or not twice.
    # Whether <|start|> was read, and whether a message has ended since.
    self._started = self._between = False
    self._in_body = False
    self._kind: _Kind = "malformed"  # Of the body.
    self._problem = ""
    self._name = ""  # Of the tool that is called.
    self._body: list[str] = []  # Of what isn't said at once.
    self._spoilt = False
    self._fresh = True
    self._written: set[str] = set()

  def _on_text(self, text: str) -> None:
    if not self._in_body:
      self._header[next(reversed(self._header))].append(text)
    elif self._kind == "content" or self._kind == "reasoning":
      # A further message on the same channel begins a line.
      again = self._fresh and self._kind in self._written
      self._say(self._kind, "\n" + text if again else text)
      self._fresh = False
      self._written.add(self._kind)
    else:
      self._body.append(text)

  def _on_mark(self, name: str, text: str) -> None:
    if name in (END, CALL, RETURN, START):
      self._close(name)
      self._between, self._started = name != START, True
    elif not self._in_body:
      if name == MESSAGE and not self._between:
        self._in_body = self._fresh = True
        self._read_header()
      elif name in (CHANNEL, CONSTRAIN) and name not in self._header:
        self._header[name] = []
      else:
        self._header[next(reversed(self._header))].append(name)
        self._stray = True
    elif self._kind in ("content", "reasoning"):
      if text:
        self._on_text(text)
    else:
      self._body.append(name)
      self._spoilt = True

  def _read_header(self) -> None:
    """Sets what the message is: author to=...<|channel|>name to=... form."""
    author, channel, form = (
      "".join(self._header.get(mark, ())) for mark in ("", CHANNEL, CONSTRAIN)
    )
    words = _RECIPIENT.sub("", channel).split()
    recipients = _RECIPIENT.findall(author) + _RECIPIENT.findall(channel)
    expected = ["assistant"] if self._started else []
    problem = ""
    if self._stray:
      problem = "a mark out of place"
    elif _RECIPIENT.sub("", author).split() != expected:
      problem = "a message of another author"
    elif not words:
      problem = "a message without a channel"
    elif words[0] not in _KINDS:
      problem = "no such channel"
    elif recipients:
      # Some write the form without its mark.
      problem = self._call_problem(recipients, words[0])
      if [*words[1:], *form.split()] not in ([], ["json"]):
        problem = problem or "the form of a call must be json"
    elif words[1:] or form:
      problem = "a channel's name must be one word"
    self._name = recipients[0].removeprefix(NAMESPACE) if recipients else ""
    self._problem = problem
    if problem:
      self._kind = "malformed"
    else:
      self._kind = "call" if recipients else _KINDS[words[0]]

  def _call_problem(self, recipients: Sequence[str], channel: str) -> str:
    if not self._tools:
      return "no tools were offered"
    if len(recipients) > 1:
      return "a call of more than one tool"
    if not recipients[0].startswith(NAMESPACE):
      return "no such tool"
    if channel != "commentary":
      return "a call must be on the channel commentary"
    return ""

  def _close(self, mark: str) -> None:
    """Says what the message was; `mark` ends it, "" if nothing does."""
    header = "".join(m + "".join(t) for m, t in self._header.items())
    body = "".join(self._body)
    if self._in_body:
      if self._kind == "call":
        self._out.append(self._call(mark, body))
      elif self._kind == "malformed":
        self._out.append(malformed(f"{header}{MESSAGE}{body}", self._problem))
    elif self._between and header.strip():
      self._out.append(malformed(header, "text outside of a message"))
    # Cut off before its body, a message that is no call said nothing.
    elif header.removeprefix("assistant").strip() and (
      mark or _RECIPIENT.search(header)
    ):
      self._out.append(malformed(header, "a message without a body"))
    self._header, self._body = {"": []}, []
    self._in_body = self._spoilt = self._stray = False

  def _call(self, mark: str, body: str) -> Delta:
    problem = ""
    if self._spoilt:
      problem = "a mark inside a call"
    elif not mark:
      problem = "cut off before its end"
    elif mark != CALL:
      problem = f"a call must end with {CALL}, not {mark}"
    if problem:
      return malformed(f"{self._name} {body}", problem)
    return self._checker.named(self._name, body)

  def _on_end(self) -> None:
    self._close("")
