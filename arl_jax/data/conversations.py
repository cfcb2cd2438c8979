r"""Conversations as segments, trained where the assistant would have sampled.

In ChatML, with what is trained underlined:

  <|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n
                                                           ¯¯¯¯¯¯¯¯¯¯¯

What the assistant is given and what it writes is read off the chat template
itself: the conversation up to its turn, with the turn opened, must be how the
whole conversation begins, token by token.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from arl_jax.chat.pretrained import PretrainedTokenizer
from arl_jax.types import NO_VERSION, Role, Segment

ROLES = ("system", "user", "assistant", "tool")
_FIELDS = ("role", "content", "train")
# Each is rendered with all before it, so that time grows with the square.
_MAX_MESSAGES = 512
# How many conversations show what a data set is like.
_TRIAL = 1000


class Refused(ValueError):
  """A conversation that can't be trained on.

  Attributes:
    reason: for counters; "malformed" messages, "too_long", "template" (the chat
      template fails on it, rewrites earlier turns or never ends one), or
      "nothing_trained".
  """

  def __init__(self, reason: str, message: str):
    super().__init__(message)
    self.reason = reason


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
  role: str
  content: str
  train: bool


def to_segment(
  messages: Any,
  tokenizer: PretrainedTokenizer,
  *,
  max_tokens: int,
  tools: Any = None,
  variables: Mapping[str, Any] | None = None,
) -> Segment:
  """A conversation as `tokenizer.encode_chat` encodes it.

  `Segment.sampled` is True from the first token of an assistant's message to
  the mark that ends the turn, the mark included; its header, and what the
  template writes behind the mark, are `Role.FORCED`. Messages of tools are
  `Role.TOOL`, where the template shows their limits, and the rest is
  `Role.PROMPT`. An assistant's message with `"train": false` keeps
  `Role.SAMPLED` and isn't trained. Where a template doesn't open turns, the
  assistant has to write its header too, and is trained on it.

  Args:
    messages: a list of objects with `role` (one of `ROLES`), `content` (a text)
      and perhaps `train` (a boolean, which says nothing of other roles).
    tokenizer: with a chat template.
    max_tokens: of the segment, >= 1.
    tools: JSON schemas of functions, for the template.
    variables: further ones that the template reads.

  Raises:
    Refused: names the message and what would be right.
  """
  if max_tokens < 1:
    raise ValueError(f"max_tokens is {max_tokens}, not >= 1")
  checked = _checked(messages)
  if tools is not None and not (
    isinstance(tools, list) and all(isinstance(t, dict) for t in tools)
  ):
    raise Refused(
      "malformed", f"tools is {tools!r:.80}, must be a list of objects"
    )
  if not any(m.role == "assistant" and m.train for m in checked):
    raise Refused(
      "nothing_trained", "messages hold none of the assistant's that is trained"
    )

  def encode(count: int, opened: bool) -> list[int]:
    return tokenizer.encode_chat(
      [{"role": m.role, "content": m.content} for m in checked[:count]],
      tools=tools,
      add_generation_prompt=opened,
      variables=variables,
    )

  try:
    ids = encode(len(checked), False)
  except ValueError as error:
    raise Refused("template", f"messages can't be encoded: {error}") from error
  if len(ids) > max_tokens:
    raise Refused(
      "too_long",
      f"messages are {len(ids)} tokens, more than max_tokens {max_tokens}",
    )
  roles, sampled = _marked(checked, tokenizer, ids, encode)
  return Segment(
    ids=np.asarray(ids, np.int32),
    roles=roles,
    sampled=sampled,
    behaviour_logp=np.zeros(len(ids), np.float32),
    policy_version=np.where(sampled, 0, NO_VERSION).astype(np.int32),
  )


def _checked(messages: Any) -> list[_Message]:
  if not isinstance(messages, list) or not messages:
    raise Refused(
      "malformed", f"messages is {messages!r:.80}, must be a list of objects"
    )
  if len(messages) > _MAX_MESSAGES:
    raise Refused(
      "too_long", f"{len(messages)} messages, must be at most {_MAX_MESSAGES}"
    )
  return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(value: Any, where: str) -> _Message:
  if not isinstance(value, dict):
    raise Refused("malformed", f"{where} is {value!r:.80}, must be an object")
  surplus = [name for name in value if name not in _FIELDS]
  if surplus:
    raise Refused(
      "malformed",
      f"{where} has the field {surplus[0]!r:.80}, must be one of"
      f" {', '.join(_FIELDS)}",
    )
  role, content = value.get("role"), value.get("content")
  if role not in ROLES:
    raise Refused(
      "malformed",
      f"{where}.role is {role!r:.80}, must be one of {', '.join(ROLES)}",
    )
  if not isinstance(content, str):
    raise Refused(
      "malformed", f"{where}.content is {content!r:.80}, must be a text"
    )
  try:
    content.encode()
  except UnicodeEncodeError:
    raise Refused(
      "malformed",
      f"{where}.content is {content!r:.80}, must not have half of a surrogate"
      " pair",
    ) from None
  train = value.get("train", True)
  if not isinstance(train, bool):
    raise Refused(
      "malformed", f"{where}.train is {train!r:.80}, must be true or false"
    )
  return _Message(role, content, train)


def _marked(
  messages: Sequence[_Message],
  tokenizer: PretrainedTokenizer,
  ids: Sequence[int],
  encode: Callable[[int, bool], list[int]],
) -> tuple[np.ndarray, np.ndarray]:
  """(roles, sampled) of a whole conversation's ids.

  Args:
    messages: [n].
    tokenizer: that encoded them.
    ids: of all messages.
    encode: the ids of the first so many, and perhaps a turn opened.
  """
  roles = np.full(len(ids), Role.PROMPT, np.uint8)
  sampled = np.zeros(len(ids), np.bool_)
  # Where the last part whose limits are known ends, and what came since.
  at = 0
  pending: list[Role] = []
  for i, message in enumerate(messages):
    where = f"messages[{i}]"
    if message.role != "assistant":
      pending.append(Role.TOOL if message.role == "tool" else Role.PROMPT)
      # Some templates write several messages as one turn; then it is no limit.
      if (stop := _limit(encode, i + 1, ids)) is not None and stop >= at:
        roles[at:stop] = _common(pending)
        at, pending = stop, []
      continue
    begin = _required(encode, i, True, ids, where)
    stop = _required(encode, i + 1, False, ids, where)
    if not at <= begin <= stop:
      raise Refused(
        "template", f"{where} must follow what is before it in the template"
      )
    roles[at:begin] = _common(pending) if pending else Role.FORCED
    end = begin + _turn_length(ids[begin:stop], tokenizer, where)
    roles[begin:end] = Role.SAMPLED
    sampled[begin:end] = message.train
    roles[end:stop] = Role.FORCED
    at, pending = stop, []
  return roles, sampled


def _common(roles: Sequence[Role]) -> Role:
  return roles[0] if len(set(roles)) == 1 else Role.PROMPT


def _limit(
  encode: Callable[[int, bool], list[int]], count: int, ids: Sequence[int]
) -> int | None:
  """Tokens of the first `count` messages; None if the whole begins otherwise.

  A template may also refuse a conversation that breaks off.
  """
  try:
    part = encode(count, False)
  except ValueError:
    return None
  return len(part) if part == ids[: len(part)] else None


def _required(
  encode: Callable[[int, bool], list[int]],
  count: int,
  opened: bool,
  ids: Sequence[int],
  where: str,
) -> int:
  """Tokens of a part that the whole conversation must begin with."""
  what = "up to it, with its turn opened," if opened else "up to its end"
  try:
    part = encode(count, opened)
  except ValueError as error:
    raise Refused(
      "template", f"{where}: what is {what} can't be encoded: {error}"
    ) from error
  if part != ids[: len(part)]:
    pairs = enumerate(zip(part, ids, strict=False))
    at = next((k for k, (a, b) in pairs if a != b), len(ids))
    raise Refused(
      "template",
      f"{where}: what is {what} differs from the whole conversation at token"
      f" {at}; the chat template must keep earlier turns as they were, and no"
      " message may begin with what joins with the header into one token",
    )
  return len(part)


def _turn_length(
  written: Sequence[int], tokenizer: PretrainedTokenizer, where: str
) -> int:
  """Tokens up to the mark that ends the turn, with it.

  No content has marks among its ids, so all of them are the template's.
  """
  marks = set(tokenizer.controls.values())
  ends = [n for n, i in enumerate(written, 1) if i in tokenizer.eos_ids][:1]
  # Files of base models name the end of a text only, not the template's mark.
  ends = ends or [n for n, i in enumerate(written, 1) if i in marks][-1:]
  if not ends or tokenizer.decode(written[ends[0] :]).strip():
    raise Refused(
      "template",
      f"{where}: the chat template must end it with a mark, and write only"
      f" spaces behind; it ends with {_tail(written, tokenizer)!r}",
    )
  return ends[0]


def _tail(written: Sequence[int], tokenizer: PretrainedTokenizer) -> str:
  return tokenizer.decode(written[-8:], skip_special=False)[-40:]


class Segments(Iterator[Segment]):
  """Segments of those examples that can be trained on.

  It reads no further than it has to: after each segment, the examples' own
  position is the one to resume from.

  Attributes:
    accepted: segments handed out.
    refused: examples left out, by `Refused.reason`.
  """

  def __init__(
    self,
    examples: Iterable[Mapping[str, Any]],
    tokenizer: PretrainedTokenizer,
    *,
    max_tokens: int,
    variables: Mapping[str, Any] | None = None,
    on_refused: Callable[[str, Refused], None] | None = None,
  ):
    """Reads nothing yet.

    Args:
      examples: with `messages`, and perhaps `tools` and `where`.
      tokenizer: as for `to_segment`.
      max_tokens: of a segment.
      variables: as for `to_segment`.
      on_refused: told of each refusal: where the example is from, and why.

    Raises:
      ValueError: the tokenizer has no chat template, or max_tokens < 1.
    """
    if tokenizer.chat_template is None:
      raise ValueError("the tokenizer has no chat template; it must have one")
    if max_tokens < 1:
      raise ValueError(f"max_tokens is {max_tokens}, not >= 1")
    self.accepted = 0
    self.refused: Counter[str] = Counter()
    self._examples = iter(examples)
    self._tokenizer, self._max_tokens = tokenizer, max_tokens
    self._variables = variables
    self._on_refused = on_refused
    self._first = ""

  def __iter__(self) -> Self:
    return self

  def __next__(self) -> Segment:
    """The next one.

    Raises:
      ValueError: more than half of the first 1000 examples were refused, or
        all there are; or an example has no messages at all.
    """
    for example in self._examples:
      if "messages" not in example:
        raise ValueError(
          f"{example.get('where', 'an example')} has {', '.join(example)}; it"
          " must have messages"
        )
      try:
        segment = to_segment(
          example["messages"],
          self._tokenizer,
          max_tokens=self._max_tokens,
          tools=example.get("tools"),
          variables=self._variables,
        )
      except Refused as refusal:
        self._refuse(str(example.get("where", "an example")), refusal)
        continue
      self.accepted += 1
      return segment
    if self.refused and not self.accepted:
      raise ValueError(f"no conversation can be trained on; {self._summary()}")
    raise StopIteration

  def _refuse(self, where: str, refusal: Refused) -> None:
    self.refused[refusal.reason] += 1
    self._first = self._first or f"{where}: {refusal}"
    if self._on_refused is not None:
      self._on_refused(where, refusal)
    refused = self.refused.total()
    if refused > _TRIAL // 2 and refused + self.accepted <= _TRIAL:
      raise ValueError(
        f"{refused} of the first {refused + self.accepted} conversations can't"
        f" be trained on, more than half of {_TRIAL}; {self._summary()}"
      )

  def _summary(self) -> str:
    counts = ", ".join(f"{n} {r}" for r, n in sorted(self.refused.items()))
    return f"refused {counts}; the first: {self._first}"
