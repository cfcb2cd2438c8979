"""Tokenizers of published models, with the chat template they came with.

From a folder as Hugging Face has it, or from a GGUF file.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from arl_jax.chat.gguf_header import read_header
from arl_jax.chat.template import ChatTemplate
from arl_jax.chat.tokenizer_files import Parts, folder_parts, gguf_parts

# Noncharacters, which no text has a use for: they stand for marks in messages.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
# Characters from which on other threads run while a text is encoded.
_LONG = 4096


class PretrainedTokenizer:
  """Text <-> ids, and messages -> text.

  Nothing is added to a text, no beginning or end; a chat template writes its
  own. `encode` never yields a mark for text that spells it, unless asked. Bytes
  that a vocabulary lacks vanish, as they do elsewhere.

  Attributes:
    vocab_size: largest id + 1; a model may have more rows.
    eos_ids: ids that end a turn; may be empty.
    bos_id: what stands at the start of a text, or None.
    controls: marks and their ids. All added tokens are, not just those called
      special: models also mark their roles, tools and thoughts with others.
    chat_template: the source, or None.
  """

  def __init__(self, parts: Parts):
    self._path, self._special = parts.path, parts.special
    self._all = _build(parts.path, parts.spec)
    added = parts.spec.get("added_tokens") or []
    for token in added:
      found = self._all.token_to_id(token["content"])
      if token["content"] and found != token["id"]:
        raise ValueError(
          f"{parts.path}: field 'added_tokens' gives {token['content']!r:.80}"
          f" the id {token['id']}, the vocabulary {found}"
        )
    # Runs of spaces are added tokens of some models; they are mere text.
    marks = [
      t
      for t in added
      if t["content"] and (t.get("special") or not t["content"].isspace())
    ]
    self.controls: dict[str, int] = {t["content"]: t["id"] for t in marks}
    guarded = [t | {"special": True} if t in marks else t for t in added]
    self._plain = _build(parts.path, parts.spec | {"added_tokens": guarded})
    self._plain.encode_special_tokens = True
    # What text unknown to the vocabulary becomes; it forges nothing.
    unknown = _unknown(parts.spec["model"])
    self._guarded = {i for t, i in self.controls.items() if t != unknown}
    used = self._all.get_vocab(with_added_tokens=True).values()
    self.vocab_size = max(parts.size, 1 + max(used, default=-1))
    for name, ids in (("eos", parts.eos_ids), ("bos", (parts.bos_id,))):
      for i in ids:
        if i is not None and not 0 <= i < self.vocab_size:
          raise ValueError(
            f"{parts.path}: {name} id {i}, must be 0 to {self.vocab_size - 1}"
          )
    self.eos_ids, self.bos_id = parts.eos_ids, parts.bos_id
    self.chat_template = parts.template
    # Compiled when it is needed: one that can't be is no reason not to encode.
    self._template: ChatTemplate | None = None
    names = sorted([*self.controls, _OPEN, _CLOSE], key=len, reverse=True)
    self._spelled = re.compile("|".join(map(re.escape, names)))
    self._names = names

  def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
    """Ids of a text.

    Args:
      text: any.
      allow_special: text that spells a mark becomes that mark. Only for text
        that no user, document or tool had a hand in.

    Raises:
      ValueError: it can't be: half of a surrogate pair, or a word that the
        vocabulary has just as a mark.
    """
    tokenizer = self._all if allow_special else self._plain
    try:
      if len(text) >= _LONG:
        # The library lets go of the interpreter's lock for batches only.
        (fast,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        if allow_special or self._guarded.isdisjoint(fast.ids):
          return fast.ids
      done = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # The library raises no narrower one.
      raise ValueError(
        f"{self._path}: the text {text!r:.80} has no encoding: {error}"
      ) from error
    if allow_special or self._guarded.isdisjoint(done.ids):
      return done.ids
    # The vocabulary itself may have a mark that a word of the text equals.
    ids: list[int] = []
    for token, (start, stop) in zip(done.ids, done.offsets, strict=True):
      ids += (
        [token] if token not in self._guarded else self._spell(text[start:stop])
      )
    return ids

  def _spell(self, word: str) -> list[int]:
    ids: list[int] = []
    for letter in word:
      ids += self._plain.encode(letter, add_special_tokens=False).ids
    if not self._guarded.isdisjoint(ids):
      raise ValueError(f"{self._path}: {word!r:.80} is a mark, never a text")
    return ids

  def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """Text of ids; special tokens vanish, or read as they are called.

    Ids without a token vanish: a model may have more rows than tokens. Bytes
    that aren't UTF-8 read as U+FFFD.
    """
    ids = [int(i) for i in ids]
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 32:
      raise ValueError(f"ids from {min(ids)} to {max(ids)}, must be 0 to 2**32")
    return self._all.decode(ids, skip_special_tokens=skip_special)

  def piece(self, token: int) -> str:
    """How one token reads, for people."""
    return self.decode([token], skip_special=False)

  def count(self, text: str) -> int:
    """Tokens of `text`."""
    return len(self.encode(text))

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
  ) -> str:
    """What the chat template makes of messages.

    For people and comparisons. To encode it, use `encode_chat`: here, text of
    a message that spells a mark looks like the template's own.

    Args:
      messages: mappings with `role` and `content`, or what the template reads.
      tools: JSON schemas of functions.
      add_generation_prompt: the assistant's turn is opened.
      variables: further ones that the template reads, such as enable_thinking.

    Raises:
      ValueError: there is no template, or it fails on these messages.
    """
    if self.chat_template is None:
      raise ValueError(f"{self._path}: no chat template")
    if self._template is None:
      self._template = ChatTemplate(self.chat_template)
    values = {
      **self._special,
      "messages": messages,
      "tools": tools,
      "documents": None,
      "add_generation_prompt": add_generation_prompt,
      **(variables or {}),
    }
    return self._template.render(values)

  def encode_chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
  ) -> list[int]:
    """Ids of `render`'s text, where marks are the template's alone.

    A mark that a message or tool spells, also one of the assistant's, is text:
    the template doesn't see it, and none comes of it.
    """
    text = self.render_guarded(
      messages,
      tools=tools,
      add_generation_prompt=add_generation_prompt,
      variables=variables,
    )
    return self.encode_guarded(text)

  def render_guarded(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
  ) -> str:
    """`render`'s text with numbers for marks that messages and tools spell.

    All marks in it are the template's; `encode_guarded` gives its ids.
    """
    return self.render(
      self._hidden(messages),
      tools=self._hidden(tools),
      add_generation_prompt=add_generation_prompt,
      variables=variables,
    )

  def encode_guarded(self, text: str) -> list[int]:
    """Ids of what `render_guarded` wrote, or of a part of it."""
    ids: list[int] = []
    # Text and number of a hidden mark by turns.
    pieces = re.split(f"{_OPEN}([0-9]+){_CLOSE}", text)
    for i, piece in enumerate(pieces):
      if i % 2:
        ids += self.encode(self._names[int(piece) % len(self._names)])
      elif piece:
        ids += self.encode(piece, allow_special=True)
    return ids

  def _hidden(self, value: Any) -> Any:
    """`value` with numbers instead of the marks that its texts spell."""
    if isinstance(value, str):
      return self._spelled.sub(
        lambda m: f"{_OPEN}{self._names.index(m[0])}{_CLOSE}", value
      )
    if isinstance(value, Mapping):
      # A name that a template asks for is an identifier, a mark isn't.
      return {
        k if k.isidentifier() else self._hidden(k): self._hidden(v)
        for k, v in value.items()
      }
    if isinstance(value, (list, tuple)):
      return [self._hidden(v) for v in value]
    return value


def load_tokenizer(path: str | os.PathLike[str]) -> PretrainedTokenizer:
  """Loads a folder with a tokenizer.json, or a .gguf file.

  Raises:
    ValueError: neither of them, or a file there is at fault. One line that
      names the file, the field and its value.
    OSError: a file can't be read.
  """
  where = pathlib.Path(path)
  if where.is_dir():
    return PretrainedTokenizer(folder_parts(where))
  if where.suffix == ".gguf":
    return PretrainedTokenizer(gguf_parts(read_header(where)))
  raise ValueError(f"{where}: must be a folder or a .gguf file")


def _build(path: str, spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
  try:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
  except BaseException as error:
    # The library raises no narrower one, and for a panic not even that.
    if not isinstance(error, Exception) and "Panic" not in type(error).__name__:
      raise
    reason = " ".join(str(error).split())[:200]
    raise ValueError(f"{path}: no tokenizer can be made: {reason}") from error
  # Some files cut and fill texts, as their model was trained.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


def _unknown(model: Mapping[str, Any]) -> str | None:
  index, vocab = model.get("unk_id"), model.get("vocab")
  if isinstance(index, int) and isinstance(vocab, list):
    return vocab[index][0]  # A unigram model.
  return model.get("unk_token")
