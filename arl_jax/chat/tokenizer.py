"""A sentencepiece tokenizer with marks that text can never spell."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

import sentencepiece

# Marks of the compact chat format. They are control symbols of the
# sentencepiece model: `encode` yields them for no text at all, so neither a
# document nor a user can forge a turn.
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
TOOL = "<|tool|>"
CALL = "<|call|>"
END = "<|end|>"
_SPACE = "\u2581"
CONTROLS = (USER, ASSISTANT, TOOL, CALL, END)


class Tokenizer:
  """Text <-> ids.

  White space is significant and nothing is prefixed: a word in the middle of a
  sentence is encoded with the space before it.
  """

  def __init__(self, model: bytes):
    """Raises ValueError if `model` isn't one made by `train`."""
    try:
      self._sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
      raise ValueError(f"not a sentencepiece model: {error}") from error
    if not self._sp.vocab_size():
      raise ValueError("not a sentencepiece model: it has no vocabulary")
    self.model = model
    self.controls = {name: self._sp.piece_to_id(name) for name in CONTROLS}
    missing = [n for n, i in self.controls.items() if i == self._sp.unk_id()]
    if missing:
      raise ValueError(f"the tokenizer lacks the marks {missing}")

  @classmethod
  def train(
    cls, texts: Iterable[str], *, vocab_size: int, symbols: Sequence[str] = ()
  ) -> Tokenizer:
    """Trains on `texts`.

    Args:
      texts: any number of documents.
      vocab_size: of the result, everything included.
      symbols: strings that are always one token each.

    Raises:
      ValueError: the texts can't fill or can't fit `vocab_size`.
    """
    lines = (line for text in texts for line in _training_lines(text))
    model = io.BytesIO()
    try:
      sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        control_symbols=list(CONTROLS),
        # The model's own sign for a space; a plain one would never match.
        user_defined_symbols=[s.replace(" ", _SPACE) for s in symbols],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        character_coverage=0.9998,
        bos_id=-1,
        eos_id=-1,
        pad_id=0,
        unk_id=1,
        minloglevel=2,
        num_threads=1,
      )
    except RuntimeError as error:
      raise ValueError(
        f"no tokenizer of vocab_size {vocab_size} can be trained on this text:"
        f" {error}"
      ) from error
    return cls(model.getvalue())

  @property
  def vocab_size(self) -> int:
    return self._sp.vocab_size()

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """What ends a message."""
    return (self.controls[END],)

  def encode(self, text: str) -> list[int]:
    return self._sp.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    """Control symbols vanish; use `piece` to see them."""
    return self._sp.decode([int(i) for i in ids])

  def piece(self, token: int) -> str:
    """How one token reads, for people."""
    text = self._sp.id_to_piece(int(token)).replace(_SPACE, " ")
    return text if text != "<0x0A>" else "\n"

  def count(self, text: str) -> int:
    """Tokens of `text`."""
    return len(self._sp.encode(text))


def _training_lines(text: str) -> Iterable[str]:
  for line in text.splitlines():
    words = line.split()
    if words:
      # Every word with its space in front, as `Renderer` writes text.
      yield " " + " ".join(words)
